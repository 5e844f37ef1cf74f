"""Stop strings, found across any cut of the text."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text on until a stop string is complete; what may still become one is held back.

    The match that ends first wins, and of those the longest, so that the result does not depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        if not self._stops or self.hit is not None:
            return "" if self.hit is not None else text
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.hit = min(matches)
            self._held = ""
            return text[:at]
        keep = len(text) - max(partial_suffix(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def partial_suffix(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a beginning of `word`, but not all of it."""
    for length in range(min(len(text), len(word) - 1), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
