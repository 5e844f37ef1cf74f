"""Traces: calls with their prompts as segments, one JSON object a line. README.md says what the fields mean."""

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

# the ids that stand for control tokens, at the upper end of the vocabulary
NUM_CONTROL = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """One message, or an answer: tokens first : first + num_tokens of a segment that its key alone determines."""

    role: str
    segment: str
    num_tokens: int
    first: int = 0

    def as_list(self) -> list[Any]:
        return [self.role, self.segment, self.num_tokens, *([self.first] if self.first else [])]


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a client.

    after      calls that have to end first; none: wait_s counts from the beginning of the trace
    wait_s     from then to the submission
    answer     what the model says
    cancel_s   the client leaves so long after the submission, unless the answer is complete by then
    group      by which results are told apart
    """

    call_id: str
    tenant: str
    messages: tuple[Piece, ...]
    answer: Piece
    after: tuple[str, ...] = ()
    wait_s: float = 0.0
    cancel_s: float | None = None
    group: str = ""


def write_trace(file: Path, calls: Iterable[Call]) -> None:
    file.write_text("".join(json.dumps(_as_json(call)) + "\n" for call in calls), encoding="utf-8")


def read_trace(file: Path) -> list[Call]:
    return [_from_json(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _as_json(call: Call) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "tenant": call.tenant,
        "group": call.group,
        "after": list(call.after),
        "wait_s": round(call.wait_s, 3),
        "cancel_s": call.cancel_s and round(call.cancel_s, 3),
        "messages": [piece.as_list() for piece in call.messages],
        "answer": call.answer.as_list(),
    }


def _from_json(value: dict[str, Any]) -> Call:
    return Call(
        value["id"],
        value.get("tenant", ""),
        tuple(Piece(*piece) for piece in value["messages"]),
        Piece(*value["answer"]),
        tuple(value.get("after", ())),
        value.get("wait_s", 0.0),
        value.get("cancel_s"),
        value.get("group", ""),
    )


def scaled(calls: Sequence[Call], factor: int) -> list[Call]:
    """The same with every text so many times shorter."""

    def shorter(piece: Piece) -> Piece:
        return replace(piece, num_tokens=max(1, piece.num_tokens // factor), first=piece.first // factor)

    return [replace(c, messages=tuple(map(shorter, c.messages)), answer=shorter(c.answer)) for c in calls]


class Spelling:
    """Calls as token ids.

    A message is an opener of three ids, its tokens and two ids that end it; a whole answer, and the prompt's end before
    it, have two more behind the opener that begin a thought.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_ids = vocab_size - NUM_CONTROL
        opener, role, line, thought, end = range(self._num_ids, self._num_ids + 5)
        self._opener, self._thought, self._end = (opener, role, line), (thought, line), (end, line)
        self.stop = end

    def prompt(self, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids, and where messages of system and user end."""
        parts: list[Sequence[int]] = []
        marks, length = [], 0
        for piece in call.messages:
            is_whole_answer = piece.role == "assistant" and not piece.first
            parts += [self._opener, self._thought if is_whole_answer else (), self.tokens(piece), self._end]
            length += sum(map(len, parts[-4:]))
            if piece.role in ("system", "user"):
                marks.append(length)
        return tuple(chain(*parts, self._opener, self._thought)), tuple(marks)

    def tokens(self, piece: Piece) -> Sequence[int]:
        return _segment(piece.segment, piece.first + piece.num_tokens, self._num_ids)[piece.first :]


@lru_cache(maxsize=4096)
def _segment(key: str, num_tokens: int, num_ids: int) -> tuple[int, ...]:
    raw = np.random.PCG64(zlib.crc32(key.encode())).random_raw(num_tokens)
    return tuple((raw % num_ids).tolist())
