"""POST /v1/responses, streamed and whole: one list of output items, written in the same order by both."""

import secrets
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import engine
from server.answer import Answer, start_answer
from server.answers import DeletedResponse, ResponseObject, ResponseUsage
from server.auth import Caller
from server.choice import Delta
from server.errors import ApiError, BadRequestError, PromptTooLongError, UnsupportedError, from_exception
from server.freeform import INPUT
from server.grammar import AnswerForm, answer_form, callable_functions, response_schema, tool_choice
from server.http import json_response, read_json
from server.model import ServedModel, check_model
from server.pipeline import Event, TextRules
from server.prompt import Prompt
from server.protocol import ChatMessage, FunctionCall, ToolCall, to_json
from server.reasoning import Reasoning
from server.response_store import KeptResponse, ResponseStore
from server.responses_protocol import (
    OFFERED,
    FunctionNames,
    ResponsesRequest,
    function_names,
    function_tools,
    input_messages,
)
from server.sampling import OutputLimit, check_ranges, sampling_for
from server.serving import Serving
from server.sse import EventStream, named, unless_disconnected
from server.tool_calls import CallArguments, CallEnd, CallStart, Content
from server.tool_schema import ToolSchemas, declared_tools


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """A checked request: the conversation it continues, and what every answer repeats of it."""

    body: ResponsesRequest
    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    functions: list[Mapping[str, Any]]
    names: FunctionNames
    form: AnswerForm | None
    tenant: str


