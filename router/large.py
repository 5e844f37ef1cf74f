"""Token counts of a JSON answer that is too large to hold, read while it passes."""

import re

from router.counts import body_counts

_HELD_BYTES = 16 * 1024
_KEY = b"usage"
_BRACKET = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class UsageScanner:
    """Finds the object `usage` of the outermost object. What stands deeper, or in a string, may repeat the client.

    counts  `prompt`, `cached`, `output`; empty until they are known
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._depth = 0
        self._is_string = self._is_escaped = False
        # the last string so far, as much of it as tells whether it is the key
        self._string = b""
        self._usage: bytearray | None = None

    def note(self, data: bytes) -> None:
        at = 0
        while at < len(data):
            start, usage = at, self._usage
            at = self._end_of_string(data, at) if self._is_string else self._next_bracket(data, at)
            if usage is not None:
                self._take(usage, data[start:at])

    def _end_of_string(self, data: bytes, at: int) -> int:
        """Just after the string's end, or the end of the data."""
        start, at = at, at + self._is_escaped
        end = _IN_STRING.match(data, at).end()
        self._string = (self._string + data[start:end][: len(_KEY) + 1])[: len(_KEY) + 1]
        # a backslash at the very end escapes what comes next
        self._is_escaped = data[end : end + 1] == b"\\"
        self._is_string = data[end : end + 1] != b'"'
        return end + 1 if end < len(data) else end

    def _next_bracket(self, data: bytes, at: int) -> int:
        found = _BRACKET.search(data, at)
        if found is None:
            return len(data)
        match found[0]:
            case b'"':
                self._is_string, self._string = True, b""
            case b"{" | b"[":
                self._depth += 1
                if self._depth == 2 and found[0] == b"{" and self._string == _KEY:
                    self._usage = bytearray(b"{")
            case _:
                self._depth -= 1
        return found.end()

    def _take(self, usage: bytearray, part: bytes) -> None:
        usage += part
        if self._depth == 1:
            self.counts |= body_counts(b'{"usage":' + bytes(usage) + b"}")
        if self._depth == 1 or len(usage) > _HELD_BYTES:
            self._usage = None
