"""How much work and memory the way from text to ids takes, whatever the script."""

import random
import sys
import time
from array import array

import pytest

from server.tokens import MAX_UNSEEN_CHARS, PieceCache, TextEncoder, TooManyTokensError, cut

LIMIT = 262_143


def letters(first: int, last: int, num_chars: int) -> str:
    rng = random.Random(5)
    return "".join(chr(rng.randint(first, last)) for _ in range(10_000)) * (num_chars // 10_000)


@pytest.mark.parametrize(
    ("first", "last", "num_chars"),
    [(0x4E00, 0x9FA5, 10_000_000), (0x0E01, 0x0E2E, 10_000_000), (0x61, 0x7A, 30_000_000)],
)
def test_a_text_of_many_megabytes_is_refused_soon(files, first, last, num_chars):
    text = letters(first, last, num_chars)
    started = time.process_time()
    with pytest.raises(TooManyTokensError) as caught:
        TextEncoder(files.vocabulary).encode_text(text, LIMIT)
    # no more is read than it takes to know
    assert LIMIT < caught.value.num_tokens < 2.5 * LIMIT
    assert time.process_time() - started < 4


def test_bytes_are_counted_not_characters(files):
    encoder = TextEncoder(files.vocabulary)
    num_chars = 3 * 4 * files.vocabulary.longest_token
    with pytest.raises(TooManyTokensError) as caught:
        encoder.encode_text("日" * num_chars, 4)
    assert caught.value.num_tokens == 12


def test_a_long_piece_that_fits_has_its_exact_ids(files):
    text = letters(0x61, 0x7A, MAX_UNSEEN_CHARS + 10_000)
    assert cut(text) == [text]
    plain = files.vocabulary.plain
    expected = plain.encode(text, add_special_tokens=False).ids
    assert TextEncoder(files.vocabulary).encode_text(text, len(expected)) == expected
    with pytest.raises(TooManyTokensError):
        TextEncoder(files.vocabulary).encode_text(text, len(expected) - 1)


@pytest.mark.parametrize("sentence", ["日本語を話します。", "한국어를、", "key=value;", "a,b,c,", "f(x)"])
def test_text_without_spaces_is_cut(sentence):
    assert max(map(len, cut(sentence * 1000, 100))) <= 100 + len(sentence)


def test_remembered_pieces_stay_within_their_bytes():
    cache = PieceCache(10_000)
    texts = [f"{number:02}" + "日" * 500 for number in range(30)]
    for text in texts:
        cache.put(text, array("I", range(300)))
    kept = [text for text in texts if cache.get(text) is not None]
    assert kept and kept == texts[-len(kept) :]
    held = sum(sys.getsizeof(text) + sys.getsizeof(cache.get(text)) for text in kept)
    assert held == cache.num_bytes <= 10_000


def test_what_can_never_fit_pushes_nothing_out():
    cache = PieceCache(10_000)
    cache.put("a" * 1000, array("I", [1]))
    cache.put("b" * 20_000, array("I", [1]))
    assert cache.get("a" * 1000) is not None
    assert cache.get("b" * 20_000) is None


def test_a_refused_prompt_is_not_remembered(files):
    encoder = TextEncoder(files.vocabulary)
    with pytest.raises(TooManyTokensError):
        encoder.encode_text("some words " * 1000, 100)
    assert encoder.num_cached_bytes == 0
    encoder.encode_text("some words " * 1000, 10_000)
    assert encoder.num_cached_bytes > 0
