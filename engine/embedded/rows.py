"""Training rows made while training runs: documents of every kind, packed, with a loss weight per token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from engine.embedded.corpus import read_json_lines
from engine.embedded.skills import json_objects, lists, needles, small_talk, tool_calls
from engine.embedded.skills.example import Example, assistant, load_template, training_text, user

# kind -> (share of tokens, usual length, loss weight of answers, of everything else)
MIXTURE = {
    "text": (0.13, 700, 0.4, 0.4),
    "chat": (0.28, 250, 1.0, 0.15),
    "needle": (0.16, 900, 3.0, 0.02),
    "records": (0.08, 700, 2.0, 0.02),
    "told_before": (0.02, 150, 1.0, 0.1),
    "list": (0.10, 130, 1.5, 0.1),
    "json": (0.09, 330, 1.5, 0.05),
    "plain_json": (0.01, 120, 1.5, 0.1),
    "tool_call": (0.09, 600, 2.0, 0.03),
    "tool_answer": (0.02, 600, 1.5, 0.03),
    "no_tool": (0.01, 500, 1.0, 0.03),
    "small_talk": (0.01, 60, 1.0, 0.1),
}
LONG_NEEDLE = MIXTURE["needle"][2:]
MAX_REPLY_TOKENS = 150
MAX_QUESTION_TOKENS = 80
SHORTEST_FILL = 48
SAMPLES_HELD_OUT_EVERY = 100


@dataclass
class Sources:
    """Everything that rows are made from."""

    tokenizer: Tokenizer
    text: np.ndarray
    """All free text, documents separated by <|endoftext|>."""
    chats: list[list[str]]
    haystack: needles.Haystack


@dataclass
class Row:
    token_ids: np.ndarray
    positions: np.ndarray
    weights: np.ndarray
    """Loss weight of predicting the next token; 0 at the last token of every document."""


def load_sources(corpus: Path, samples: Path | None, tokenizer: Tokenizer) -> Sources:
    """Reads what training may see of the corpus and of the teacher's samples."""
    documents = read_json_lines(corpus)
    texts = [item["text"] for item in documents if "text" in item and not item["held_out"]]
    chats = [item["talk"] for item in documents if "talk" in item]
    paragraphs = [line for text in texts for line in text.split("\n") if 40 < len(line) < 1500]
    if samples is not None:
        talks, rests = read_samples(samples, tokenizer, held_out=False)
        chats, texts = chats + talks, texts + rests
        paragraphs += [line for text in rests for line in text.split("\n") if 40 < len(line) < 1500]
    sizes = [len(encoding) + 1 for encoding in tokenizer.encode_batch_fast(paragraphs)]
    return Sources(tokenizer, encode_texts(texts, tokenizer), chats, needles.Haystack(paragraphs, sizes))


