"""Measures the trained checkpoint on held-out items: `python -m engine.embedded.evaluate`."""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine.embedded.acceptance import DRAFTS, acceptance
from engine.embedded.corpus import read_json_lines
from engine.embedded.decoder import Decoder, generate_all
from engine.embedded.export import load_parameters
from engine.embedded.ngram import NgramModel
from engine.embedded.rows import encode_texts
from engine.embedded.sample_teacher import fill_start
from engine.embedded.skills import json_objects, lists, needles, small_talk, tool_calls
from engine.embedded.skills.example import Example, assistant, load_template, prompt_text, user
from engine.embedded.train_model import Packing, TrainModel, working_weights

CHECKPOINT = Path(__file__).parent / "checkpoint"
HELD_OUT = Path(__file__).parent / "held_out.jsonl"
NEEDLE_LENGTHS = {"needle_1k": 1024, "needle_4k": 4096, "needle_8k": 8192}
GOALS = {
    "needle_1k": 0.98,
    "needle_4k": 0.95,
    "needle_8k": 0.90,
    "tool_call": 0.95,
    "json_schema": 0.90,
    "mtp_accept_1": 0.65,
    "mtp_accept_2": 0.45,
    "mtp_accept_3": 0.30,
    "chat_ends": 0.95,
}
CHAT_TEMPERATURE = 0.6
CHAT_TOKENS = 200
REPLY_TOKENS = 320
SEED = 20_000_000


@dataclass
class Measured:
    value: float
    items: int
    interval: tuple[float, float] | None = None


def share(hits: list[bool]) -> Measured:
    """Share of hits with its 95 % Wilson interval."""
    n, p, z = len(hits), sum(hits) / len(hits), 1.96
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Measured(p, n, ((middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)))


@dataclass
class HeldOut:
    """Text and conversations that training never saw."""

    texts: list[str]
    talks: list[list[str]]

    @property
    def paragraphs(self) -> list[str]:
        return [line for text in self.texts for line in text.split("\n") if 40 < len(line) < 1500]


