"""Tool calls in the family's XML form, read while they are being written.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The wire has no escaping, so one rule says where a value ends, for streamed and whole answers alike: at a closing tag
that is followed by what may follow it, or by the end of the output. Everything else is data, byte for byte, less one
line end after the opening tag and one before the closing tag. Where the length limit ends the output, what may be the
beginning of a tag is neither content nor data.
"""

import json
import secrets
from collections.abc import Callable
from json.encoder import encode_basestring
from typing import NamedTuple

from server.markup import PARTIAL, SPACES, Match, either, literal, named_tag, sequence, skip_spaces, spaces_before
from server.tool_schema import ToolSchemas, refuse_constant, to_json

CALL = "<tool_call>"
END_CALL = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
# a call in JSON is withheld whole, so it must stay small
MAX_JSON_CALL = 65_536
MAX_JSON_WORD = 6


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    """is_freeform  it is called with one text, and no object of parameters"""

    index: int
    call_id: str
    name: str
    is_freeform: bool = False


class CallArguments(NamedTuple):
    """A part of the arguments; the parts of one call make up one JSON object, or the text of a free-form tool."""

    index: int
    text: str
    is_freeform: bool = False


class CallEnd(NamedTuple):
    index: int


CallEvent = Content | CallStart | CallArguments | CallEnd


class Closer(NamedTuple):
    """Tags that end a value, the sequences one of which must follow, and whether the value's end swallows the tags."""

    tags: tuple[str, ...]
    followers: tuple[tuple[str, ...], ...]
    is_own: bool


def _without_half(tag: str, text: str) -> str:
    """The text less the beginning of a tag at its end."""
    at = text.rfind("<")
    return text[:at] if at >= 0 and tag.startswith(text[at:]) else text


NEXT_CALL = ((CALL, FUNCTION),)
CLOSERS = (
    Closer((END_PARAMETER,), ((PARAMETER,), (END_FUNCTION,), (END_CALL,)), is_own=True),
    # forms that leave out a closing tag count only where the whole call ends
    Closer((END_FUNCTION, END_CALL), NEXT_CALL, is_own=False),
    Closer((END_CALL,), NEXT_CALL, is_own=False),
)


def value_end(text: str, is_final: bool) -> tuple[int, int | None]:
    """How far `text` is certainly value, and where reading goes on after its closer (None: not closed yet)."""
    at = text.find("<")
    while at >= 0:
        match = either(_close(text, at, closer, is_final) for closer in CLOSERS)
        if match is not None:
            end = at - 1 if text[:at].endswith("\n") else at
            return end, None if match is PARTIAL else match.end
        at = text.find("<", at + 1)
    # a line end may belong to the closer that comes next
    return len(text) - (not is_final and text.endswith("\n")), None


def _close(text: str, at: int, closer: Closer, is_final: bool) -> Match | None:
    match = sequence(text, at, closer.tags)
    if match is None or match is PARTIAL:
        return None if is_final else match
    after = skip_spaces(text, match.end)
    if after is None:
        return None
    follower = PARTIAL if after == len(text) else either(sequence(text, after, words) for words in closer.followers)
    if follower is None or (follower is PARTIAL and not is_final):
        return follower
    return match if closer.is_own else Match(at)


def call_opening(text: str, at: int, tools: ToolSchemas) -> Match | None:
    """`<tool_call>` and `<function=NAME>` of a declared tool."""
    match = literal(text, at, CALL)
    if match is None or match is PARTIAL:
        return match
    start = skip_spaces(text, match.end)
    return None if start is None else _declared(named_tag(text, start, FUNCTION), tools)


def framed_opening(text: str, at: int, tools: ToolSchemas) -> Match | None:
    """A call opening, whole enough to tell it from a mention: a parameter or the function's end follows it."""
    return _with_body(text, call_opening(text, at, tools))


def bare_opening(text: str, at: int, tools: ToolSchemas) -> Match | None:
    """`<function=NAME>` without its `<tool_call>`, a form that the family drifts into."""
    return _with_body(text, _declared(named_tag(text, at, FUNCTION), tools))


def _declared(match: Match | None, tools: ToolSchemas) -> Match | None:
    return match if match is None or match is PARTIAL or match.name in tools else None


def _with_body(text: str, match: Match | None) -> Match | None:
    if match is None or match is PARTIAL:
        return match
    start = skip_spaces(text, match.end)
    if start is None:
        return None
    body = either((literal(text, start, PARAMETER), literal(text, start, END_FUNCTION)))
    return match if body is not None and body is not PARTIAL else body


