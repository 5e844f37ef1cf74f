"""Samples short conversations from SmolLM2-135M-Instruct, in lockstep over large batches."""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine.embedded.skills.words import ADJECTIVES, ANIMALS, CITIES, FOODS, NAMES, NOUNS

USER, ASSISTANT = 0, 1
TEMPERATURES = (0.8, 0.5)
TOP_K = 40
TOPICS = [
    "space travel",
    "the ocean",
    "music",
    "painting",
    "cooking",
    "football",
    "chess",
    "history",
    "gardening",
    "weather",
    "volcanoes",
    "dinosaurs",
    "computers",
    "friendship",
    "sleep",
    "health",
    "reading",
    "mathematics",
    "planets",
    "birds",
    "trees",
    "the moon",
    "the sun",
    "rivers",
    "mountains",
    "money",
    "work",
    "school",
    "travel",
    "family",
    "holidays",
    "books",
    "movies",
    "photography",
    "robots",
    "energy",
    "electricity",
    "water",
    "fire",
    "ice",
    "time",
    "language",
    "writing",
    "poetry",
    "dancing",
    "exercise",
    "cycling",
    "trains",
    "ships",
    "airplanes",
    "cities",
    "farms",
    "bread",
    "coffee",
    "tea",
    "chocolate",
    "dreams",
    "memory",
    "learning",
    "kindness",
]
STARTS = (
    "What is {topic}?",
    "Tell me about {topic}.",
    "Explain {topic} in simple words.",
    "Write a short story about {thing}.",
    "Write a short poem about {thing}.",
    "Why is {topic} important?",
    "How does {topic} work?",
    "Give me a fun fact about {topic}.",
    "What do you know about {topic}?",
    "Describe {thing}.",
    "Can you explain {topic}?",
    "What do you think about {topic}?",
    "Give me three tips about {topic}.",
    "Write one sentence about {thing}.",
    "I want to learn about {topic}.",
    "{name} has {thing}. Write a short story about it.",
    "What can I do in {city}?",
    "How do I cook {food}?",
    "What does {animal} eat?",
)
OPEN_STARTS = (
    "What",
    "How",
    "Why",
    "Can you",
    "Write a",
    "Explain",
    "Tell me",
    "Give me",
    "Describe",
    "Who",
    "Where",
    "When",
    "Is it",
    "Do you",
    "What is the",
    "How can I",
    "Please",
    "I am",
    "I want to",
    "I have a",
    "Help me",
    "Which",
    "Should I",
    "What are some",
    "List",
    "",
)
SYSTEMS = (
    "You are a helpful assistant. Answer in one or two short sentences.",
    "You answer every question briefly, in at most three sentences.",
    "You are a friendly assistant. Keep your answers very short.",
)


@dataclass(frozen=True)
class TeacherShape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float


class Teacher:
    """A llama-form decoder over GGUF weights (rotary pairs are neighbours there); one token for all rows per step."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype):
        self.shape, weights = read_gguf(path)
        self.weights = {name: value.to(device, dtype) for name, value in weights.items()}
        for layer in range(self.shape.layers):
            fuse(self.weights, f"blk.{layer}", "attn_qkv", ("attn_q", "attn_k", "attn_v"))
            fuse(self.weights, f"blk.{layer}", "ffn_gate_up", ("ffn_gate", "ffn_up"))
        self.head = self.weights.get("output.weight", self.weights["token_embd.weight"])

    def new_cache(self, rows: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shape = (rows, self.shape.kv_heads, length, self.shape.head_dim)
        return [(self.head.new_empty(shape), self.head.new_empty(shape)) for _ in range(self.shape.layers)]

    def step(self, token_ids: torch.Tensor, position: int, cache) -> torch.Tensor:
        """token_ids [rows] at one common position -> logits [rows, vocabulary]"""
        x = F.embedding(token_ids, self.weights["token_embd.weight"])
        for layer in range(self.shape.layers):
            x = x + self.attention(self.norm(x, f"blk.{layer}.attn_norm"), layer, position, cache[layer])
            gate, up = F.linear(self.norm(x, f"blk.{layer}.ffn_norm"), self.weights[f"blk.{layer}.ffn_gate_up"]).chunk(
                2, -1
            )
            x = x + F.linear(F.silu(gate) * up, self.weights[f"blk.{layer}.ffn_down.weight"])
        return F.linear(self.norm(x, "output_norm"), self.head)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.shape.eps)

    def attention(self, x, layer, position, cache) -> torch.Tensor:
        shape = self.shape
        qkv = F.linear(x, self.weights[f"blk.{layer}.attn_qkv"]).unflatten(-1, (-1, shape.head_dim))
        q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        keys, values = cache
        keys[:, :, position], values[:, :, position] = self.rotate(k, position), v
        # the query heads of one KV head stand in for query positions, so that keys are read once
        q = self.rotate(q, position).unflatten(1, (shape.kv_heads, -1))
        y = F.scaled_dot_product_attention(q, keys[:, :, : position + 1], values[:, :, : position + 1])
        return F.linear(y.flatten(1), self.weights[f"blk.{layer}.attn_output.weight"])

    def rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = self.shape.head_dim // 2
        angle = position * self.shape.rope_theta ** (-torch.arange(half, device=x.device) / half)
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], dim=-1).flatten(-2)


def fuse(weights: dict, prefix: str, name: str, parts: tuple[str, ...]) -> None:
    weights[f"{prefix}.{name}"] = torch.cat([weights.pop(f"{prefix}.{part}.weight") for part in parts])


def read_gguf(path: Path) -> tuple[TeacherShape, dict[str, torch.Tensor]]:
    # imported here: only this script needs the package
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads = fields["llama.attention.head_count"]
    shape = TeacherShape(
        layers=fields["llama.block_count"],
        heads=heads,
        kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        rope_theta=fields["llama.rope.freq_base"],
        eps=fields["llama.attention.layer_norm_rms_epsilon"],
    )
    weights = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()) for tensor in reader.tensors
    }
    return shape, weights


class Script:
    """What every row must say next: its prompt, and the change of roles after each <|im_end|>."""

    def __init__(self, tokenizer: Tokenizer, rows: int, length: int, rng: Random, device: str):
        self.end = tokenizer.token_to_id("<|im_end|>")
        turns = [tokenizer.encode(f"\n<|im_start|>{role}\n").ids for role in ("user", "assistant")]
        longest = max(map(len, turns))
        self.turns = torch.tensor([turn + [-1] * (longest - len(turn)) for turn in turns], device=device)
        forced = np.full((rows, length + self.turns.shape[1] + 1), -1)
        for row in range(rows):
            prompt = tokenizer.encode(draw_prompt(rng)).ids
            forced[row, : len(prompt)] = prompt
        self.forced = torch.from_numpy(forced).to(device)
        self.role = torch.zeros(rows, dtype=torch.long, device=device)
        self.in_prompt = (self.forced >= 0).sum(1)

    def next_tokens(self, sampled: torch.Tensor, position: int) -> torch.Tensor:
        """The tokens at `position`, with the rows' roles brought up to date."""
        wanted = self.forced[:, position]
        token_ids = torch.where(wanted >= 0, wanted, sampled)
        # the prompt holds the end of the system turn, which changes nothing
        ended = (token_ids == self.end) & (position >= self.in_prompt - 1)
        self.role = torch.where(ended, 1 - self.role, self.role)
        after = slice(position + 1, position + 1 + self.turns.shape[1])
        self.forced[:, after] = torch.where(ended.unsqueeze(1), self.turns[self.role], self.forced[:, after])
        return token_ids


