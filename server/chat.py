"""POST /v1/chat/completions, streamed and whole."""

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import engine
from server.auth import Caller
from server.choice import Choice, Delta, usage
from server.errors import BadRequestError, UnsupportedError, from_exception
from server.generation import Generation
from server.http import json_response, read_json
from server.model import ServedModel
from server.pipeline import Event, TextRules
from server.protocol import HARMLESS, ChatRequest
from server.reasoning import Reasoning
from server.sampling import check_ranges, num_logprobs, output_limit, sampling_params, stop_strings
from server.serving import Serving
from server.sse import DONE, EventStream, data, unless_disconnected
from server.tool_calls import CallArguments, CallStart, Content
from server.tool_schema import ToolSchemas

MAX_TOOL_NAME = 256
CHUNK = "chat.completion.chunk"


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A checked request, before its prompt is rendered. Everything in it is certain to be well-formed.

    tools       declarations for the template, as the client wrote them
    options     the template's options
    """

    body: ChatRequest
    rules: TextRules
    tools: list[dict[str, Any]]
    options: dict[str, Any]
    logprobs: int | None
    max_tokens: int | None
    num_choices: int


@dataclass(frozen=True, slots=True)
class ChatJob:
    """An admitted request and how its answer is written."""

    completion_id: str
    model: str
    created: int
    choices: list[Choice]
    num_prompt_tokens: int
    wants_logprobs: bool
    wants_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.completion_id, "object": kind, "created": self.created, "model": self.model}


class ChatCompletions:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response | ASGIApp:
        """Whatever can answer 4xx happens here, before any header."""
        body, unknown = await read_json(request, ChatRequest, self._serving.config.max_body_bytes)
        model = self._serving.model
        caller: Caller = request.state.caller
        _check_model(body, model, caller)
        plan = plan_chat(body, model)
        self._count_ignored(unknown)
        job, generation = await self._submit(plan, model, caller)
        if body.stream:
            return self._stream(job, generation, request.state.request_id)
        return json_response(await unless_disconnected(request, _whole(job, generation)))

    async def _submit(self, plan: ChatPlan, model: ServedModel, caller: Caller) -> tuple[ChatJob, Generation]:
        prompt = await model.in_worker(model.prompts.chat, plan.body.messages, plan.tools, plan.options)
        job_id = f"chatcmpl-{secrets.token_hex(12)}"
        sampling = _sampling(plan, model, len(prompt.token_ids))
        requests = [
            engine.Request(
                f"{job_id}-{index}", prompt.token_ids, _seeded(sampling, index), caller.tenant, caller.priority
            )
            for index in range(plan.num_choices)
        ]
        rules = replace(plan.rules, starts_in_thought=prompt.starts_in_thought)
        generation = await self._serving.generate(requests)
        choices = [Choice(rules, model.files.vocabulary) for _ in requests]
        return _job(job_id, plan, model, choices, len(prompt.token_ids)), generation

    def _stream(self, job: ChatJob, generation: Generation, request_id: str) -> EventStream:
        config = self._serving.config
        return EventStream(
            _events(job, generation, request_id),
            generation.close,
            heartbeat_s=config.heartbeat_s,
            send_timeout_s=config.send_timeout_s,
        )

    def _count_ignored(self, unknown: list[str]) -> None:
        for name in unknown:
            self._serving.metrics.ignored(name if name in HARMLESS else "other")


def _job(job_id: str, plan: ChatPlan, model: ServedModel, choices: list[Choice], num_prompt_tokens: int) -> ChatJob:
    options = plan.body.stream_options
    return ChatJob(
        completion_id=job_id,
        model=model.name,
        created=int(time.time()),
        choices=choices,
        num_prompt_tokens=num_prompt_tokens,
        wants_logprobs=plan.logprobs is not None,
        wants_usage=bool(options and options.include_usage),
    )


def _check_model(body: ChatRequest, model: ServedModel, caller: Caller) -> None:
    if body.model is None:
        raise BadRequestError(f"model is missing; this server serves {model.name!r}.", param="model")
    model.check_name(body.model)
    caller.check_model(body.model)


def plan_chat(body: ChatRequest, model: ServedModel) -> ChatPlan:
    """raises BadRequestError, UnsupportedError"""
    if not body.messages:
        raise BadRequestError("messages is empty; send at least one message of role user.", param="messages")
    check_ranges(body)
    _check_response_format(body.response_format)
    tools = declared_tools(body.tools)
    has_calls = _tool_choice(body.tool_choice) == "auto" and bool(tools)
    return ChatPlan(
        body=body,
        rules=TextRules(
            token_bytes=model.files.vocabulary.token_bytes,
            tools=ToolSchemas(tool["function"] for tool in tools) if has_calls else None,
            stops=stop_strings(body.stop),
            is_parallel=body.parallel_tool_calls is not False,
        ),
        tools=tools,
        options=model.prompts.options(body.chat_template_kwargs, body.reasoning_effort, body.enable_thinking),
        logprobs=num_logprobs(body.logprobs, body.top_logprobs),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        num_choices=body.n or 1,
    )


def declared_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The function tools; other types are skipped. raises BadRequestError for a function without a usable name"""
    declared = [(index, tool) for index, tool in enumerate(tools or []) if tool.get("type", "function") == "function"]
    for index, tool in declared:
        _check_function(f"tools[{index}].function", tool.get("function"))
    return [tool for _, tool in declared]


