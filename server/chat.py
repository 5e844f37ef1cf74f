"""POST /v1/chat/completions, streamed and whole."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import engine
from server.answer import Answer, end_of_stream, start_answer
from server.answers import AnswerMessage, Call, ChatCompletion
from server.auth import Caller
from server.choice import Delta
from server.continuation import Ending, check_form, prompt_ending
from server.errors import BadRequestError, from_exception
from server.grammar import (
    AnswerForm,
    ThoughtBudget,
    answer_form,
    callable_functions,
    response_schema,
    thought_budget,
    tool_choice,
)
from server.http import json_response, read_json
from server.model import ServedModel, check_model
from server.pipeline import Event, TextRules
from server.prompt import MESSAGES, Prompt
from server.protocol import ChatRequest, to_json
from server.reasoning import Reasoning
from server.sampling import OutputLimit, check_ranges, num_logprobs, sampling_for, stop_strings
from server.serving import Serving
from server.sse import data, event_stream, unless_disconnected
from server.tool_calls import CallArguments, CallStart, Content
from server.tool_schema import ToolSchemas, declared_tools, freeform_names

CHUNK = "chat.completion.chunk"
BEGINNING = b'{"role":"assistant","content":""}'


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A checked request, before its prompt is rendered. Everything in it is certain to be well-formed.

    tools       declarations for the template
    options     the template's options
    ending      where the prompt ends
    """

    body: ChatRequest
    rules: TextRules
    form: AnswerForm | None
    budget: ThoughtBudget | None
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    ending: Ending
    logprobs: int | None
    num_choices: int


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer and how it is written."""

    answer: Answer
    wants_logprobs: bool
    wants_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        answer = self.answer
        return {"id": answer.answer_id, "object": kind, "created": answer.created, "model": answer.model}

    def chunks(self) -> "Chunks":
        head = to_json(self.head(CHUNK)).removesuffix(b"}")
        return Chunks(
            b"data: " + head + b',"choices":[{"index":',
            b"}]" + (b',"usage":null' if self.wants_usage else b"") + b"}\n\n",
        )


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of one answer, which differ in little: all but that is written once.

    before  what stands before the choice's index; after  what stands behind the choice
    """

    before: bytes
    after: bytes

    def write(self, index: int, delta: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null") -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b' % (
            self.before,
            index,
            delta,
            logprobs,
            finish_reason,
            self.after,
        )


class ChatCompletions:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response | ASGIApp:
        """Whatever can answer 4xx happens here, before any header."""
        body, unknown = await read_json(request, ChatRequest, self._serving.config)
        model = self._serving.model
        caller: Caller = request.state.caller
        check_model(body.model, model, caller)
        plan, prompt = await model.in_worker(_prepare, body, model)
        self._serving.metrics.count_ignored(unknown)
        chat = await self._start(plan, prompt, model, caller)
        if body.stream:
            return event_stream(self._serving.config, _events(chat, request.state.request_id), chat.answer)
        return json_response(await unless_disconnected(request, _whole(chat)))

    async def _start(self, plan: ChatPlan, prompt: Prompt, model: ServedModel, caller: Caller) -> ChatAnswer:
        answer = await start_answer(
            self._serving,
            model,
            caller,
            [prompt],
            plan.rules,
            sampling_for(plan.body, model, _limit(plan.body, model), plan.logprobs),
            prefix="chatcmpl-",
            num_choices=plan.num_choices,
            form=plan.form,
            budget=plan.budget,
        )
        options = plan.body.stream_options
        return ChatAnswer(
            answer, wants_logprobs=plan.logprobs is not None, wants_usage=bool(options and options.include_usage)
        )


def _prepare(body: ChatRequest, model: ServedModel) -> tuple[ChatPlan, Prompt]:
    """Blocking, for a worker thread: all that grows with the body. raises BadRequestError, PromptTooLongError"""
    plan = plan_chat(body, model)
    prompt = model.prompts.chat(body.messages, plan.tools, plan.options, MESSAGES, plan.ending)
    check_form(plan.form is not None, plan.ending, prompt.starts_in_thought)
    return plan, prompt