def draw_prompt(rng: Random) -> str:
    system = f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n<|im_start|>user\n"
    if rng.random() < 0.4:
        return system + rng.choice(OPEN_STARTS)
    return system + fill_start(rng) + "<|im_end|>"


def fill_start(rng: Random) -> str:
    article = lambda noun: f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"  # noqa: E731
    return rng.choice(STARTS).format(
        topic=rng.choice(TOPICS) if rng.random() < 0.6 else article(rng.choice(NOUNS + FOODS + ANIMALS)),
        thing=article(f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS + ANIMALS)}"),
        name=rng.choice(NAMES),
        city=rng.choice(CITIES),
        food=rng.choice(FOODS),
        animal=article(rng.choice(ANIMALS)),
    )


@torch.inference_mode()
def sample_rows(teacher: Teacher, tokenizer: Tokenizer, rows: int, length: int, seed: int) -> np.ndarray:
    """Token ids [rows, length] of conversations that go on until the row is full."""
    device = teacher.head.device
    script = Script(tokenizer, rows, length, Random(seed), str(device))
    cache = teacher.new_cache(rows, length)
    output = torch.empty(rows, length, dtype=torch.int32, device=device)
    temperatures = torch.tensor(TEMPERATURES, device=device)
    token_ids = torch.zeros(rows, dtype=torch.long, device=device)
    for position in range(length):
        token_ids = script.next_tokens(token_ids, position)
        output[:, position] = token_ids
        logits = teacher.step(token_ids, position, cache).float()
        token_ids = draw(logits, temperatures[script.role])
    return output.cpu().numpy()


def draw(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """One token per row from the TOP_K likeliest, by the Gumbel trick."""
    top = logits.topk(TOP_K, dim=-1)
    noise = -torch.empty_like(top.values).exponential_().log()
    choice = (top.values / temperature.unsqueeze(-1) + noise).argmax(-1, keepdim=True)
    return top.indices.gather(-1, choice).squeeze(-1)


def conversations(ids: np.ndarray, tokenizer: Tokenizer) -> Iterator[dict]:
    """{"talk": [user, assistant, ...], "rest": unfinished text} for every row."""
    for text in tokenizer.decode_batch(ids.tolist(), skip_special_tokens=False):
        turns = text.split("<|im_start|>")[2:]
        finished = [turn.split("\n", 1)[-1].split("<|im_end|>")[0].strip() for turn in turns if "<|im_end|>" in turn]
        rest = "" if not turns or "<|im_end|>" in turns[-1] else turns[-1].split("\n", 1)[-1].strip()
        yield {"talk": finished, "rest": rest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("tokenizer", type=Path, help="the teacher's tokenizer.json")
    parser.add_argument("output", type=Path, help="JSON lines file to write")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--length", type=int, default=448)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--max-tokens", type=int, default=10_000_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
    teacher, tokenizer = Teacher(arguments.gguf, arguments.device, dtype), Tokenizer.from_file(str(arguments.tokenizer))
    start, num_tokens, seed = time.monotonic(), 0, 0
    with arguments.output.open("w") as output:
        while time.monotonic() - start < arguments.seconds and num_tokens < arguments.max_tokens:
            ids = sample_rows(teacher, tokenizer, arguments.rows, arguments.length, seed)
            output.writelines(json.dumps(talk) + "\n" for talk in conversations(ids, tokenizer))
            num_tokens, seed = num_tokens + ids.size, seed + 1
            print(f"{num_tokens} tokens in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