def encode_texts(texts: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """All texts in one array, <|endoftext|> after each."""
    end = tokenizer.token_to_id("<|endoftext|>")
    pieces = [np.array([*encoding.ids, end], dtype=np.uint16) for encoding in tokenizer.encode_batch_fast(texts)]
    return np.concatenate(pieces)


def read_samples(path: Path, tokenizer: Tokenizer, held_out: bool) -> tuple[list[list[str]], list[str]]:
    """Conversations with short complete replies, and the unfinished texts as prose."""
    talks, rests = [], []
    for index, item in enumerate(read_json_lines(path)):
        if (index % SAMPLES_HELD_OUT_EVERY == 0) != held_out:
            continue
        talk = keep_short_turns(item["talk"], tokenizer)
        if talk:
            talks.append(talk)
        if len(item["rest"]) > 300 and is_clean(item["rest"]):
            rests.append(item["rest"])
    return talks, rests


def keep_short_turns(turns: list[str], tokenizer: Tokenizer) -> list[str]:
    """The longest even-numbered start of the talk whose turns are short, clean and not repetitive."""
    kept: list[str] = []
    for question, answer in zip(turns[::2], turns[1::2], strict=False):
        sizes = [len(tokenizer.encode(text).ids) for text in (question, answer)]
        if not (0 < sizes[0] <= MAX_QUESTION_TOKENS and 0 < sizes[1] <= MAX_REPLY_TOKENS):
            break
        if not is_clean(question) or not is_clean(answer):
            break
        kept += [question, answer]
    return kept


def is_clean(text: str) -> bool:
    words = text.lower().split()
    pairs = list(zip(words, words[1:], words[2:], strict=False))
    is_ascii = sum(character < "\x7f" for character in text) > 0.98 * len(text)
    return is_ascii and "<|" not in text and len(set(pairs)) >= 0.8 * len(pairs)


class RowMaker:
    """Draws documents by the mixture and packs them into rows of one length."""

    def __init__(self, sources: Sources, length: int, seed: int):
        self.sources, self.length, self.rng = sources, length, Random(seed)
        self.render, self.talks = load_template(), small_talk.talk_pairs()
        tokenizer = sources.tokenizer
        self.start, self.end = (tokenizer.token_to_id(f"<|im_{side}|>") for side in ("start", "end"))
        self.assistant = tokenizer.encode("assistant\n").ids
        self.kinds = list(MIXTURE)
        self.odds = [share / length for share, length, *_ in MIXTURE.values()]

    def row(self, long_share: float, longest: int) -> Row:
        """One full row; with chance `long_share` it starts with a needle text of up to `longest` tokens."""
        documents = []
        if self.rng.random() < long_share:
            documents.append(self.long_needle(longest))
        left = self.length - sum(len(ids) for ids, _ in documents)
        while left >= SHORTEST_FILL:
            document = self.document(left)
            documents.append(document)
            left -= len(document[0])
        if left:
            documents.append(self.text_piece(left))
        return pack(documents)

    def document(self, room: int) -> tuple[np.ndarray, np.ndarray]:
        for _ in range(4):
            kind = self.rng.choices(self.kinds, self.odds)[0]
            if kind == "text":
                return self.text_piece(min(room, self.rng.randint(200, 1200)))
            ids, weights = self.encode(self.example(kind), *MIXTURE[kind][2:])
            if len(ids) <= room:
                return ids, weights
        return self.text_piece(min(room, 400))

    def text_piece(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        begin = self.rng.randrange(len(self.sources.text) - size)
        return self.sources.text[begin : begin + size], np.full(size, MIXTURE["text"][2], dtype=np.float32)

    def long_needle(self, longest: int) -> tuple[np.ndarray, np.ndarray]:
        for _ in range(20):
            size = self.rng.randint(longest // 3, longest)
            ids, weights = self.encode(self.needle(size), *LONG_NEEDLE)
            if len(ids) <= self.length:
                return ids, weights
        raise RuntimeError(f"needle texts of {longest} tokens do not fit into rows of {self.length}")

    def needle(self, size: int) -> Example:
        num_questions = self.rng.randint(1, min(10, 2 + size // 150))
        return needles.needle(
            self.rng, self.sources.haystack, size, num_questions + self.rng.randint(0, 4), num_questions
        )

    def example(self, kind: str) -> Example:
        rng = self.rng
        makers: dict[str, Callable[[], Example]] = {
            "chat": lambda: chat(rng, rng.choice(self.sources.chats)),
            "needle": lambda: self.needle(int(120 * 25 ** rng.random())),
            "records": lambda: needles.records(rng, rng.randint(2, 80), rng.randint(1, 10)),
            "told_before": lambda: needles.told_before(rng, self.talks),
            "list": lambda: lists.draw_list_skill(rng, self.sources.haystack.paragraphs),
            "json": lambda: json_objects.json_object(rng),
            "plain_json": lambda: json_objects.plain_json(rng),
            "tool_call": lambda: tool_calls.tool_call(rng),
            "tool_answer": lambda: tool_calls.tool_answer(rng),
            "no_tool": lambda: tool_calls.plain_answer_with_tools(rng, rng.choice(self.talks)),
            "small_talk": lambda: small_talk.small_talk(rng),
        }
        return makers[kind]()

    def encode(self, example: Example, answer_weight: float, other_weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the weight of each as a target: high inside the assistant's turns."""
        text = training_text(example, self.render)
        ids = np.array(self.sources.tokenizer.encode(text).ids, dtype=np.uint16)
        weights = np.full(len(ids), other_weight, dtype=np.float32)
        ends = np.flatnonzero(ids == self.end)
        for begin in np.flatnonzero(ids == self.start):
            after = begin + 1 + len(self.assistant)
            if ids[begin + 1 : after].tolist() == self.assistant:
                weights[after : ends[np.searchsorted(ends, begin)] + 1] = answer_weight
        return ids, weights


def chat(rng: Random, talk: list[str]) -> Example:
    """A conversation of the teacher; in half of the cases with one short thought before every reply."""
    thinks = rng.random() < 0.5
    messages: list[dict] = []
    for question, answer in zip(talk[::2], talk[1::2], strict=False):
        messages += [user(question), assistant(answer, thought_about(question) if thinks else "")]
    return Example("chat", messages, thinks=thinks, keeps_thoughts=rng.random() < 0.6)


def thought_about(question: str) -> str:
    words = question.split()
    return f"The user says: {' '.join(words[:10])}{'...' if len(words) > 10 else ''}"


def pack(documents: list[tuple[np.ndarray, np.ndarray]]) -> Row:
    token_ids = np.concatenate([ids for ids, _ in documents]).astype(np.int64)
    positions = np.concatenate([np.arange(len(ids)) for ids, _ in documents])
    weights = np.concatenate([np.append(weights[1:], 0.0) for _, weights in documents])
    return Row(token_ids, positions, weights.astype(np.float32))


def batches(maker: RowMaker, rows: int, progress: Callable[[], float], length: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches; long texts grow in number and length over the first half of training."""
    while True:
        ripe = min(1.0, progress() / 0.35)
        longest = int(length * (0.3 + 0.68 * ripe))
        drawn = [maker.row(0.12 + 0.28 * ripe, longest) for _ in range(rows)]
        yield {name: np.stack([getattr(row, name) for row in drawn]) for name in ("token_ids", "positions", "weights")}
