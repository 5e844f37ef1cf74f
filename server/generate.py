"""POST /generate: one prompt, one answer, and how long it took."""

import time

from starlette.requests import Request
from starlette.responses import Response

from server.answer import Answer, start_answer
from server.answers import GeneratedText
from server.auth import Caller
from server.completions import bare_rules
from server.errors import UnsupportedError
from server.http import json_response, read_json
from server.model import ServedModel, check_model
from server.pipeline import TextRules
from server.prompt import Prompt
from server.protocol import ChatMessage, GenerateRequest
from server.reasoning import Reasoning
from server.sampling import OutputLimit, check_ranges, sampling_for, stop_strings
from server.serving import Serving
from server.sse import unless_disconnected
from server.tool_calls import Content

DEFAULT_MAX_TOKENS = 2_048


class Generate:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        started = time.perf_counter()
        body, unknown = await read_json(request, GenerateRequest, self._serving.config)
        model = self._serving.model
        caller: Caller = request.state.caller
        check_model(model.name if body.model is None else body.model, model, caller)
        check_ranges(body)
        _check_form(body)
        answer = await self._start(body, model, caller)
        self._serving.metrics.count_ignored(unknown)
        return json_response(await unless_disconnected(request, _whole(answer, started)))

    async def _start(self, body: GenerateRequest, model: ServedModel, caller: Caller) -> Answer:
        prompt = await model.in_worker(_prompt, body, model)
        rules = bare_rules(model, body.stop) if body.raw else _chat_rules(body, model)

        sampling = sampling_for(body, model, OutputLimit(body.max_tokens, DEFAULT_MAX_TOKENS, prompt="prompt"))
        return await start_answer(self._serving, model, caller, [prompt], rules, sampling, prefix="gen-")


def _check_form(body: GenerateRequest) -> None:
    if body.stream:
        raise UnsupportedError("stream: /generate answers whole; /v1/completions streams.", param="stream")
    if (body.n or 1) > 1:
        raise UnsupportedError("n: /generate gives one answer; use /v1/completions.", param="n")


def _chat_rules(body: GenerateRequest, model: ServedModel) -> TextRules:
    return TextRules(token_bytes=model.files.vocabulary.token_bytes, stops=stop_strings(body.stop))


def _prompt(body: GenerateRequest, model: ServedModel) -> Prompt:
    if body.raw:
        return model.prompts.text(body.prompt)
    options = model.prompts.options(None, None, body.enable_thinking)
    return model.prompts.chat([ChatMessage(role="user", content=body.prompt)], [], options)


async def _whole(answer: Answer, started: float) -> GeneratedText:
    """tok_s counts from the first token on, so that it tells the decode speed whatever the prompt's length."""
    parts: list[Content | Reasoning] = []
    first = last = None
    try:
        while batch := await answer.next():
            last = time.perf_counter()
            first = first or last
            parts += [event for _, delta in batch for event in delta.events if isinstance(event, Content | Reasoning)]
    finally:
        await answer.close()
    ended = time.perf_counter()
    (choice,) = answer.choices
    decode_s = last - first if first and last else 0.0
    return {
        "id": answer.answer_id,
        "model": answer.model,
        "text": "".join(part.text for part in parts if isinstance(part, Content)),
        "reasoning": "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "finish_reason": choice.finish_reason,
        "prompt_tokens": answer.num_prompt_tokens,
        "cached_tokens": choice.num_cached_tokens,
        "completion_tokens": choice.num_tokens,
        "tok_s": round((choice.num_tokens - 1) / decode_s, 2) if choice.num_tokens > 1 and decode_s > 0 else None,
        "ttft_ms": round(((first or ended) - started) * 1000, 3),
        "latency_ms": round((ended - started) * 1000, 3),
    }
