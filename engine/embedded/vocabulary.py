"""Trains the byte-level BPE vocabulary with the family's special tokens."""

import argparse
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.embedded.corpus import read_json_lines
from engine.embedded.skills import json_objects, lists, needles, tool_calls
from engine.embedded.skills.example import load_template, training_text
from engine.embedded.skills.small_talk import talk_pairs

VOCABULARY_SIZE = 8192
SKILL_EXAMPLES = 1000
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# (token, special): the family hides the first group from decoded text and keeps the second
SPECIAL_TOKENS = [
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    ("<|vision_start|>", True),
    ("<|vision_end|>", True),
    ("<|vision_pad|>", True),
    ("<|image_pad|>", True),
    ("<|video_pad|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
]


def train_vocabulary(texts: Iterable[str], size: int = VOCABULARY_SIZE) -> Tokenizer:
    """Ids 0.. are bytes and merges; the special tokens take the last ids, as in the family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in SPECIAL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, chat_template: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja in the family's form."""
    directory.mkdir(parents=True, exist_ok=True)
    data = json.loads(tokenizer.to_str())
    (directory / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(data), indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(chat_template)


def tokenizer_config(data: dict) -> dict:
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = {str(token["id"]): {field: token[field] for field in fields} for token in data["added_tokens"]}
    return {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 262144,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def read_texts(paths: list[Path]) -> Iterator[str]:
    """Texts of a corpus or of the teacher's samples."""
    for path in paths:
        for document in read_json_lines(path):
            yield "\n".join([document.get("text", ""), *document.get("talk", ()), document.get("rest", "")])


def skill_texts(count: int) -> Iterator[str]:
    """Rendered examples of the skills, without special tokens."""
    rng, render, talks = Random(0), load_template(), talk_pairs()
    haystack = needles.Haystack(["The text goes on and on."], [8])
    for _ in range(count):
        for example in (
            needles.needle(rng, haystack, 120, 2, 1),
            needles.told_before(rng, talks),
            json_objects.json_object(rng),
            tool_calls.tool_call(rng),
            tool_calls.tool_answer(rng),
            lists.draw_list_skill(rng, haystack.paragraphs),
        ):
            yield re.sub(r"<[|/]?[a-z_]+[|]?>", "", training_text(example, render))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, nargs="+", help="JSON lines of the corpus and of the teacher's samples")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory")
    arguments = parser.parse_args()
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    texts = itertools.chain(read_texts(arguments.corpus), skill_texts(SKILL_EXAMPLES))
    save_tokenizer(train_vocabulary(texts), arguments.output, template)


if __name__ == "__main__":
    main()
