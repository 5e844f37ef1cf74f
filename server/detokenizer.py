"""Token ids to text, a token at a time, never splitting a character."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """An unfinished UTF-8 sequence waits for its rest; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_waiting = False

    def push(self, token_id: int) -> str:
        data = self._token_bytes(token_id)
        # most tokens are ASCII, and the decoder costs more than all else here
        if not self._is_waiting and data.isascii():
            return data.decode("ascii")
        text = self._decoder.decode(data)
        self._is_waiting = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