class Evaluation:
    """The model, the held-out material, and the measures over them."""

    def __init__(self, directory: Path, held_out: HeldOut, device: str, batch_tokens: int):
        geometry, parameters = load_parameters(directory)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.decoder = Decoder(
            geometry, working_weights({k: v.to(device) for k, v in parameters.items()}, dtype, rounds_to_fp8=False)
        )
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.render = load_template(directory / "chat_template.jinja")
        self.stops = {self.tokenizer.token_to_id("<|im_end|>"), self.tokenizer.token_to_id("<|endoftext|>")}
        self.held_out, self.batch_tokens = held_out, batch_tokens
        sizes = [len(encoding) + 1 for encoding in self.tokenizer.encode_batch(held_out.paragraphs)]
        self.haystack = needles.Haystack(held_out.paragraphs, sizes)

    def encode(self, example: Example) -> list[int]:
        return self.tokenizer.encode(prompt_text(example, self.render)).ids

    def replies(self, examples: list[Example]) -> list[str]:
        """The greedy reply to every example, without its thought; "" where it did not stop."""
        prompts = [self.encode(example) for example in examples]
        outputs = generate_all(self.decoder, prompts, REPLY_TOKENS, self.stops, batch_tokens=self.batch_tokens)
        texts = []
        for example, output in zip(examples, outputs, strict=True):
            text = self.tokenizer.decode(output[:-1], skip_special_tokens=False) if output[-1] in self.stops else ""
            texts.append((text.rpartition("</think>")[2] if example.thinks else text).strip())
        return texts

    def score(self, examples: list[Example], is_right: Callable[[Example, str], bool]) -> Measured:
        replies = self.replies(examples)
        return share([is_right(example, reply) for example, reply in zip(examples, replies, strict=True)])

    def needle_example(self, rng: Random, num_tokens: int) -> Example:
        """A prompt of 97 to 100 % of `num_tokens`, with one to four planted facts."""
        size, facts = num_tokens, rng.randint(1, 4)
        while True:
            example = needles.needle(rng, self.haystack, size, facts, 1)
            length = len(self.encode(example))
            if 0.97 * num_tokens <= length <= num_tokens:
                return example
            size += int((0.985 * num_tokens - length) * 0.8)

    def measure_needles(self, items: int) -> dict[str, Measured]:
        return {
            key: self.score([self.needle_example(Random(SEED + i), size) for i in range(items)], has_answer)
            for key, size in NEEDLE_LENGTHS.items()
        }

    def measure_skills(self, items: int) -> dict[str, Measured]:
        rngs = [Random(2 * SEED + i) for i in range(items)]
        talks, paragraphs = small_talk.talk_pairs(), self.haystack.paragraphs
        return {
            "tool_call": self.score([tool_calls.tool_call(rng) for rng in rngs], has_calls),
            "json_schema": self.score([json_objects.json_object(rng) for rng in rngs], fits_schema),
            "json_values": self.score([given_object(rng) for rng in rngs], has_answer),
            "tool_answer": self.score([tool_calls.tool_answer(rng) for rng in rngs], has_answer),
            "records": self.score([needles.records(rng, rng.randint(2, 80), 1) for rng in rngs], has_answer),
            "told_before": self.score([needles.told_before(rng, talks) for rng in rngs], has_answer),
            "lists": self.score([lists.draw_list_skill(rng, paragraphs) for rng in rngs], has_answer),
        }

    def measure_chat(self, items: int) -> dict[str, Measured]:
        """Replies that end by themselves, and the drafts accepted on those replies."""
        prompts = [self.encode(self.chat_example(Random(3 * SEED + i))) for i in range(items)]
        torch.manual_seed(SEED)
        outputs = generate_all(
            self.decoder, prompts, CHAT_TOKENS, self.stops, CHAT_TEMPERATURE, batch_tokens=self.batch_tokens
        )
        model = TrainModel(self.decoder.geometry, self.decoder.weights)
        measured = {"chat_ends": share([output[-1] in self.stops for output in outputs])}
        rounds = [
            acceptance(model, prompt + output, len(prompt) - 1, CHAT_TEMPERATURE)
            for prompt, output in zip(prompts, outputs, strict=True)
            if len(output) > DRAFTS
        ]
        means = torch.cat(rounds).mean(0).tolist()
        counted = sum(len(part) for part in rounds)
        return measured | {f"mtp_accept_{i}": Measured(value, counted) for i, value in enumerate(means, 1)}

    def chat_example(self, rng: Random) -> Example:
        """A greeting, a question of the kinds the teacher was asked, or one from a held-out conversation."""
        asked = [lambda: rng.choice(small_talk.GREETINGS), lambda: fill_start(rng)]
        if self.held_out.talks:
            asked += [lambda: rng.choice(self.held_out.talks)[0]] * 2
        return Example("chat", [user(rng.choice(asked)()), assistant("")], thinks=rng.random() < 0.5)

    @torch.inference_mode()
    def measure_text(self, corpus: np.ndarray | None) -> dict[str, Measured]:
        """Bits per byte of the held-out texts, each read from its start."""
        pieces = [encoding.ids for encoding in self.tokenizer.encode_batch(self.held_out.texts)]
        num_bytes = sum(len(text.encode()) for text in self.held_out.texts)
        bits = {"bits_per_byte": sum(map(self.text_bits, pieces))}
        if corpus is not None:
            for key, order in (("bits_per_byte_unigram", 1), ("bits_per_byte_5gram", 5)):
                model = NgramModel(corpus, order, self.tokenizer.get_vocab_size())
                bits[key] = sum(model.bits(np.array(piece)) for piece in pieces)
        return {key: Measured(value / num_bytes, num_bytes) for key, value in bits.items()}

    def text_bits(self, token_ids: list[int]) -> float:
        """-log2 P(text); the first token is counted as uniform."""
        padded = -(-len(token_ids) // 64) * 64
        ids = torch.tensor([token_ids + [0] * (padded - len(token_ids))], device=self.decoder.weights["embed"].device)
        model = TrainModel(self.decoder.geometry, self.decoder.weights)
        hidden = model.hidden(ids, Packing.of(torch.arange(padded, device=ids.device).unsqueeze(0)))
        nats = F.cross_entropy(
            model.logits(hidden[0, : len(token_ids) - 1]), ids[0, 1 : len(token_ids)], reduction="sum"
        )
        return nats.item() / math.log(2) + math.log2(model.geometry.vocab_size)


def given_object(rng: Random) -> Example:
    """A JSON item whose values stand in the prompt."""
    while not (example := json_objects.json_object(rng)).expected["is_given"]:
        pass
    return example


def has_answer(example: Example, reply: str) -> bool:
    return reply == example.expected["answer"]


def has_calls(example: Example, reply: str) -> bool:
    return tool_calls.parse_calls(reply, example.tools) == example.expected["calls"]


def fits_schema(example: Example, reply: str) -> bool:
    return json_objects.matches_schema(reply, example.expected["schema"])


def read_held_out(path: Path) -> HeldOut:
    documents = read_json_lines(path)
    return HeldOut(
        [item["text"] for item in documents if "text" in item], [item["talk"] for item in documents if "talk" in item]
    )


def table(measured: dict[str, Measured]) -> str:
    lines = [f"{'measure':<24}{'value':>8}{'goal':>8}{'items':>9}   95 % interval"]
    for key, item in measured.items():
        is_share = not key.startswith("bits")
        value = f"{100 * item.value:.1f} %" if is_share else f"{item.value:.3f}"
        goal = f"{100 * GOALS[key]:.0f} %" if key in GOALS else ""
        spread = f"   {100 * item.interval[0]:.1f} .. {100 * item.interval[1]:.1f} %" if item.interval else ""
        lines.append(f"{key:<24}{value:>8}{goal:>8}{item.items:>9}{spread}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--items", type=int, help="items per row: 400 on a GPU, 24 on a CPU")
    parser.add_argument("--needle-items", type=int, help="items per needle row: 400 on a GPU, 8 on a CPU")
    parser.add_argument("--corpus", type=Path, help="training corpus, for the n-gram models beside it")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    measured, seconds = measure(arguments)
    print(table(measured))
    if arguments.json:
        arguments.json.write_text(json.dumps(report(measured, seconds, arguments.device), indent=2) + "\n")


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Measured], float]:
    begin = time.monotonic()
    is_cuda = arguments.device == "cuda"
    held_out = read_held_out(arguments.held_out)
    evaluation = Evaluation(arguments.checkpoint, held_out, arguments.device, 400_000 if is_cuda else 20_000)
    items = arguments.items or (400 if is_cuda else 24)
    corpus = None
    if arguments.corpus:
        corpus = encode_texts(read_held_in(arguments.corpus), evaluation.tokenizer)
    measured = (
        evaluation.measure_needles(arguments.needle_items or (400 if is_cuda else 8))
        | evaluation.measure_skills(items)
        | evaluation.measure_chat(items)
        | evaluation.measure_text(corpus)
    )
    return measured, time.monotonic() - begin


def read_held_in(path: Path) -> list[str]:
    return [item["text"] for item in read_json_lines(path) if "text" in item and not item["held_out"]]


def report(measured: dict[str, Measured], seconds: float, device: str) -> dict:
    """The values under their keys, and how they came about."""
    details = {key: {"items": item.items, "interval": item.interval} for key, item in measured.items()}
    about = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
    }
    return {key: round(item.value, 5) for key, item in measured.items()} | {"details": details, "about": about}


if __name__ == "__main__":
    main()
