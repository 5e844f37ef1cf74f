"""Requests of /v1/responses, and the same conversation as chat completions write it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.errors import BadRequestError, UnsupportedError
from server.freeform import CUSTOM, INPUT, described
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
    namespace: str | None = None
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


@dataclass(frozen=True, slots=True)
class FunctionNames:
    """Functions may stand in namespaces; the model knows each by one name.

    shown     (namespace, name) -> what the model calls it: its name, behind the namespace's where several have it
    freeform  of `shown`, those whose input is one text: tools of type custom
    """

    shown: Mapping[tuple[str | None, str], str]
    freeform: frozenset[str] = frozenset()

    def of_call(self, namespace: str | None, name: str) -> str:
        """For calls in the history too, whose tool may not be declared any more."""
        return self.shown.get((namespace, name), name)

    def called(self, shown: str) -> dict[str, str]:
        """The fields of a call that name its function."""
        namespace, name = next((key for key, value in self.shown.items() if value == shown), (None, shown))
        return {"name": name} if namespace is None else {"name": name, "namespace": namespace}


OFFERED = frozenset({"function", CUSTOM})
CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})


def input_messages(items: str | Sequence[Item], names: FunctionNames) -> list[ChatMessage]:
    """Chat messages: a thought, a text and calls that follow each other are one assistant turn.

    names   of the functions that are declared beside the items
    raises  BadRequestError, UnsupportedError, naming the item
    """
    if isinstance(items, str):
        return [ChatMessage("user", items)]
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]", names)
    return messages


def _add(messages: list[ChatMessage], item: Item, where: str, names: FunctionNames) -> None:
    kind = item.type or "message"
    if kind == "message":
        _add_message(messages, item, where)
    elif kind in CALLS:
        arguments = item.arguments if kind == "function_call" else {INPUT: item.input or ""}
        name = names.of_call(item.namespace, _named(item.name, f"{where}.name"))
        _assistant(messages).tool_calls.append(ToolCall(FunctionCall(name, arguments), id=item.call_id))
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


def function_names(tools: Sequence[dict[str, Any]] | None) -> FunctionNames:
    """What is no usable name is left for the check of the declarations. raises BadRequestError for one of two kinds"""
    found = [(space, tool["name"]) for space, tool in _functions(tools) if isinstance(tool.get("name"), str)]
    times = Counter(name for _, name in found)
    shown = {(space, name): name if space is None or times[name] == 1 else f"{space}__{name}" for space, name in found}
    kinds: dict[str, set[str]] = {kind: set() for kind in OFFERED}
    for space, tool in _functions(tools):
        if isinstance(name := tool.get("name"), str):
            kinds[tool["type"]].add(shown[space, name])
    if both := kinds["function"] & kinds[CUSTOM]:
        raise BadRequestError(
            f"tools: {min(both)!r} is the name of a function and of a tool of type custom.", param="tools"
        )
    return FunctionNames(shown, frozenset(kinds[CUSTOM]))


def function_tools(tools: Sequence[dict[str, Any]] | None, names: FunctionNames) -> list[dict[str, Any]]:
    """Declarations as the chat template takes them; tools that a server would run are skipped."""
    return [
        {
            "type": "function",
            "function": {
                "name": names.of_call(space, name) if isinstance(name := tool.get("name"), str) else name,
                **(described(tool) if tool["type"] == CUSTOM else _with_parameters(tool)),
            },
        }
        for space, tool in _functions(tools)
    ]


def _with_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": tool.get("description") or "", "parameters": tool.get("parameters")}


def _functions(tools: Sequence[dict[str, Any]] | None) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Each with its namespace. raises BadRequestError"""
    for index, tool in enumerate(tools or ()):
        if tool.get("type") in OFFERED:
            yield None, tool
        elif tool.get("type") == "namespace":
            where = f"tools[{index}]"
            space, members = tool.get("name"), tool.get("tools")
            if not isinstance(space, str) or not isinstance(members, list):
                raise BadRequestError(f"{where}: a namespace has a name and a list of tools.", param=where)
            yield from ((space, each) for each in members if isinstance(each, dict) and each.get("type") in OFFERED)
