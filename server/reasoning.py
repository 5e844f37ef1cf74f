"""Thinking and answer, told apart while the text is being written."""

from collections.abc import Callable
from typing import NamedTuple

from server.markup import PARTIAL, either, literal
from server.stop import partial_suffix
from server.tool_calls import framed_opening
from server.tool_schema import ToolSchemas

OPEN = "<think>"
CLOSE = "</think>"
# the template writes this many line ends between the thought and the answer
LINE_ENDS_AFTER = 2
Reader = Callable[[bool, list[str], list[str]], bool]


class Reasoning(NamedTuple):
    text: str


def is_open(prompt: str) -> bool:
    """Whether generation starts inside a thought, as the end of the rendered prompt says (no flag does)."""
    return prompt.rstrip("\n").endswith(OPEN)


class ReasoningSplitter:
    """Splits text into reasoning and the rest. The line ends that frame a thought belong to neither.

    With tools, a whole opening of a declared tool's call ends the thought too: some answers forget `</think>`.
    """

    def __init__(self, *, starts_open: bool, tools: ToolSchemas | None = None) -> None:
        self._tools = tools
        self._buffer = ""
        self._line_ends = 0
        self._turn_to(self._read_reasoning if starts_open else self._read_start)

    def push(self, text: str) -> tuple[str, str]:
        """Returns (reasoning, answer) that have become certain; at most one turn from one to the other per output."""
        # behind the thought nothing is held back, and most tokens of it hold nothing that may end it
        if self._is_answer and not self._buffer:
            return "", text
        if self.is_reasoning and not self._buffer and "<" not in text and not text.endswith("\n"):
            return text, ""
        self._buffer += text
        return self._drain(is_final=False)

    def flush(self) -> tuple[str, str]:
        return self._drain(is_final=True)

    def _drain(self, is_final: bool) -> tuple[str, str]:
        reasoning: list[str] = []
        answer: list[str] = []
        while self._read(is_final, reasoning, answer):
            pass
        return "".join(reasoning), "".join(answer)

    def _turn_to(self, reader: Reader) -> None:
        self._read = reader
        self.is_reasoning = reader == self._read_reasoning
        self._is_answer = reader == self._read_answer

    # each reader moves text from the buffer to one of the lists and says whether another one may go on

    def _read_start(self, is_final: bool, reasoning: list[str], answer: list[str]) -> bool:
        match = literal(self._buffer, 0, OPEN)
        if match is PARTIAL and not is_final:
            return False
        if match is None or match is PARTIAL:
            self._turn_to(self._read_answer)
        else:
            self._buffer = self._buffer[match.end :]
            self._line_ends = 1
            self._turn_to(self._read_opened)
        return True

    def _read_opened(self, is_final: bool, reasoning: list[str], answer: list[str]) -> bool:
        return self._drop_line_ends(self._read_reasoning)

    def _read_reasoning(self, is_final: bool, reasoning: list[str], answer: list[str]) -> bool:
        end, after, is_certain = self._thought_end(is_final)
        reasoning.append(self._buffer[:end])
        self._buffer = self._buffer[after if is_certain else end :]
        if is_certain:
            self._line_ends = LINE_ENDS_AFTER
            self._turn_to(self._read_after)
        return is_certain

    def _read_after(self, is_final: bool, reasoning: list[str], answer: list[str]) -> bool:
        return self._drop_line_ends(self._read_answer)

    def _read_answer(self, is_final: bool, reasoning: list[str], answer: list[str]) -> bool:
        answer.append(self._buffer)
        self._buffer = ""
        return False

    def _drop_line_ends(self, following: Reader) -> bool:
        while self._buffer.startswith("\n") and self._line_ends:
            self._buffer, self._line_ends = self._buffer[1:], self._line_ends - 1
        is_over = bool(self._buffer) or not self._line_ends
        if is_over:
            self._turn_to(following)
        return is_over

    def _thought_end(self, is_final: bool) -> tuple[int, int, bool]:
        """Where reasoning ends, where the answer begins, and whether that is certain yet."""
        text = self._buffer
        at = text.find("<")
        while at >= 0:
            close = literal(text, at, CLOSE)
            call = framed_opening(text, at, self._tools) if self._tools else None
            match = either((close, call))
            if match is not None and (match is not PARTIAL or not is_final):
                end = at - 1 if text[:at].endswith("\n") else at
                return end, match.end if match is close else at, match is not PARTIAL
            at = text.find("<", at + 1)
        return len(text) - (0 if is_final else partial_suffix(text, "\n" + CLOSE)), 0, False
