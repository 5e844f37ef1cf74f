"""Cuts a byte stream into whole server-sent events and notes how it ends; bytes in, the same bytes out."""

import json
import re
from typing import Any

from router.counts import line_counts, response_id

HELD_BYTES = 1024 * 1024
# a line end is CR LF, LF or CR; a CR at the very end waits for the byte after it
_LINE_END = re.compile(rb"\r\n|\n|\r")
_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")
_DONE = (b"data: [DONE]", b"data:[DONE]")
_FINAL_EVENTS = {
    "chat": _DONE,
    "completions": _DONE,
    "generate": _DONE,
    "messages": (b"event: message_stop", b"event:message_stop"),
    "responses": tuple(
        b"event:" + space + b"response." + end
        for space in (b"", b" ")
        for end in (b"completed", b"failed", b"incomplete")
    ),
}
_FINAL_TYPES = {"message_stop", "response.completed", "response.failed", "response.incomplete", "error"}


class EventTooLargeError(Exception):
    """One event is larger than the gateway holds."""


class EventSplitter:
    """Holds the unfinished tail of a stream, at most 1 MiB of it."""

    def __init__(self) -> None:
        self._tail = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Every whole event that the stream has reached; empty while one is unfinished."""
        tail = self._tail
        # an end may begin in what is already held, at most three bytes back
        searched_from = max(0, len(tail) - 3)
        tail += chunk
        end = _last_end(tail, searched_from)
        if len(tail) - end > HELD_BYTES:
            raise EventTooLargeError(f"an event is larger than {HELD_BYTES} bytes")
        events = bytes(tail[:end])
        del tail[:end]
        return events

    def finish(self) -> bytes:
        """The tail at the end of the stream where it is whole (its last line end is a bare CR), else nothing."""
        return bytes(self._tail) if self._tail.endswith((b"\r\r", b"\n\r")) else b""


class StreamScanner:
    """Reads beside the stream: token counts, and whether the API's terminal marker was seen.

    counts       `prompt`, `cached`, `output`, as far as the upstream told them
    response_id  of the Responses API
    """

    def __init__(self, api: str) -> None:
        self._is_named = api == "responses"
        self._finals = _FINAL_EVENTS.get(api, ())
        self._last = b""
        self.has_marker = False
        self.counts: dict[str, int] = {}
        self.response_id: str | None = None

    def note(self, events: bytes) -> None:
        if b"data:" in events:
            self._last = events
            if self._is_named and self.response_id is None:
                self._note_id(events)
        if b'_tokens"' in events:
            for line in _LINE_END.split(events):
                # what a later event tells replaces what an earlier one told
                self.counts |= line_counts(line)
        if not self.has_marker:
            self.has_marker = any(_has_line(events, final) for final in self._finals)

    def _note_id(self, events: bytes) -> None:
        for line in _LINE_END.split(events):
            if line.startswith(b"data:") and b'"response"' in line:
                self.response_id = self.response_id or response_id(line[5:])

    def is_whole(self) -> bool:
        """True when the stream has said that it is over, by its marker or by an error of its own."""
        return self.has_marker or not self._finals or _is_final(self.last_data())

    def last_data(self) -> dict[str, Any]:
        """Data of the newest event that carries a JSON object."""
        for line in reversed(_LINE_END.split(self._last)):
            if line.startswith(b"data:") and isinstance(value := _object(line[5:]), dict):
                return value
        return {}


def _last_end(buffer: bytearray, searched_from: int) -> int:
    if b"\r" not in buffer:
        found = buffer.rfind(b"\n\n", searched_from)
        return found + 2 if found >= 0 else 0
    end = 0
    for match in _EVENT_END.finditer(buffer, searched_from):
        end = match.end()
    return end


def _has_line(events: bytes, start: bytes) -> bool:
    # JSON strings hold no raw line end, so generated text cannot forge a line
    return events.startswith(start) or b"\n" + start in events or b"\r" + start in events


def _is_final(data: dict[str, Any]) -> bool:
    return bool(data.get("error")) or data.get("type") in _FINAL_TYPES


def _object(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