class ToolCallParser:
    """Splits an answer into content and calls of declared tools. Anything that is no such call is content."""

    def __init__(self, tools: ToolSchemas) -> None:
        self._tools = tools
        self._buffer = ""
        self._events: list[CallEvent] = []
        self._read: Callable[[bool], bool] = self._read_content
        self._is_cut = False
        self._last_char = "\n"
        self._index = 0
        self._name = ""
        self._num_parameters = 0
        self._types: frozenset[str] = frozenset()
        self._is_text = True
        self._is_freeform = False
        self._raw: list[str] = []
        self.num_calls = 0

    def push(self, text: str) -> list[CallEvent]:
        # most tokens hold nothing that has to be looked at, in the two places where most of them are
        if text and not self._buffer and "<" not in text:
            if self._read == self._read_content and text[-1] not in SPACES:
                self._last_char = text[-1]
                return [Content(text)]
            if self._read == self._read_value and self._is_text and text[-1] != "\n":
                written = self._written(text)
                return [CallArguments(self._index, written, self._is_freeform)] if written else []
        self._buffer += text
        return self._drain(is_final=False)

    def flush(self, is_cut: bool) -> list[CallEvent]:
        """The rest. A call that the length limit cut keeps its arguments as far as they came."""
        self._is_cut = is_cut
        return self._drain(is_final=True)

    def _drain(self, is_final: bool) -> list[CallEvent]:
        self._events = []
        while self._read(is_final):
            pass
        return self._events

    # each reader takes what it can from the buffer and says whether the next one may go on

    def _read_content(self, is_final: bool) -> bool:
        at = self._buffer.find("<")
        while at >= 0:
            match = self._opening(at)
            if match is PARTIAL and (self._is_cut or not is_final):
                self._emit_content(spaces_before(self._buffer[:at]))
                # of a frame that was cut nothing can be made
                self._skip(len(self._buffer) if is_final else 0)
                return False
            if match is not None and match is not PARTIAL:
                return self._begin(at, match)
            at = self._buffer.find("<", at + 1)
        # white space before a call is no content, and whether a call follows is not known yet
        self._emit_content(len(self._buffer) if is_final else spaces_before(self._buffer))
        return False

    def _opening(self, at: int) -> Match | None:
        before = self._buffer[at - 1] if at else self._last_char
        return either(
            (
                call_opening(self._buffer, at, self._tools),
                sequence(self._buffer, at, (CALL, "{")),
                bare_opening(self._buffer, at, self._tools) if before == "\n" else None,
            )
        )

    def _begin(self, at: int, match: Match) -> bool:
        start = spaces_before(self._buffer[:at])
        self._emit_content(start)
        if match.name:
            self._skip(match.end - start)
            self._start_call(match.name)
        else:
            self._read = self._read_json_call
        return True

    def _read_json_call(self, is_final: bool) -> bool:
        """The JSON form of other families, taken whole; anything else that begins like it is content."""
        end = self._buffer.find(END_CALL)
        while end >= 0:
            if call := self._json_call(self._buffer[:end]):
                self._skip(end)
                self._emit_whole_call(*call)
                return True
            end = self._buffer.find(END_CALL, end + 1)
        if not is_final and len(self._buffer) < MAX_JSON_CALL:
            return False
        if is_final and not self._is_cut and (call := self._json_call(self._buffer)):
            self._skip(len(self._buffer))
            self._emit_whole_call(*call)
            return True
        if is_final and self._is_cut and self._is_cut_json_call():
            self._skip(len(self._buffer))
            return False
        self._emit_content(self._buffer.index(CALL) + len(CALL))
        self._read = self._read_content
        return True

    def _json_call(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of ``<tool_call>{"name": …, "arguments": {…}}``."""
        try:
            call = json.loads(text.strip().removeprefix(CALL), parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return None
        name, arguments = (call.get("name"), call.get("arguments")) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return None
        if self._tools.is_freeform(name):
            return name, next((value for value in arguments.values() if isinstance(value, str)), "")
        return name, json.dumps(arguments, ensure_ascii=False)

    def _is_cut_json_call(self) -> bool:
        """Whether the JSON so far is a call without its closing tag, or ends inside what may become one."""
        text = _without_half(END_CALL, self._buffer.strip().removeprefix(CALL))
        try:
            json.loads(text, parse_constant=refuse_constant)
        except json.JSONDecodeError as error:
            # an open string is told by its beginning, a half word or escape by its own
            return error.msg.startswith("Unterminated") or error.pos + MAX_JSON_WORD > len(text)
        except (ValueError, RecursionError):
            return False
        return self._json_call(text) is not None

    def _emit_whole_call(self, name: str, arguments: str) -> None:
        self._start_call(name)
        self._emit_text(arguments)
        self._events.append(CallEnd(self._index))
        self._read = self._read_after_function

    def _read_function(self, is_final: bool) -> bool:
        """Between parameters."""
        self._skip_spaces()
        if not self._buffer:
            return self._end_output() if is_final else False
        match = either((literal(self._buffer, 0, END_FUNCTION), literal(self._buffer, 0, END_CALL)))
        tag = named_tag(self._buffer, 0, PARAMETER)
        if either((match, tag)) is PARTIAL and not is_final:
            return False
        if tag is not None and tag is not PARTIAL:
            self._skip(tag.end)
            self._start_value(tag.name)
        elif match is not None and match is not PARTIAL:
            self._skip(len(END_FUNCTION) if self._buffer.startswith(END_FUNCTION) else 0)
            self._end_call()
        else:
            # text between parameters has no place in the call
            following = self._buffer.find("<", 1)
            self._skip(following if following > 0 else len(self._buffer))
        return True

    def _read_value_start(self, is_final: bool) -> bool:
        if not self._buffer and not is_final:
            return False
        self._skip(int(self._buffer.startswith("\n")))
        self._read = self._read_value
        return True

    def _read_value(self, is_final: bool) -> bool:
        end, after = value_end(self._buffer, is_final)
        if after is None and is_final and self._is_cut:
            return self._cut_value()
        self._take_value(self._buffer[:end])
        self._skip(end if after is None else after)
        if after is None and not is_final:
            return False
        self._end_value(is_cut=False)
        return True

    def _cut_value(self) -> bool:
        """The length limit ends the value; what may begin its closer is no part of it."""
        end, _ = value_end(self._buffer, is_final=False)
        self._take_value(self._buffer[:end])
        self._skip(len(self._buffer))
        self._end_value(is_cut=True)
        return True

    def _read_after_function(self, is_final: bool) -> bool:
        self._skip_spaces()
        if not self._buffer:
            return False
        end_call = literal(self._buffer, 0, END_CALL)
        another = _declared(named_tag(self._buffer, 0, FUNCTION), self._tools)
        if either((end_call, another)) is PARTIAL:
            self._skip(len(self._buffer) if is_final else 0)
            return False
        if another is not None and another is not PARTIAL:
            self._skip(another.end)
            self._start_call(another.name)
            return True
        self._skip(len(END_CALL) if self._buffer.startswith(END_CALL) else 0)
        self._skip_spaces()
        self._read, self._last_char = self._read_after_call, "\n"
        return True

    def _read_after_call(self, is_final: bool) -> bool:
        """White space after a call is a separator, not content."""
        self._skip_spaces()
        if self._buffer:
            self._read = self._read_content
        return bool(self._buffer)

    def _start_call(self, name: str) -> None:
        self._index, self._name, self._num_parameters = self.num_calls, name, 0
        self._is_freeform = self._tools.is_freeform(name)
        self.num_calls += 1
        self._events.append(CallStart(self._index, f"call_{secrets.token_hex(12)}", name, self._is_freeform))
        self._read = self._read_function

    def _start_value(self, name: str) -> None:
        self._types = self._tools.types(self._name, name)
        self._is_text = self._is_freeform or "string" in self._types
        self._raw = []
        prefix = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self._emit_arguments(f"{prefix}{json.dumps(name, ensure_ascii=False)}: {chr(34) if self._is_text else ''}")
        self._read = self._read_value_start

    def _take_value(self, text: str) -> None:
        if self._is_text:
            self._emit_text(self._written(text))
        else:
            self._raw.append(text)

    def _written(self, text: str) -> str:
        """A part of a text as a part of the arguments. The input of a free-form tool is its first parameter."""
        if self._is_freeform:
            return text if self._num_parameters == 1 else ""
        return encode_basestring(text)[1:-1]

    def _end_value(self, is_cut: bool) -> None:
        if not self._is_text:
            raw = "".join(self._raw)
            self._emit_arguments(raw.strip() if is_cut else to_json(raw, self._types))
        elif not is_cut:
            self._emit_arguments('"')
        self._read = self._read_function

    def _end_call(self) -> None:
        self._emit_arguments("}" if self._num_parameters else "{}")
        self._events.append(CallEnd(self._index))
        self._read = self._read_after_function

    def _end_output(self) -> bool:
        """The output ends inside a call: its arguments are completed, unless the length limit cut them."""
        if not self._is_cut:
            self._end_call()
        return False

    def _emit_content(self, end: int) -> None:
        if end:
            self._last_char = self._buffer[end - 1]
            self._events.append(Content(self._buffer[:end]))
            self._skip(end)

    def _emit_arguments(self, text: str) -> None:
        """What is of the JSON object, and of no value."""
        if not self._is_freeform:
            self._emit_text(text)

    def _emit_text(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(self._index, text, self._is_freeform))

    def _skip(self, count: int) -> None:
        self._buffer = self._buffer[count:]

    def _skip_spaces(self) -> None:
        self._buffer = self._buffer.lstrip(SPACES)
