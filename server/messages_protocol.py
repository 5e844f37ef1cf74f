"""Requests of /v1/messages, and the same conversation as chat completions write it."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from server.errors import BadRequestError, UnsupportedError
from server.protocol import ChatMessage, FunctionCall, SamplingFields, ToolCall

# changes with every request of some clients and would make each prompt a new one to the cache
BILLING_LINE = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")


class Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None
    is_error: bool | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Block] | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class OutputOptions(msgspec.Struct):
    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    model: str | None = None
    system: str | list[Block] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputOptions | None = None
    output_format: dict[str, Any] | None = None


def chat_messages(request: MessagesRequest) -> list[ChatMessage]:
    """raises BadRequestError, UnsupportedError"""
    system = _system(request.system)
    turns = [turn for index, message in enumerate(request.messages) for turn in _turns(message, f"messages[{index}]")]
    return [ChatMessage("system", system), *turns] if system else turns


def function_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Declarations as the chat template takes them; tools that a server would run are skipped."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in tools or ()
        if tool.get("type") in (None, "custom")
    ]


def _system(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_block_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return "\n\n".join(text for text in texts if not BILLING_LINE.fullmatch(text))


def _turns(message: Message, where: str) -> Iterator[ChatMessage]:
    if isinstance(message.content, str) or message.content is None:
        yield ChatMessage(message.role, message.content)
    elif message.role == "assistant":
        yield _assistant(message.content, where)
    else:
        yield from _results_then_text(message, message.content, where)


def _results_then_text(message: Message, blocks: Sequence[Block], where: str) -> Iterator[ChatMessage]:
    """Tool results are turns of their own and come before what the user says beside them."""
    texts: list[str] = []
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            yield ChatMessage("tool", _result_text(block, place), tool_call_id=block.tool_use_id)
        else:
            texts.append(_block_text(block, place))
    if texts:
        yield ChatMessage(message.role, "\n".join(texts))


def _result_text(block: Block, where: str) -> str:
    content = block.content
    if isinstance(content, list):
        content = "\n".join(_block_text(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    # the template has no place for the flag, and the model should know
    return f"Error: {content or ''}" if block.is_error else content or ""


def _assistant(blocks: Sequence[Block], where: str) -> ChatMessage:
    turn = ChatMessage("assistant", "", reasoning_content="", tool_calls=[])
    for index, block in enumerate(blocks):
        match block.type:
            case "thinking":
                turn.reasoning_content += block.thinking or ""
            case "redacted_thinking":
                continue
            case "tool_use":
                if block.name is None:
                    raise BadRequestError(f"{where}.content[{index}].name is missing.", param=where)
                turn.tool_calls.append(ToolCall(FunctionCall(block.name, block.input or {}), id=block.id))
            case _:
                turn.content += _block_text(block, f"{where}.content[{index}]")
    return turn


def _block_text(block: Block, where: str) -> str:
    if block.type != "text":
        raise UnsupportedError(f"{where}: blocks of type {block.type!r} are not supported; send text.", param=where)
    if block.text is None:
        raise BadRequestError(f"{where}.text is missing.", param=where)
    return block.text