class Responses:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore()

    async def create(self, request: Request) -> Response | ASGIApp:
        body, unknown = await read_json(request, ResponsesRequest, self._serving.config)
        model = self._serving.model
        caller: Caller = request.state.caller
        check_model(body.model, model, caller)
        previous = body.previous_response_id
        earlier = self._store.messages(caller.tenant, previous) if previous else ()
        plan = await model.in_worker(_plan, body, earlier, caller.tenant)
        self._serving.metrics.count_ignored(unknown)
        try:
            answer = await self._start(plan, model, caller)
        except PromptTooLongError as error:
            if not body.stream:
                raise
            # one agent knows a full context by this event only
            return self._stream(_refusal(plan, model, error), _nothing, EventNumbers())
        writer = ResponseWriter(plan, answer)
        if body.stream:
            return self._stream(self._events(writer, request.state.request_id), answer.close, writer.numbers, writer)
        return json_response(await unless_disconnected(request, self._whole(writer)))

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedError("stream: a response that is kept is shown whole.", param="stream")
        return Response(self._store.body(*_kept_name(request)), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        tenant, response_id = _kept_name(request)
        self._store.delete(tenant, response_id)
        return json_response(DeletedResponse(id=response_id, object="response", deleted=True))

    async def cancel(self, request: Request) -> Response:
        self._store.body(*_kept_name(request))
        raise BadRequestError(
            "This response is complete, and was not made in the background: one that runs is cancelled by closing its "
            "connection.",
            param="response_id",
        )

    async def _start(self, plan: ResponsePlan, model: ServedModel, caller: Caller) -> Answer:
        body = plan.body
        options = model.prompts.options(None, body.reasoning.effort if body.reasoning else None, None)
        head = [ChatMessage("system", body.instructions)] if body.instructions else []
        prompt: Prompt = await model.in_worker(
            model.prompts.chat, [*head, *plan.messages], plan.tools, options, "input"
        )
        rules = TextRules(
            token_bytes=model.files.vocabulary.token_bytes,
            tools=ToolSchemas(plan.functions, plan.names.freeform) if plan.functions else None,
            is_parallel=body.parallel_tool_calls is not False,
        )
        limit = OutputLimit(body.max_output_tokens, model.default_max_tokens, "max_output_tokens", "input")
        sampling = sampling_for(body, model, limit)
        return await start_answer(
            self._serving, model, caller, [prompt], rules, sampling, prefix="resp_", form=plan.form
        )

    def _stream(
        self,
        events: AsyncGenerator[bytes],
        release: Any,
        numbers: "EventNumbers",
        writer: "ResponseWriter | None" = None,
    ) -> EventStream:
        def heartbeat() -> bytes:
            # comments do not reset this API's idle timers, an event does
            value = {"response": writer.response("in_progress")} if writer else {}
            return numbers.write("response.in_progress", value)

        config = self._serving.config
        return EventStream(
            events, release, heartbeat_s=config.heartbeat_s, send_timeout_s=config.send_timeout_s, heartbeat=heartbeat
        )

    async def _events(self, writer: "ResponseWriter", request_id: str) -> AsyncGenerator[bytes]:
        yield writer.begin()
        try:
            while batch := await writer.answer.next():
                if written := b"".join([part for _, delta in batch for part in writer.write(delta)]):
                    yield written
        except engine.EngineError as error:
            yield writer.fail(from_exception(error, request_id))
            return
        self._keep(writer)
        yield writer.end()

    async def _whole(self, writer: "ResponseWriter") -> ResponseObject:
        try:
            while batch := await writer.answer.next():
                for _, delta in batch:
                    for _ in writer.write(delta):
                        pass
        finally:
            await writer.answer.close()
        self._keep(writer)
        return writer.response(writer.final_status())

    def _keep(self, writer: "ResponseWriter") -> None:
        if writer.plan.body.store is not False:
            body = to_json(writer.response(writer.final_status()))
            kept = KeptResponse([*writer.plan.messages, writer.message()], body)
            self._store.put(writer.plan.tenant, writer.answer.answer_id, kept)


def _plan(body: ResponsesRequest, earlier: Sequence[ChatMessage], tenant: str) -> ResponsePlan:
    """Blocking, for a worker thread. raises BadRequestError"""
    check_ranges(body)
    _check_form(body)
    names = function_names(body.tools)
    messages = [*earlier, *input_messages(body.input, names)]
    tools, choice = declared_tools(function_tools(body.tools, names)), tool_choice(body.tool_choice)
    functions = callable_functions(tools, choice)
    schema = response_schema(body.text.format if body.text else None, "text.format")
    is_parallel = body.parallel_tool_calls is not False
    form = answer_form(schema, functions, choice, is_parallel=is_parallel, param="text.format")
    return ResponsePlan(body, messages, tools, functions, names, form, tenant)


def _kept_name(request: Request) -> tuple[str, str]:
    caller: Caller = request.state.caller
    return caller.tenant, request.path_params["response_id"]


async def _nothing() -> None:
    """There is no work to release."""


def _check_form(body: ResponsesRequest) -> None:
    if body.background:
        raise UnsupportedError("background: answers are given on this connection only.", param="background")
    if body.conversation is not None:
        raise UnsupportedError(
            "conversation: conversations are not kept; send the input, or previous_response_id.", param="conversation"
        )
    if body.prompt is not None:
        raise UnsupportedError("prompt: prompt templates are not kept; send the text in input.", param="prompt")
    if (body.n or 1) > 1:
        raise UnsupportedError("n: a response has one answer.", param="n")
    if body.stop is not None:
        raise UnsupportedError("stop: this API has no stop strings; chat completions have.", param="stop")


async def _refusal(plan: ResponsePlan, model: ServedModel, error: PromptTooLongError) -> AsyncGenerator[bytes]:
    numbers = EventNumbers()
    response = _response_body(plan, f"resp_{secrets.token_hex(12)}", model.name, model.created)
    yield numbers.write("response.created", {"response": response | {"status": "in_progress"}})
    failed = response | {"status": "failed", "error": {"code": error.code, "message": error.message}}
    yield numbers.write("response.failed", {"response": failed})


class EventNumbers:
    """Every event of a stream carries the next number."""

    def __init__(self) -> None:
        self._next = 0

    def event(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        numbered = {"type": kind, "sequence_number": self._next, **value}
        self._next += 1
        return numbered

    def write(self, kind: str, value: dict[str, Any]) -> bytes:
        return named(kind, self.event(kind, value))


class ResponseWriter:
    """Turns deltas into output items and their events. The whole answer is the same items without the events."""

    def __init__(self, plan: ResponsePlan, answer: Answer) -> None:
        self.plan = plan
        self.answer = answer
        self.numbers = EventNumbers()
        self._items: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._open: str | None = None

    def begin(self) -> bytes:
        response = self.response("in_progress")
        created = self.numbers.write("response.created", {"response": response})
        return created + self.numbers.write("response.in_progress", {"response": response})

    def write(self, delta: Delta) -> Iterator[bytes]:
        for event in delta.events:
            yield from self._write_event(event)
        if delta.finish_reason is not None:
            yield from self._close("incomplete" if delta.finish_reason == "length" else "completed")

    def end(self) -> bytes:
        status = self.final_status()
        return self.numbers.write(f"response.{status}", {"response": self.response(status)})

    def fail(self, error: ApiError) -> bytes:
        response = self.response("failed") | {
            "error": {"code": error.code, "message": error.message},
            "output": self._produced(),
        }
        return self.numbers.write("response.failed", {"response": response})

    def _produced(self) -> list[dict[str, Any]]:
        """The items, the one that is being written as far as it came."""
        if self._open is None:
            return self._items
        *whole, last = self._items
        return [*whole, last | _held(self._open, "".join(self._text)) | {"status": "incomplete"}]

    def final_status(self) -> str:
        return "incomplete" if self.answer.choices[0].finish_reason == "length" else "completed"

    def response(self, status: str) -> ResponseObject:
        answer = self.answer
        body = _response_body(self.plan, answer.answer_id, answer.model, answer.created) | {"status": status}
        if status in ("completed", "incomplete"):
            body |= {"output": self._items, "usage": _usage(answer)}
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        return body

    def message(self) -> ChatMessage:
        """The answer as a turn of the conversation that may follow."""
        turn = ChatMessage("assistant", "", reasoning_content="", tool_calls=[])
        for item in self._items:
            match item["type"]:
                case "reasoning":
                    turn.reasoning_content += "".join(part["text"] for part in item["content"])
                case "message":
                    turn.content += "".join(part["text"] for part in item["content"])
                case "function_call" | "custom_tool_call":
                    name = self.plan.names.of_call(item.get("namespace"), item["name"])
                    call = FunctionCall(name, item["arguments"] if "arguments" in item else {INPUT: item["input"]})
                    turn.tool_calls.append(ToolCall(call, id=item["call_id"]))
        return turn

    def _write_event(self, event: Event) -> Iterator[bytes]:
        match event:
            case Reasoning(text):
                yield from self._ensure("reasoning", {"summary": [], "content": []})
                yield self._delta("response.reasoning_text.delta", text, content_index=0)
            case Content(text):
                yield from self._ensure("message", {"role": "assistant", "content": []})
                yield self._delta("response.output_text.delta", text, content_index=0, logprobs=[])
            case CallStart(_, call_id, name):
                yield from self._close("completed")
                names = self.plan.names
                kind = "custom_tool_call" if name in names.freeform else "function_call"
                yield from self._ensure(kind, {"call_id": call_id, **names.called(name), CALL_FIELDS[kind][0]: ""})
            case CallArguments(_, text):
                yield self._delta(f"response.{CALL_FIELDS[self._items[-1]['type']][1]}.delta", text)
            case CallEnd():
                yield from self._close("completed")

    def _ensure(self, kind: str, fields: dict[str, Any]) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close("completed")
        item = {"id": f"{ITEM_PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._open, self._text = kind, []
        yield self._place("response.output_item.added", item=dict(item))
        if part := _content(kind, ""):
            yield self._place("response.content_part.added", item_id=item["id"], content_index=0, part=part)

    def _close(self, status: str) -> Iterator[bytes]:
        if self._open is None:
            return
        item, text, kind = self._items[-1], "".join(self._text), self._open
        self._open = None
        where = {"item_id": item["id"]}
        item |= _held(kind, text)
        if part := _content(kind, text):
            more = {"logprobs": []} if kind == "message" else {}
            yield self._place(f"response.{part['type']}.done", **where, content_index=0, text=text, **more)
            yield self._place("response.content_part.done", **where, content_index=0, part=part)
        else:
            field, event = CALL_FIELDS[kind]
            name = {"name": item["name"]} if kind == "function_call" else {}
            yield self._place(f"response.{event}.done", **where, **name, **{field: text})
        item["status"] = status
        yield self._place("response.output_item.done", item=dict(item))

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        self._text.append(text)
        return self._place(kind, item_id=self._items[-1]["id"], delta=text, **fields)

    def _place(self, kind: str, **fields: Any) -> bytes:
        return self.numbers.write(kind, {"output_index": len(self._items) - 1, **fields})


ITEM_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
# the field of what is called with, and the events that bring it
CALL_FIELDS = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


def _held(kind: str, text: str) -> dict[str, Any]:
    """The fields of an item that hold what was written."""
    part = _content(kind, text)
    return {CALL_FIELDS[kind][0]: text} if part is None else {"content": [part]}


def _content(kind: str, text: str) -> dict[str, Any] | None:
    """The one part of an item; None for calls, which have none."""
    if kind in CALL_FIELDS:
        return None
    return {"type": "reasoning_text", "text": text} if kind == "reasoning" else _output_text(text)


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response_body(plan: ResponsePlan, response_id: str, model: str, created: int) -> ResponseObject:
    body = plan.body
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": _declared(body.tools),
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }


def _declared(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    functions = [{"strict": False, **tool} if tool.get("type") == "function" else tool for tool in tools or ()]
    return [tool for tool in functions if tool.get("type") in OFFERED | {"namespace"}]


def _usage(answer: Answer) -> ResponseUsage:
    usage = answer.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
