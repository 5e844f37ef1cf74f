"""Recognising tags in a text that is still growing: each test says yes, no, or not yet."""

from collections.abc import Iterable
from typing import NamedTuple

# longer runs than these are no markup; the bounds keep what is held back, and looked at again, small
MAX_SPACES = 256
MAX_NAME = 256
SPACES = " \t\r\n"


class Match(NamedTuple):
    """Where the matched text ends, and the name that it carries."""

    end: int
    name: str = ""


PARTIAL = Match(-1)
"""The text ends inside what may still become a match."""


def literal(text: str, at: int, word: str) -> Match | None:
    if text.startswith(word, at):
        return Match(at + len(word))
    rest = text[at : at + len(word)]
    return PARTIAL if len(rest) < len(word) and word.startswith(rest) else None


def skip_spaces(text: str, at: int) -> int | None:
    """Position after a run of white space, or None when the run is too long for markup."""
    end = at
    while end < len(text) and text[end] in SPACES:
        end += 1
    return end if end - at <= MAX_SPACES else None


def sequence(text: str, at: int, words: Iterable[str]) -> Match | None:
    """The words in this order, with white space allowed between them."""
    match: Match | None = Match(at)
    for position, word in enumerate(words):
        start = skip_spaces(text, match.end) if position else at
        match = None if start is None else literal(text, start, word)
        if match is None or match is PARTIAL:
            return match
    return match


def named_tag(text: str, at: int, prefix: str) -> Match | None:
    """`prefix` NAME `>`, as in ``<function=NAME>``; the name holds no angle bracket and no line end."""
    opening = literal(text, at, prefix)
    if opening is None or opening is PARTIAL:
        return opening
    start = opening.end
    window = text[start : start + MAX_NAME + 1]
    name, bracket, _ = window.partition(">")
    if "<" in name or "\n" in name or (not bracket and len(window) > MAX_NAME):
        return None
    return Match(start + len(name) + 1, name.strip()) if bracket else PARTIAL


def either(matches: Iterable[Match | None]) -> Match | None:
    """The first match; PARTIAL when there is none yet but one may come."""
    found = [match for match in matches if match is not None]
    return next((match for match in found if match is not PARTIAL), PARTIAL if found else None)


def spaces_before(text: str) -> int:
    """Where the white space at the end of `text` begins, looking back at most MAX_SPACES characters."""
    start = len(text)
    while start > 0 and len(text) - start < MAX_SPACES and text[start - 1] in SPACES:
        start -= 1
    return start
