"""A conversation as token ids: what clients send, made into what the template takes."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from server.chat_template import ChatTemplate
from server.checkpoint import TextFiles, Vocabulary
from server.continuation import Ending, open_part
from server.errors import BadRequestError, PromptTooLongError, UnsupportedError
from server.freeform import CUSTOM, INPUT
from server.protocol import ChatMessage, ContentPart, ToolCall
from server.reasoning import is_open
from server.schema_shape import check_levels
from server.tokens import TextEncoder, TooManyTokensError
from server.tool_schema import refuse_constant

logger = logging.getLogger(__name__)

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
ROLES |= {"function": "tool"}
MESSAGES = "messages"
# the key of arguments that are no JSON object
RAW = "_raw"
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
# OpenAI's words for effort -> the template's
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "xhigh", "xhigh": "xhigh", "max": "xhigh"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """starts_in_thought: the rendered text ends with an open `<think>`, or inside the thought that follows it;
    starts_in_content: it ends inside an answer, where `<think>` is a text like any other;
    marks: tokens up to which the messages of system and of users reach"""

    token_ids: tuple[int, ...]
    starts_in_thought: bool = False
    starts_in_content: bool = False
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Shape:
    """Ids by which messages are told apart; roles  those of system and user, where each is one token"""

    opener: int | None
    tool_response: int | None
    roles: frozenset[int]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "Shape":
        words = [vocabulary.plain.encode(role, add_special_tokens=False).ids for role in ("system", "user")]
        added = vocabulary.added_ids
        roles = frozenset(ids[0] for ids in words if len(ids) == 1)
        return cls(added.get("<|im_start|>"), added.get("<tool_response>"), roles)


class PromptBuilder:
    """Blocking, for a worker thread."""

    def __init__(self, files: TextFiles, encoder: TextEncoder, max_model_len: int) -> None:
        self._template = ChatTemplate(files.template)
        self._encoder = encoder
        self._max_model_len = max_model_len
        self._shape = Shape.of(files.vocabulary)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        field: str = MESSAGES,
        ending: Ending = "answer",
    ) -> Prompt:
        """field  that the client wrote the messages in. raises BadRequestError, PromptTooLongError"""
        check_levels(tools)
        turns = conversation(messages, field)
        part = open_part(turns[-1], bool(tools), options) if ending == "last message" else None
        try:
            marked, mark = self._template.render(turns, tools, options, opens_answer=ending == "answer", continues=part)
        except BadRequestError as error:
            error.param = field if error.param == MESSAGES else error.param
            raise
        token_ids = self._within_limit(self._encoder.encode_prompt, marked, mark, param=field)
        return Prompt(
            token_ids,
            marks=message_ends(token_ids, self._shape),
            starts_in_thought=is_open(marked) or part == "reasoning_content",
            starts_in_content=part == "content",
        )

    def text(self, text: str) -> Prompt:
        """A bare prompt, in which the caller writes the control tokens. raises PromptTooLongError"""
        token_ids = self._within_limit(self._encoder.encode_text, text, allows_control=True, param="prompt")
        return Prompt(token_ids, marks=message_ends(token_ids, self._shape))

    def options(self, kwargs: Mapping[str, Any] | None, effort: str | None, thinks: bool | None) -> dict[str, Any]:
        """Template options of the request's several ways to ask for them; the template's own names win."""
        options = {name: value for name, value in (kwargs or {}).items() if value is not None}
        if thinks is not None:
            options.setdefault("enable_thinking", thinks)
        if effort == "none":
            options.setdefault("enable_thinking", False)
        elif effort is not None:
            if effort not in EFFORTS:
                raise BadRequestError(
                    f"reasoning_effort: {effort!r} is none of none, {', '.join(EFFORTS)}.", param="reasoning_effort"
                )
            # a template without this option thinks as it always does
            if "reasoning_effort" in self._template.variables:
                options.setdefault("reasoning_effort", EFFORTS[effort])
        return options

    def _within_limit(
        self, encode: Callable[..., list[int]], *texts: str, param: str, **options: bool
    ) -> tuple[int, ...]:
        # room for one output token
        limit = self._max_model_len - 1
        try:
            return tuple(encode(*texts, limit, **options))
        except TooManyTokensError as error:
            raise PromptTooLongError(self._max_model_len, error.num_tokens, is_exact=False, param=param) from error


def message_ends(token_ids: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """Where messages of system and of users end: a template may drop what comes after one of them, and others share
    what comes before. Tools answer in the user's name; what they say is no such place."""
    starts = [index for index, token_id in enumerate(token_ids) if token_id == shape.opener]
    return tuple(
        end
        for start, end in pairwise(starts)
        if token_ids[start + 1] in shape.roles and shape.tool_response not in token_ids[start : start + 5]
    )


def conversation(messages: Sequence[ChatMessage], field: str = MESSAGES) -> list[dict[str, Any]]:
    """Messages in the template's form: one system message at the head, text contents, arguments as objects.

    Later system messages become user turns where they stand, so that what comes before them stays cached.
    """
    # elsewhere a message is made of several items, and its number is not the client's
    turns = [
        _turn(message, f"{field}[{index}]" if field == MESSAGES else field) for index, message in enumerate(messages)
    ]
    _log_bad_arguments(turns)
    head = next((index for index, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    system = "\n\n".join(turn["content"] for turn in turns[:head])
    rest = [turn | {"role": "user"} if turn["role"] == "system" else turn for turn in turns[head:]]
    if rest and rest[0]["role"] == "tool" and not head:
        # the template opens a tool turn only after another turn
        rest[0] = {"role": "user", "content": rest[0]["content"]}
    if not any(turn["role"] == "user" for turn in rest):
        raise BadRequestError(f"{field}: there is no message of role user; add one.", param=field)
    return [{"role": "system", "content": system}, *rest] if head else rest


def _turn(message: ChatMessage, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise BadRequestError(
            f"{where}.role: {message.role!r} is none of {', '.join(sorted(ROLES))}.",
            param=f"{where}.role",
        )
    role = ROLES[message.role]
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, where)}
    if role == "assistant":
        # always a string: else the template would look for a thought inside the content and cut it there
        turn["reasoning_content"] = message.reasoning_content or message.reasoning or ""
        if message.tool_calls:
            turn["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls)
            ]
    return turn


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    if call.custom is not None:
        return {"name": call.custom.name, "arguments": {INPUT: call.custom.input or ""}}
    if call.function is None:
        kind = CUSTOM if call.type == CUSTOM else "function"
        raise BadRequestError(f"{where}.{kind} is missing.", param=f"{where}.{kind}")
    return {"name": call.function.name, "arguments": arguments(call.function.arguments)}


def _text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{where}.content[{at}]") for at, part in enumerate(content))


def _part_text(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        raise UnsupportedError(f"{where}: parts of type {part.type!r} are not supported; send text parts.", param=where)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise BadRequestError(f"{where}.text is missing.", param=f"{where}.text")
    return text


def arguments(value: Any) -> dict[str, Any]:
    """Arguments of a call in the history. What is no JSON object is kept as it is under `_raw`, never refused."""
    if isinstance(value, dict):
        return value
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    try:
        parsed = json.loads(value, parse_constant=refuse_constant) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return parsed
    return {RAW: value}


def _log_bad_arguments(turns: Sequence[Mapping[str, Any]]) -> None:
    """One line for a request, however many calls of its history are bad."""
    calls = (call["arguments"] for turn in turns for call in turn.get("tool_calls", ()))
    if count := sum(found.keys() == {RAW} for found in calls):
        logger.warning("%d tool calls in the history have arguments that are no JSON object", count)
