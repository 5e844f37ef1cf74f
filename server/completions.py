"""POST /v1/completions: bare prompts continued, streamed and whole."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import engine
from server.answer import Answer, end_of_stream, start_answer
from server.answers import TextCompletion, TextLogprobs
from server.auth import Caller
from server.choice import Delta
from server.errors import BadRequestError, from_exception
from server.http import json_response, read_json
from server.model import ServedModel, check_model
from server.pipeline import TextRules
from server.prompt import Prompt
from server.protocol import CompletionRequest
from server.sampling import MAX_CHOICES, OutputLimit, check_ranges, num_logprobs, sampling_for, stop_strings
from server.serving import Serving
from server.sse import data, event_stream, unless_disconnected
from server.tool_calls import Content

# of one request; more would never find room in the queue, however often they came again
MAX_TEXTS = 64


@dataclass(frozen=True, slots=True)
class TextAnswer:
    answer: Answer
    wants_logprobs: bool
    wants_usage: bool

    def head(self) -> dict[str, Any]:
        answer = self.answer
        return {"id": answer.answer_id, "object": "text_completion", "created": answer.created, "model": answer.model}


class Completions:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response | ASGIApp:
        body, unknown = await read_json(request, CompletionRequest, self._serving.config)
        model = self._serving.model
        caller: Caller = request.state.caller
        check_model(body.model, model, caller)
        check_ranges(body)
        text = await self._start(body, model, caller)
        self._serving.metrics.count_ignored(unknown)
        if body.stream:
            return event_stream(self._serving.config, _events(text, request.state.request_id), text.answer)
        return json_response(await unless_disconnected(request, _whole(text)))

    async def _start(self, body: CompletionRequest, model: ServedModel, caller: Caller) -> TextAnswer:
        logprobs = num_logprobs(body.logprobs is not None, body.logprobs)
        rules = bare_rules(model, body.stop)
        prompts = await model.in_worker(read_prompts, body.prompt, model)
        if (count := len(prompts) * (body.n or 1)) > MAX_TEXTS:
            raise BadRequestError(
                f"n: {len(prompts)} prompts and n {body.n} make {count} texts; at most {MAX_TEXTS} are made at once.",
                param="n",
            )
        limit = OutputLimit(body.max_tokens, model.default_max_tokens, prompt="prompt")
        sampling = sampling_for(body, model, limit, logprobs)
        answer = await start_answer(
            self._serving, model, caller, prompts, rules, sampling, prefix="cmpl-", num_choices=body.n or 1
        )
        options = body.stream_options
        return TextAnswer(answer, logprobs is not None, bool(options and options.include_usage))


def bare_rules(model: ServedModel, stop: str | Sequence[str] | None) -> TextRules:
    """Output read as text: no reasoning, no calls."""
    return TextRules(token_bytes=model.files.vocabulary.token_bytes, splits_reasoning=False, stops=stop_strings(stop))


def read_prompts(prompt: str | list, model: ServedModel) -> list[Prompt]:
    """The prompts of one request: a text, token ids, or a list of either. raises BadRequestError, PromptTooLongError"""
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts = [prompt] if is_one else prompt
    if not 0 < len(prompts) <= MAX_CHOICES:
        raise BadRequestError(f"prompt: {len(prompts)} prompts; send 1 to {MAX_CHOICES}.", param="prompt")
    return [model.prompts.text(one) if isinstance(one, str) else Prompt(_checked_ids(one, model)) for one in prompts]


def _checked_ids(ids: Any, model: ServedModel) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids:
        raise BadRequestError("prompt: neither a text nor a list of token ids.", param="prompt")
    for index, token in enumerate(ids):
        if not isinstance(token, int) or not 0 <= token < model.info.vocab_size:
            raise BadRequestError(
                f"prompt[{index}]: {token!r} is no token id below {model.info.vocab_size}.", param=f"prompt[{index}]"
            )
    return tuple(ids)


async def _events(text: TextAnswer, request_id: str) -> AsyncGenerator[bytes]:
    offsets = [0] * len(text.answer.choices)
    try:
        while batch := await text.answer.next():
            written = [_chunk(text, index, delta, offsets) for index, delta in batch]
            if any(written):
                yield b"".join(written)
    except engine.EngineError as error:
        yield data(from_exception(error, request_id).body())
        return
    if text.wants_usage:
        yield data(text.head() | {"choices": [], "usage": text.answer.usage()})
    yield end_of_stream(text.answer)


def _chunk(text: TextAnswer, index: int, delta: Delta, offsets: list[int]) -> bytes:
    content = _content(delta)
    if not (content or delta.logprobs or delta.finish_reason):
        return b""
    logprobs = _legacy_logprobs(delta.logprobs, offsets[index]) if delta.logprobs else None
    offsets[index] += sum(len(entry["token"]) for entry in delta.logprobs)
    choice = {"index": index, "text": content, "logprobs": logprobs, "finish_reason": delta.finish_reason}
    return data(text.head() | {"choices": [choice]} | ({"usage": None} if text.wants_usage else {}))


async def _whole(text: TextAnswer) -> TextCompletion:
    answer = text.answer
    contents: list[list[str]] = [[] for _ in answer.choices]
    logprobs: list[list[dict[str, Any]]] = [[] for _ in answer.choices]
    try:
        while batch := await answer.next():
            for index, delta in batch:
                contents[index].append(_content(delta))
                logprobs[index] += delta.logprobs
    finally:
        await answer.close()
    choices = [
        {
            "index": index,
            "text": "".join(contents[index]),
            "logprobs": _legacy_logprobs(logprobs[index], 0) if text.wants_logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        for index, choice in enumerate(answer.choices)
    ]
    return text.head() | {"choices": choices, "usage": answer.usage()}


def _content(delta: Delta) -> str:
    return "".join(event.text for event in delta.events if isinstance(event, Content))


def _legacy_logprobs(entries: Sequence[dict[str, Any]], offset: int) -> TextLogprobs:
    """The older shape: parallel lists; offsets count characters of the spelled tokens."""
    tokens = [entry["token"] for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries],
        "text_offset": list(accumulate((len(token) for token in tokens[:-1]), initial=offset)),
    }
