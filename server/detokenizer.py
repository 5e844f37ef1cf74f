"""Token ids to text, a token at a time, never splitting a character."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """An unfinished UTF-8 sequence waits for its rest; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
