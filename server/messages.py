"""POST /v1/messages and /v1/messages/count_tokens, streamed and whole."""

import base64
import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import engine
from server.answer import Answer, start_answer
from server.answers import AnsweredMessage, MessagesUsage
from server.auth import Caller
from server.choice import Delta
from server.continuation import Ending, check_form
from server.errors import BadRequestError, UnsupportedError, body_for, from_exception
from server.grammar import (
    AnswerForm,
    ThoughtBudget,
    ToolChoice,
    answer_form,
    callable_functions,
    response_schema,
    thought_budget,
    tool_choice,
)
from server.http import json_response, read_json
from server.messages_protocol import MessagesRequest, Thinking, chat_messages, function_tools
from server.model import ServedModel, check_model
from server.pipeline import Event, TextRules
from server.prompt import MESSAGES, Prompt, arguments
from server.protocol import ChatMessage
from server.reasoning import Reasoning
from server.sampling import OutputLimit, check_ranges, sampling_for, stop_strings
from server.serving import Serving
from server.sse import event_stream, named, unless_disconnected
from server.tool_calls import CallArguments, CallEnd, CallStart, Content
from server.tool_schema import ToolSchemas, declared_tools

PATH = "/v1/messages"
# whether a thought comes first; how long it is depends on the budget alone
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
# byte for byte as that API writes it
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class Messages:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response | ASGIApp:
        body, model, caller = await self._read(request)
        prompt, rules, form = await model.in_worker(_prepare, body, model)
        limit = OutputLimit(body.max_tokens, model.default_max_tokens)
        answer = await start_answer(
            self._serving,
            model,
            caller,
            [prompt],
            rules,
            sampling_for(body, model, limit),
            prefix="msg_",
            form=form,
            budget=_budget(body),
        )
        if body.stream:
            events = _events(answer, request.state.request_id)
            return event_stream(self._serving.config, events, answer, heartbeat=_ping)
        return json_response(await unless_disconnected(request, _whole(answer)))

    async def count_tokens(self, request: Request) -> Response:
        body, model, _ = await self._read(request)
        prompt, _, _ = await model.in_worker(_prepare, body, model)
        return json_response({"input_tokens": len(prompt.token_ids)})

    async def _read(self, request: Request) -> tuple[MessagesRequest, ServedModel, Caller]:
        body, unknown = await read_json(request, MessagesRequest, self._serving.config)
        model = self._serving.model
        caller: Caller = request.state.caller
        check_model(body.model, model, caller)
        if not body.messages:
            raise BadRequestError("messages is empty; send at least one message of role user.", param="messages")
        check_ranges(body)
        self._serving.metrics.count_ignored(unknown)
        return body, model, caller


def _prepare(body: MessagesRequest, model: ServedModel) -> tuple[Prompt, TextRules, AnswerForm | None]:
    """Blocking, for a worker thread: all that grows with the body. raises BadRequestError, PromptTooLongError

    Thinking is on when it is asked for, as this API's clients expect.
    """
    tools = _tools(body)
    functions = callable_functions(tools, _choice(body.tool_choice))
    form = _form(body, functions)
    thinks = _thinks(body.thinking)
    options = model.prompts.options(None, None, thinks)
    turns = chat_messages(body)
    ending = _ending(turns, thinks)
    prompt = model.prompts.chat(turns, tools, options, MESSAGES, ending)
    check_form(form is not None, ending, prompt.starts_in_thought)
    return prompt, _rules(body, functions, model), form


def _thinks(thinking: Thinking | None) -> bool:
    """raises BadRequestError"""
    if thinking is None:
        return False
    if thinking.type not in THINKING:
        raise BadRequestError(
            f"thinking.type: {thinking.type!r} is none of {', '.join(THINKING)}.", param="thinking.type"
        )
    return THINKING[thinking.type]


def _ending(turns: Sequence[ChatMessage], thinks: bool) -> Ending:
    """A text of the assistant at the end is the beginning of the answer, unless a thought has to come first."""
    last = turns[-1] if turns else None
    is_begun = last is not None and last.role == "assistant" and bool(last.content) and not last.tool_calls
    return "last message" if is_begun and not thinks else "answer"


def _tools(body: MessagesRequest) -> list[dict[str, Any]]:
    return declared_tools(function_tools(body.tools))


def _rules(body: MessagesRequest, functions: Sequence[Mapping[str, Any]], model: ServedModel) -> TextRules:
    return TextRules(
        token_bytes=model.files.vocabulary.token_bytes,
        tools=ToolSchemas(functions) if functions else None,
        stops=stop_strings(body.stop_sequences),
        is_parallel=_is_parallel(body),
    )


def _budget(body: MessagesRequest) -> ThoughtBudget | None:
    return thought_budget(body.thinking.budget_tokens if body.thinking else None, "thinking.budget_tokens")


def _is_parallel(body: MessagesRequest) -> bool:
    return not (body.tool_choice or {}).get("disable_parallel_tool_use")