def plan_chat(body: ChatRequest, model: ServedModel) -> ChatPlan:
    """raises BadRequestError, UnsupportedError"""
    if not body.messages:
        raise BadRequestError("messages is empty; send at least one message of role user.", param="messages")
    check_ranges(body)
    tools = declared_tools(body.tools)
    choice = tool_choice(body.tool_choice)
    functions = callable_functions(tools, choice)
    is_parallel = body.parallel_tool_calls is not False
    schema = response_schema(body.response_format, "response_format")
    return ChatPlan(
        body=body,
        rules=TextRules(
            token_bytes=model.files.vocabulary.token_bytes,
            tools=ToolSchemas(functions, freeform_names(body.tools)) if functions else None,
            stops=stop_strings(body.stop),
            is_parallel=is_parallel,
        ),
        form=answer_form(schema, functions, choice, is_parallel=is_parallel),
        budget=thought_budget(body.thinking_token_budget, "thinking_token_budget"),
        tools=tools,
        options=model.prompts.options(body.chat_template_kwargs, body.reasoning_effort, body.enable_thinking),
        ending=prompt_ending(body.add_generation_prompt, body.continue_final_message),
        logprobs=num_logprobs(body.logprobs, body.top_logprobs),
        num_choices=body.n or 1,
    )


def _limit(body: ChatRequest, model: ServedModel) -> OutputLimit:
    if body.max_completion_tokens is not None:
        return OutputLimit(body.max_completion_tokens, model.default_max_tokens, "max_completion_tokens")
    return OutputLimit(body.max_tokens, model.default_max_tokens)


async def _events(chat: ChatAnswer, request_id: str) -> AsyncGenerator[bytes]:
    """Role, deltas, one finish per choice, usage when asked for, and the marker; or an error and no marker."""
    answer, chunks = chat.answer, chat.chunks()
    yield b"".join(chunks.write(index, BEGINNING) for index in range(len(answer.choices)))
    try:
        while batch := await answer.next():
            if written := b"".join([_written(chunks, index, delta) for index, delta in batch]):
                yield written
    except engine.EngineError as error:
        yield data(from_exception(error, request_id).body())
        return
    if chat.wants_usage:
        yield data(chat.head(CHUNK) | {"choices": [], "usage": answer.usage()})
    yield end_of_stream(answer)


def _written(chunks: Chunks, index: int, delta: Delta) -> bytes:
    parts = [body for event in delta.events if (body := _delta_body(event))]
    if not delta.logprobs and delta.finish_reason is None:
        return b"".join([chunks.write(index, part) for part in parts])
    return b"".join(_last_or_measured(chunks, index, delta, parts))


def _last_or_measured(chunks: Chunks, index: int, delta: Delta, parts: Sequence[bytes]) -> Iterator[bytes]:
    """With log-probabilities in the first chunk, or an end behind the last."""
    if delta.logprobs:
        first, *parts = parts or [b'{"content":""}']
        yield chunks.write(index, first, logprobs=to_json({"content": delta.logprobs}))
    for part in parts:
        yield chunks.write(index, part)
    if delta.finish_reason is not None:
        yield chunks.write(index, b"{}", finish_reason=to_json(delta.finish_reason))


def _delta_body(event: Event) -> bytes | None:
    match event:
        case Content(text):
            return b'{"content":%b}' % to_json(text)
        case Reasoning(text):
            written = to_json(text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (written, written)
        case CallArguments(index, text, is_freeform):
            # of type custom as OpenAI writes them, though its description of chunks knows functions alone
            kind, field = (b"custom", b"input") if is_freeform else (b"function", b"arguments")
            return b'{"tool_calls":[{"index":%d,"%b":{"%b":%b}}]}' % (index, kind, field, to_json(text))
        case CallStart(index):
            return to_json({"tool_calls": [{"index": index, **_call(event, "")}]})
        case _:
            return None


def _call(start: CallStart, text: str) -> Call:
    if start.is_freeform:
        return {"id": start.call_id, "type": "custom", "custom": {"name": start.name, "input": text}}
    return {"id": start.call_id, "type": "function", "function": {"name": start.name, "arguments": text}}


async def _whole(chat: ChatAnswer) -> ChatCompletion:
    """The answer in one piece, made by the same stages as the stream."""
    answer = chat.answer
    messages = [WholeMessage() for _ in answer.choices]
    try:
        while batch := await answer.next():
            for index, delta in batch:
                messages[index].add(delta)
    finally:
        await answer.close()
    return chat.head("chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": message.body(),
                "logprobs": {"content": message.logprobs} if chat.wants_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, (message, choice) in enumerate(zip(messages, answer.choices, strict=True))
        ],
        "usage": answer.usage(),
    }


class WholeMessage:
    """Deltas joined to one message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []
        self.logprobs: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        self.logprobs += delta.logprobs
        for event in delta.events:
            match event:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallStart():
                    self._calls.append((event, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)

    def body(self) -> AnswerMessage:
        content = "".join(self._content)
        body: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if reasoning := "".join(self._reasoning):
            body |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self._calls:
            body["tool_calls"] = [_call(start, "".join(parts)) for start, parts in self._calls]
        return body
