"""Text to token ids: off the event loop, in pieces that are remembered, no further than the limit."""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from server.checkpoint import Vocabulary

PIECE_CHARS = 32_768
# between two batches is looked whether the limit is passed
BATCH_CHARS = 262_144
# a longer piece without a boundary is estimated before it is tokenised as one
MAX_UNSEEN_CHARS = 262_144
# cuts anywhere make a few tokens more; far fewer than one in so many
ESTIMATE_SLACK = 16
# a turn shorter than this costs less to tokenise than to remember
MIN_CACHED_CHARS = 256
# letters and digits of which none composes with what may follow: ASCII, kana, ideographs, hangul
WORD_END = "[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]"
# no apostrophe: it may belong to the word before it
WORD_BREAK = r"[ \n.,:;()\[\]{}<>=/+\"_-]|[\u3001\u3002\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f]"
BOUNDARY = re.compile(f"{WORD_END}(?={WORD_BREAK})")


class TooManyTokensError(Exception):
    """Counting stopped at `num_tokens`, which is past the limit."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class PieceCache:
    """Ids by text, the least recently used forgotten first; agents send the same turns again with every step."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pieces: OrderedDict[str, array] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of the remembered texts and ids."""
        return self._num_bytes

    def get(self, text: str) -> array | None:
        with self._lock:
            ids = self._pieces.get(text)
            if ids is not None:
                self._pieces.move_to_end(text)
            return ids

    def put(self, text: str, ids: array) -> None:
        size = _memory(text, ids)
        # what does not fit would only make all else forgotten
        if len(text) < MIN_CACHED_CHARS or size > self._max_bytes:
            return
        with self._lock:
            if text not in self._pieces:
                self._pieces[text] = ids
                self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _memory(*self._pieces.popitem(last=False))


def _memory(text: str, ids: array) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)


class TextEncoder:
    """Blocking, for a worker thread; `encode_batch_fast` lets go of the interpreter while it works."""

    def __init__(self, vocabulary: Vocabulary, max_cached_bytes: int = 64 * 1024 * 1024) -> None:
        self._vocabulary = vocabulary
        self._cache = PieceCache(max_cached_bytes)
        self._max_token_bytes = vocabulary.longest_token

    @property
    def num_cached_bytes(self) -> int:
        return self._cache.num_bytes

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
        fresh: list[tuple[str, array]] = []
        for batch in _batches(parts):
            self._check_long(batch, limit, len(ids))
            for piece in self._encode_batch(batch, fresh):
                ids.extend(piece)
            if len(ids) > limit:
                raise TooManyTokensError(len(ids))
        # only now: a prompt that is refused must not push out those that are answered
        for text, piece in fresh:
            self._cache.put(text, piece)
        return ids

    def _check_bytes(self, parts: Sequence[str], limit: int) -> None:
        """No token spells more than so many bytes, so a text of many bytes need not be tokenised to be too long.

        Composing makes of a text no less than a third of its bytes.
        """
        num_bytes = sum(len(part.encode("utf-8", "surrogatepass")) for part in parts)
        if num_bytes > 3 * limit * self._max_token_bytes:
            raise TooManyTokensError(num_bytes // (3 * self._max_token_bytes))

    def _check_long(self, batch: Sequence[tuple[str, bool]], limit: int, num_before: int) -> None:
        """Estimates a piece without a boundary, as far as it takes to see that it is too long.

        Tokenised as one, such a piece takes seconds and a hundred times its size before anything is known.
        """
        for text, _ in batch:
            if len(text) <= MAX_UNSEEN_CHARS or self._cache.get(text) is not None:
                continue
            num_tokens = num_before
            for start in range(0, len(text), BATCH_CHARS):
                num_tokens += self._estimate(text[start : start + BATCH_CHARS])
                if num_tokens > limit:
                    raise TooManyTokensError(num_tokens)

    def _estimate(self, text: str) -> int:
        """About the number of tokens, and no more: cut anywhere, less an allowance for the cuts."""
        windows = [text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS)]
        found = self._vocabulary.plain.encode_batch_fast(windows, add_special_tokens=False)
        num_tokens = sum(map(len, found))
        return num_tokens - num_tokens // ESTIMATE_SLACK

    def _encode_batch(self, batch: Sequence[tuple[str, bool]], fresh: list[tuple[str, array]]) -> list[Sequence[int]]:
        """Ids of each piece; those that were not remembered are added to `fresh`."""
        found: list[Sequence[int] | None] = [
            (self._vocabulary.added_ids[text],) if is_control else self._cache.get(text) for text, is_control in batch
        ]
        missing = [index for index, ids in enumerate(found) if ids is None]
        encodings = self._vocabulary.plain.encode_batch_fast(
            [batch[index][0] for index in missing], add_special_tokens=False
        )
        for index, encoding in zip(missing, encodings, strict=True):
            found[index] = ids = array("I", encoding.ids)
            fresh.append((batch[index][0], ids))
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

    A cut is made only between a letter or digit and a space, line end or punctuation mark: whatever stands before,
    the pre-tokenizer ends a word there, what follows is read without looking back, and nothing composes across it.
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
