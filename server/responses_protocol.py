"""Requests of /v1/responses, and the same conversation as chat completions write it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from server.errors import BadRequestError, UnsupportedError
from server.protocol import ChatMessage, ContentPart, FunctionCall, SamplingFields, ToolCall


class ReasoningPart(msgspec.Struct):
    text: str = ""
    type: str | None = None


class Item(msgspec.Struct):
    """One item of the input: a message, a call, its output, or a thought."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ReasoningPart] | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})


def input_messages(items: str | Sequence[Item]) -> list[ChatMessage]:
    """Chat messages: a thought, a text and calls that follow each other are one assistant turn.

    raises  BadRequestError, UnsupportedError, naming the item
    """
    if isinstance(items, str):
        return [ChatMessage("user", items)]
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[ChatMessage], item: Item, where: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        _add_message(messages, item, where)
    elif kind in CALLS:
        arguments = item.arguments if kind == "function_call" else {"input": item.input or ""}
        call = ToolCall(FunctionCall(_named(item.name, f"{where}.name"), arguments), id=item.call_id)
        _assistant(messages).tool_calls.append(call)
    elif kind in OUTPUTS:
        messages.append(ChatMessage("tool", item.output, tool_call_id=item.call_id))
    elif kind == "reasoning":
        _assistant(messages, starts_turn=True).reasoning_content += _thought(item)
    else:
        raise UnsupportedError(f"{where}: items of type {kind!r} are not supported.", param=where)


def _add_message(messages: list[ChatMessage], item: Item, where: str) -> None:
    role = _named(item.role, f"{where}.role")
    last = messages[-1] if messages else None
    # a thought waits for the text that it led to
    if (
        role == "assistant"
        and last is not None
        and last.role == "assistant"
        and not last.content
        and not last.tool_calls
    ):
        last.content = item.content
    elif role == "assistant":
        messages.append(ChatMessage(role, item.content, reasoning_content="", tool_calls=[]))
    else:
        messages.append(ChatMessage(role, item.content))


def _assistant(messages: list[ChatMessage], *, starts_turn: bool = False) -> ChatMessage:
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or (starts_turn and (last.content or last.tool_calls)):
        last = ChatMessage("assistant", "", reasoning_content="", tool_calls=[])
        messages.append(last)
    return last


def _thought(item: Item) -> str:
    """The text of a thought; its summary where there is no text."""
    content = item.content
    text = content if isinstance(content, str) else "".join(part.text or "" for part in content or ())
    return text or "\n".join(part.text for part in item.summary or ())


def _named(value: str | None, where: str) -> str:
    if value is None:
        raise BadRequestError(f"{where} is missing.", param=where)
    return value


def function_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Declarations as the chat template takes them; tools that a server would run are skipped."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters"),
            },
        }
        for tool in tools or ()
        if tool.get("type") == "function"
    ]
