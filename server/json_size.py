"""How much a JSON text would become, counted before anything is made of it.

Making objects holds the interpreter, and with it every stream, for about a microsecond each; counting does not.
"""

from collections.abc import Iterable

import numpy as np

from server.errors import BadRequestError

CHUNK_BYTES = 65_536
# with the fewest tokens that a message takes, no context has room for as many
MAX_OBJECTS = 65_536
MAX_ENTRIES = 131_072
# twice as many as the token ids of the longest prompt
MAX_VALUES = 524_288
LIMITS = {"objects and lists": (b"{[", MAX_OBJECTS), "entries": (b":", MAX_ENTRIES), "values": (b",", MAX_VALUES)}


def check_json_size(raw: bytes) -> None:
    """raises BadRequestError when the text holds more than any request needs"""
    # most texts have no more of these characters even inside of their strings, and counting bytes is ten times faster
    chunks = [raw[start : start + CHUNK_BYTES] for start in range(0, len(raw), CHUNK_BYTES)]
    if _first_passed(chunks) is None:
        return
    outside = OutsideStrings()
    if name := _first_passed(outside.of(chunk).tobytes() for chunk in chunks):
        raise BadRequestError(f"The body holds more than {LIMITS[name][1]} {name}; send fewer.")


def _first_passed(chunks: Iterable[bytes]) -> str | None:
    """The limit that is passed first. Chunks are short: others may run between them."""
    counts = dict.fromkeys(LIMITS, 0)
    for chunk in chunks:
        for name, (marks, most) in LIMITS.items():
            counts[name] += sum(map(chunk.count, marks))
            if counts[name] > most:
                return name
    return None


class OutsideStrings:
    """The characters of a JSON text that stand outside of its strings, chunk by chunk."""

    def __init__(self) -> None:
        self._is_inside = 0
        self._escape = b""

    def of(self, chunk: bytes) -> np.ndarray:
        text = (self._escape + chunk).replace(b"\\\\", b"")
        # what it escapes comes with the next chunk
        self._escape = b"\\" if text.endswith(b"\\") else b""
        text = text[: len(text) - len(self._escape)].replace(b'\\"', b"")
        chars = np.frombuffer(text, dtype=np.uint8)
        # only whether the number of quotes is odd counts, so it may wrap around
        quotes = np.cumsum(chars == ord('"'), dtype=np.uint8) + np.uint8(self._is_inside)
        if len(quotes):
            self._is_inside = int(quotes[-1] & 1)
        return chars[quotes & 1 == 0]
