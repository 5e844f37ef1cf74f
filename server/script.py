"""The script of the scripted engine: which output follows which message."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from server.checkpoint import Vocabulary


class ScriptError(Exception):
    """The script file is wrong; the message names the line."""


class ScriptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule. The first line whose `when` stands in the last user or tool message gives the output.

    output      raw model text, control tokens spelled out
    chunk       tokens per event; "char" sends every character by itself, tags as ordinary text
    die_after   the engine dies after so many events
    """

    output: str
    when: str | None = None
    chunk: Literal["token", "char"] | int = "token"
    token_ms: float = 0
    prefill_ms: float = 0
    prefill_ms_per_1k_uncached: float = 0
    die_after: int | None = None
    finish: Literal["stop", "length", "error"] = "stop"


def read_script(path: Path) -> list[ScriptLine]:
    """raises ScriptError"""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ScriptError(f"script {path}: {error.strerror}") from error
    script = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not script:
        raise ScriptError(f"script {path}: holds no line")
    return script


def _parse(path: Path, number: int, line: bytes) -> ScriptLine:
    try:
        parsed = msgspec.json.decode(line, type=ScriptLine)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScriptError(f"script {path}: line {number}: {error}") from error
    if isinstance(parsed.chunk, int) and parsed.chunk < 1:
        raise ScriptError(f"script {path}: line {number}: chunk must be at least 1")
    return parsed


def choose(script: Sequence[ScriptLine], message: str) -> ScriptLine | None:
    return next((line for line in script if line.when is None or line.when in message), None)


def last_message(vocabulary: Vocabulary, prompt: Sequence[int]) -> str:
    """The last user turn of a rendered prompt, or the last tool response in it; the whole text of a bare prompt."""
    opener, closer = (vocabulary.added_ids.get(name) for name in ("<|im_start|>", "<|im_end|>"))
    end = len(prompt)
    while (start := _last(prompt, opener, end)) is not None:
        stop = _first(prompt, closer, start, end)
        turn = prompt[start + 1 : stop]
        if (text := _spell(vocabulary, turn)).startswith("user\n"):
            return _tool_response(vocabulary, turn) or text.removeprefix("user\n")
        end = start
    return _spell(vocabulary, prompt)


def _tool_response(vocabulary: Vocabulary, turn: Sequence[int]) -> str | None:
    start = _last(turn, vocabulary.added_ids.get("<tool_response>"), len(turn))
    if start is None:
        return None
    stop = _first(turn, vocabulary.added_ids.get("</tool_response>"), start, len(turn))
    return _spell(vocabulary, turn[start + 1 : stop]).strip("\n")


def _last(ids: Sequence[int], wanted: int | None, end: int) -> int | None:
    return next((index for index in range(end - 1, -1, -1) if ids[index] == wanted), None)


def _first(ids: Sequence[int], wanted: int | None, start: int, end: int) -> int:
    return next((index for index in range(start, end) if ids[index] == wanted), end)


def _spell(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    return b"".join(map(vocabulary.literal_bytes, ids)).decode("utf-8", "replace")
