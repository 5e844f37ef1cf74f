"""The text files of a checkpoint: tokenizer, chat template, default sampling values."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"


class TextFilesError(Exception):
    """A text file of the checkpoint is missing or not what it should be; the message names it."""


class AddedToken(msgspec.Struct, frozen=True):
    content: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What `generation_config.json` says; neutral where it says nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class Vocabulary:
    """Text to ids and back. Added tokens (`<|im_end|>`, `<think>`, …) are ids only where the caller says so.

    plain   a tokenizer without added tokens: whatever text it reads, no control id comes out
    added   id -> token, both files of the checkpoint merged
    """

    def __init__(self, plain: Tokenizer, added: Mapping[int, AddedToken]) -> None:
        self.plain = plain
        self.added = dict(added)
        self.added_ids = {token.content: token_id for token_id, token in self.added.items()}
        longest_first = sorted(self.added_ids, key=len, reverse=True)
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"(?!)")
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, [*self.plain.get_vocab(with_added_tokens=False), *self.added_ids]), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token in an answer; special tokens are control and have none."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def literal_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, special tokens spelled out."""
        token = self.added.get(token_id)
        return token.content.encode() if token else self.token_bytes(token_id)

    def _spell(self, token_id: int) -> bytes:
        if token := self.added.get(token_id):
            return b"" if token.special else token.content.encode()
        # ids between the vocabulary and the rows of the embedding spell nothing
        piece = self.plain.id_to_token(token_id) or ""
        return b"".join(BYTE_OF[char] if char in BYTE_OF else char.encode() for char in piece)


@dataclass(frozen=True, slots=True)
class TextFiles:
    """All that the server reads of a checkpoint."""

    vocabulary: Vocabulary
    template: str
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    stop_token_ids: tuple[int, ...] = ()
    max_positions: int | None = None


def byte_alphabet() -> dict[str, bytes]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


BYTE_OF = byte_alphabet()


def load_text_files(directory: Path) -> TextFiles:
    """raises TextFilesError"""
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    vocabulary = load_vocabulary(directory, tokenizer_config)
    generation = _read_json(directory / "generation_config.json", required=False)
    return TextFiles(
        vocabulary=vocabulary,
        template=_read_template(directory, tokenizer_config),
        sampling=_sampling_defaults(generation),
        stop_token_ids=_stop_ids(generation, tokenizer_config, vocabulary),
        max_positions=_max_positions(_read_json(directory / "config.json", required=False)),
    )


def load_vocabulary(directory: Path, tokenizer_config: Mapping[str, Any]) -> Vocabulary:
    path = directory / "tokenizer.json"
    try:
        parts = msgspec.json.decode(_read(path), type=dict[str, msgspec.Raw])
        listed = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[dict[str, Any]])
        # raw parts keep 20 MB of merges from being taken apart and put together again
        parts["added_tokens"] = parts["post_processor"] = msgspec.Raw(b"null")
        parts["added_tokens"] = msgspec.Raw(b"[]")
        plain = Tokenizer.from_str(msgspec.json.encode(parts).decode())
    except TextFilesError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise TextFilesError(f"{path}: not a tokenizer: {error}") from error
    added = {token["id"]: AddedToken(token["content"], token.get("special", False)) for token in listed}
    for token_id, token in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        added.setdefault(int(token_id), AddedToken(token["content"], token.get("special", False)))
    return Vocabulary(plain, added)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TextFilesError(f"{path}: {error.strerror}") from error


def _read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TextFilesError(f"{path}: {error}") from error


def _read_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = directory / TEMPLATE_FILE
    if path.exists():
        return _read(path).decode()
    template = tokenizer_config.get("chat_template")
    if not isinstance(template, str):
        raise TextFilesError(f"{directory}: neither {TEMPLATE_FILE} nor a chat_template in tokenizer_config.json")
    return template


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    if generation.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingDefaults(**{name: generation[name] for name in names if generation.get(name) is not None})


def _stop_ids(
    generation: Mapping[str, Any], tokenizer_config: Mapping[str, Any], vocabulary: Vocabulary
) -> tuple[int, ...]:
    listed = generation.get("eos_token_id")
    ids: Sequence[int] = [listed] if isinstance(listed, int) else listed or []
    eos = tokenizer_config.get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    named = [vocabulary.added_ids[content]] if content in vocabulary.added_ids else []
    return tuple(dict.fromkeys([*ids, *named]))


def _max_positions(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config") or config
    return text.get("max_position_embeddings")