def _form(body: MessagesRequest, functions: Sequence[Mapping[str, Any]]) -> AnswerForm | None:
    wanted, where = body.output_format, "output_format"
    if wanted is None and body.output_config is not None:
        wanted, where = body.output_config.format, "output_config.format"
    schema = response_schema(wanted, where)
    return answer_form(schema, functions, _choice(body.tool_choice), is_parallel=_is_parallel(body), param=where)


def _choice(choice: Mapping[str, Any] | None) -> ToolChoice:
    kind = (choice or {}).get("type", "auto")
    if kind == "tool":
        return tool_choice({**choice, "type": "function"})
    if kind not in ("auto", "none", "any"):
        raise UnsupportedError(f"tool_choice: {kind!r} is none of auto, none, any, tool.", param="tool_choice")
    return ToolChoice("required" if kind == "any" else kind)


def _ping() -> bytes:
    return PING


async def _events(answer: Answer, request_id: str) -> AsyncGenerator[bytes]:
    """The exact count of the prompt comes at once; what of it was cached is known, and said, at the end."""
    start = _message(answer, [], None) | {"usage": _usage(answer.num_prompt_tokens, 0, 0)}
    yield named("message_start", {"type": "message_start", "message": start})
    writer = BlockWriter()
    try:
        while batch := await answer.next():
            if written := b"".join([part for _, delta in batch for part in writer.write(delta)]):
                yield written
    except engine.EngineError as error:
        yield named("error", body_for(PATH, from_exception(error, request_id), request_id)[1])
        return
    delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.choices[0].stop_string}
    yield named("message_delta", {"type": "message_delta", "delta": delta, "usage": _final_usage(answer)})
    yield named("message_stop", {"type": "message_stop"})


class BlockWriter:
    """Events as content blocks, one open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None
        self._thought = hashlib.sha256()

    def write(self, delta: Delta) -> Iterator[bytes]:
        for event in delta.events:
            yield from self._write_event(event)
        if delta.finish_reason is not None:
            yield from self._close()

    def _write_event(self, event: Event) -> Iterator[bytes]:
        match event:
            case Reasoning(text):
                yield from self._ensure("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                self._thought.update(text.encode())
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Content(text):
                yield from self._ensure("text", {"type": "text", "text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case CallStart(_, call_id, name):
                yield from self._close()
                block = {"type": "tool_use", "id": tool_use_id(call_id), "name": name, "input": {}}
                yield from self._ensure("tool_use", block)
            case CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                yield from self._close()

    def _ensure(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close()
        self._index, self._open = self._index + 1, kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield named("content_block_start", start)

    def _close(self) -> Iterator[bytes]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _signature(self._thought)})
        self._open = None
        yield named("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named("content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta})


def tool_use_id(call_id: str) -> str:
    return "toolu_" + call_id.removeprefix("call_")


def _signature(thought: Any) -> str:
    """Clients send it back with the thought; nothing here depends on it."""
    return base64.b64encode(thought.digest()).decode()


async def _whole(answer: Answer) -> AnsweredMessage:
    blocks: list[dict[str, Any]] = []
    try:
        while batch := await answer.next():
            for _, delta in batch:
                for event in delta.events:
                    _append(blocks, event)
    finally:
        await answer.close()
    content = [_finished(block) for block in blocks]
    stop = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.choices[0].stop_string}
    return _message(answer, content, None) | stop | {"usage": _final_usage(answer)}


def _append(blocks: list[dict[str, Any]], event: Event) -> None:
    last = blocks[-1] if blocks else {"type": None}
    match event:
        case Reasoning(text) | Content(text):
            kind = "thinking" if isinstance(event, Reasoning) else "text"
            if last["type"] != kind:
                blocks.append({"type": kind, kind: ""})
            blocks[-1][kind] += text
        case CallStart(_, call_id, name):
            blocks.append({"type": "tool_use", "id": tool_use_id(call_id), "name": name, "input": ""})
        case CallArguments(_, text):
            last["input"] += text


def _finished(block: dict[str, Any]) -> dict[str, Any]:
    match block["type"]:
        case "thinking":
            return block | {"signature": _signature(hashlib.sha256(block["thinking"].encode()))}
        case "tool_use":
            return block | {"input": arguments(block["input"])}
        case _:
            return block


def _message(answer: Answer, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
    return {
        "id": answer.answer_id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
    }


def _stop_reason(answer: Answer) -> str:
    (choice,) = answer.choices
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[choice.finish_reason]


def _final_usage(answer: Answer) -> MessagesUsage:
    (choice,) = answer.choices
    cached = choice.num_cached_tokens
    return _usage(answer.num_prompt_tokens - cached, cached, choice.num_tokens)


def _usage(num_input: int, num_cached: int, num_output: int) -> MessagesUsage:
    return {
        "input_tokens": num_input,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_output,
    }
