"""Text to token ids: off the event loop, in pieces that are remembered, no further than the limit."""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from server.checkpoint import Vocabulary

PIECE_CHARS = 32_768
BATCH_CHARS = 1_048_576
# a turn shorter than this costs less to tokenise than to remember
MIN_CACHED_CHARS = 256
BOUNDARY = re.compile(r"[A-Za-z0-9](?=[ \n])")


class TooManyTokensError(Exception):
    """Counting stopped at `num_tokens`, which is past the limit."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class PieceCache:
    """Ids by text, the least recently used forgotten first; agents send the same turns again with every step."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._pieces: OrderedDict[str, array] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str) -> array | None:
        with self._lock:
            ids = self._pieces.get(text)
            if ids is not None:
                self._pieces.move_to_end(text)
            return ids

    def put(self, text: str, ids: array) -> None:
        if len(text) < MIN_CACHED_CHARS:
            return
        with self._lock:
            if text not in self._pieces:
                self._pieces[text] = ids
                self._num_chars += len(text)
            while self._num_chars > self._max_chars:
                forgotten, _ = self._pieces.popitem(last=False)
                self._num_chars -= len(forgotten)


class TextEncoder:
    """Blocking, for a worker thread; `encode_batch_fast` lets go of the interpreter while it works."""

    def __init__(self, vocabulary: Vocabulary, max_cached_chars: int = 32 * 1024 * 1024) -> None:
        self._vocabulary = vocabulary
        self._cache = PieceCache(max_cached_chars)
        self._max_token_bytes = vocabulary.longest_token

    def encode_prompt(self, marked: str, mark: str, limit: int) -> list[int]:
        """Ids of a rendered prompt: what the template wrote may be control, what carries the mark is text.

        raises  TooManyTokensError when there are more than `limit`
        """
        parts = self._vocabulary.pattern.split(marked)
        # the pattern's group puts control tokens at odd places
        pieces = [part if index % 2 else part.replace(mark, "") for index, part in enumerate(parts)]
        return self._encode(pieces, limit)

    def encode_text(self, text: str, limit: int, *, allows_control: bool = False) -> list[int]:
        """Ids of plain text; with `allows_control`, added tokens that it spells become their ids."""
        return self._encode(self._vocabulary.pattern.split(text) if allows_control else [text], limit)

    def _encode(self, parts: Sequence[str], limit: int) -> list[int]:
        self._check_bytes(parts, limit)
        ids: list[int] = []
        for batch in _batches(parts):
            for piece in self._encode_batch(batch):
                ids.extend(piece)
            if len(ids) > limit:
                raise TooManyTokensError(len(ids))
        return ids

    def _check_bytes(self, parts: Sequence[str], limit: int) -> None:
        """No token spells more than so many bytes, so a text of many bytes need not be tokenised to be too long."""
        num_chars = sum(map(len, parts))
        if num_chars > limit * self._max_token_bytes:
            raise TooManyTokensError(num_chars // self._max_token_bytes)

    def _encode_batch(self, batch: Sequence[tuple[str, bool]]) -> list[Sequence[int]]:
        found: list[Sequence[int] | None] = [
            (self._vocabulary.added_ids[text],) if is_control else self._cache.get(text) for text, is_control in batch
        ]
        missing = [index for index, ids in enumerate(found) if ids is None]
        encodings = self._vocabulary.plain.encode_batch_fast(
            [batch[index][0] for index in missing], add_special_tokens=False
        )
        for index, encoding in zip(missing, encodings, strict=True):
            found[index] = ids = array("I", encoding.ids)
            self._cache.put(batch[index][0], ids)
        return found


def _batches(parts: Sequence[str]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces, each with whether it is a control token, in groups of bounded size."""
    batch: list[tuple[str, bool]] = []
    num_chars = 0
    for index, part in enumerate(parts):
        for piece in [part] if index % 2 else cut(part):
            batch.append((piece, bool(index % 2)))
            num_chars += len(piece)
            if num_chars >= BATCH_CHARS:
                yield batch
                batch, num_chars = [], 0
    if batch:
        yield batch


def cut(text: str, size: int = PIECE_CHARS) -> list[str]:
    """Pieces of about `size` characters whose ids, joined, are the ids of the whole.

    A cut is made only between an ASCII letter or digit and a space or line end: whatever stands before, the
    pre-tokenizer ends a word there, what follows is read without looking back, and nothing composes across it.
    """
    pieces: list[str] = []
    start = 0
    while len(text) - start > size:
        boundary = BOUNDARY.search(text, start + size)
        if boundary is None:
            break
        pieces.append(text[start : boundary.end()])
        start = boundary.end()
    return [*pieces, text[start:]] if start < len(text) else pieces