def _check_function(where: str, function: Any) -> None:
    if not isinstance(function, dict):
        raise BadRequestError(f"{where} is missing or no object.", param=where)
    name = function.get("name")
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= MAX_TOOL_NAME
        or set(name) & set("<>\n")
        or name != name.strip()
    ):
        raise BadRequestError(
            f"{where}.name: {name!r} is no name of 1 to {MAX_TOOL_NAME} characters without < > or line ends.",
            param=f"{where}.name",
        )
    if not isinstance(function.get("parameters"), dict | None):
        raise BadRequestError(f"{where}.parameters is no JSON schema object.", param=f"{where}.parameters")


def _tool_choice(choice: str | Mapping[str, Any] | None) -> str:
    if choice in (None, "auto"):
        return "auto"
    if choice == "none":
        return "none"
    raise UnsupportedError("tool_choice: only 'auto' and 'none' are supported.", param="tool_choice")


def _check_response_format(response_format: Mapping[str, Any] | None) -> None:
    if response_format is not None and response_format.get("type") != "text":
        raise UnsupportedError("response_format: only {'type': 'text'} is supported.", param="response_format")


def _sampling(plan: ChatPlan, model: ServedModel, num_prompt_tokens: int) -> engine.SamplingParams:
    name = "max_tokens" if plan.body.max_completion_tokens is None else "max_completion_tokens"
    limit = output_limit(plan.max_tokens, model.default_max_tokens, num_prompt_tokens, model.max_model_len, name)
    return sampling_params(
        plan.body,
        model.files.sampling,
        max_tokens=limit,
        vocab_size=model.info.vocab_size,
        stop_token_ids=model.files.stop_token_ids,
        logprobs=plan.logprobs,
    )


def _seeded(sampling: engine.SamplingParams, index: int) -> engine.SamplingParams:
    """Choices of one seeded request differ, and differ the same way every time."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)


async def _events(job: ChatJob, generation: Generation, request_id: str) -> AsyncIterator[bytes]:
    """Role, deltas, one finish per choice, usage when asked for, and the marker; or an error and no marker."""
    yield b"".join(_chunk(job, index, {"role": "assistant", "content": ""}) for index in range(len(job.choices)))
    try:
        async for batch in generation.batches():
            if written := b"".join([_written(job, index, job.choices[index].push(event)) for index, event in batch]):
                yield written
            await _end_complete(job, generation, batch)
    except engine.EngineError as error:
        yield data(from_exception(error, request_id).body())
        return
    if job.wants_usage:
        yield data(job.head(CHUNK) | {"choices": [], "usage": usage(job.choices, job.num_prompt_tokens)})
    yield DONE


async def _end_complete(job: ChatJob, generation: Generation, batch: list[tuple[int, engine.TokenEvent]]) -> None:
    for index, event in batch:
        if event.finish_reason is None and job.choices[index].finish_reason is not None:
            await generation.end(index)


def _written(job: ChatJob, index: int, delta: Delta) -> bytes:
    parts = [body for event in delta.events if (body := _delta_body(event))]
    if delta.logprobs and not parts:
        parts = [{"content": ""}]
    logprobs = delta.logprobs
    chunks: list[bytes] = []
    for part in parts:
        chunks.append(_chunk(job, index, part, logprobs=logprobs))
        logprobs = []
    if delta.finish_reason is not None:
        chunks.append(_chunk(job, index, {}, finish_reason=delta.finish_reason))
    return b"".join(chunks)


def _delta_body(event: Event) -> dict[str, Any] | None:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _chunk(
    job: ChatJob,
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: list[dict[str, Any]] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    choice = {
        "index": index,
        "delta": delta,
        "logprobs": {"content": logprobs} if logprobs else None,
        "finish_reason": finish_reason,
    }
    body = job.head(CHUNK) | {"choices": [choice]}
    if job.wants_usage:
        body["usage"] = None
    return data(body)


async def _whole(job: ChatJob, generation: Generation) -> dict[str, Any]:
    """The answer in one piece, made by the same stages as the stream."""
    messages = [WholeMessage() for _ in job.choices]
    try:
        async for batch in generation.batches():
            for index, event in batch:
                messages[index].add(job.choices[index].push(event))
            await _end_complete(job, generation, batch)
    finally:
        await generation.close()
    return job.head("chat.completion") | {
        "choices": [
            {
                "index": index,
                "message": message.body(),
                "logprobs": {"content": message.logprobs} if job.wants_logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, (message, choice) in enumerate(zip(messages, job.choices, strict=True))
        ],
        "usage": usage(job.choices, job.num_prompt_tokens),
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

    def body(self) -> dict[str, Any]:
        content = "".join(self._content)
        body: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if reasoning := "".join(self._reasoning):
            body |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if self._calls:
            body["tool_calls"] = [
                {
                    "id": start.call_id,
                    "type": "function",
                    "function": {"name": start.name, "arguments": "".join(parts)},
                }
                for start, parts in self._calls
            ]
        return body
