"""What every weight recipe costs on the trained checkpoint: `python -m engine.embedded.compare_recipes`."""

import argparse
import json
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from config.engine import BLOCK_SIZE
from engine.batch import BlockTables, RequestRows, build_batch
from engine.cache.kv_cache import KVCache
from engine.cache.state_cache import StateCache
from engine.convert.convert import convert
from engine.convert.recipes import RECIPES
from engine.embedded.compare_codecs import Divergence, chunks_of_text, divergences, table, text_measures
from engine.embedded.evaluate import CHECKPOINT, HELD_OUT, SEED, Evaluation, has_answer, read_held_out
from engine.embedded.skills.example import Example
from engine.models.qwen3_5 import Qwen3_5
from engine.models.weights import load_model

CPU = torch.device("cpu")
NEEDLE_LENGTH = 1024


class ServedDecoder:
    """The engine's model over its own caches, in the form that `generate` asks for: `prefill`, then `step`."""

    def __init__(self, model: Qwen3_5) -> None:
        self.model = model

    def prefill(self, prompts: list[list[int]], room: int) -> torch.Tensor:
        """Hidden state of the last prompt token of every row; keeps `room` places for tokens to come."""
        self._allocate([len(prompt) + room for prompt in prompts])
        return torch.stack([self._read(slot, prompt)[-1] for slot, prompt in enumerate(prompts)])

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [rows] -> hidden [rows, hidden]"""
        steps = [
            RequestRows(slot, length, [token_id], self._num_pending)
            for slot, (length, token_id) in enumerate(zip(self._lengths, token_ids.tolist(), strict=True))
        ]
        self._lengths = [length + 1 for length in self._lengths]
        self._num_pending = 1
        return self._forward(steps, commits=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, ids that stand for a token]"""
        return self.model.compute_logits(hidden)[:, : self.model.config.num_ids]

    def log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, tokens] -> [tokens - 1, vocabulary], of every token after the first"""
        self._allocate([ids.shape[1]])
        return self.logits(self._read(0, ids[0].tolist())[:-1]).log_softmax(-1)

    def _allocate(self, rooms: list[int]) -> None:
        """Caches for requests of that many tokens, which follow one another block by block."""
        counts = [-(-room // BLOCK_SIZE) for room in rooms]
        self._kv = KVCache(self.model.config, sum(counts), CPU, torch.float32)
        self._states = StateCache(self.model.config, len(rooms), CPU)
        self._tables = BlockTables(len(rooms), max(counts), CPU)
        for slot, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            self._tables.extend(slot, range(end - count, end))
        self._lengths, self._num_pending = [0] * len(rooms), 0

    def _read(self, slot: int, prompt: list[int]) -> torch.Tensor:
        self._lengths[slot] = len(prompt)
        return self._forward([RequestRows(slot, 0, prompt)], commits=True)

    def _forward(self, rows: list[RequestRows], commits: bool) -> torch.Tensor:
        return self.model.forward(build_batch(rows, self._tables, commits), self._kv, self._states)


def served(checkpoint: Path, recipe: str, directory: Path) -> tuple[ServedDecoder, int]:
    """The checkpoint converted into `directory`, ready to run, and the bytes of its files."""
    manifest = convert(checkpoint, directory, recipe)
    num_bytes = sum(file["bytes"] for file in manifest["files"].values())
    return ServedDecoder(load_model(directory, CPU, torch.float32)), num_bytes


@torch.inference_mode()
def recipe_divergences(decoders: dict[str, ServedDecoder], chunks: Iterable[torch.Tensor]) -> dict[str, Divergence]:
    """KL(bf16 || recipe), loss, and how often both would choose the same token, for every recipe."""
    return divergences({name: decoder.log_probabilities for name, decoder in decoders.items()}, chunks)


def needle_measures(evaluation: Evaluation, decoder: ServedDecoder, examples: list[Example]) -> dict[str, float]:
    evaluation.decoder = decoder
    found = evaluation.score(examples, has_answer)
    low, high = found.interval
    return {"needle_1k": found.value, "needle_1k_low": low, "needle_1k_high": high, "items": found.items}


def compare(arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, float]]:
    evaluation = Evaluation(arguments.checkpoint, read_held_out(arguments.held_out), "cpu", 20_000)
    made = {name: served(arguments.checkpoint, name, directory / name) for name in RECIPES}
    decoders = {name: decoder for name, (decoder, _) in made.items()}
    found = recipe_divergences(decoders, chunks_of_text(evaluation, arguments.tokens))
    examples = [evaluation.needle_example(Random(5 * SEED + i), NEEDLE_LENGTH) for i in range(arguments.items)]
    return {
        name: text_measures(found[name])
        | needle_measures(evaluation, decoder, examples)
        | {"bytes": num_bytes, "tokens": found[name].tokens}
        for name, (decoder, num_bytes) in made.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--held-out", type=Path, default=HELD_OUT)
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens for KL and perplexity")
    parser.add_argument("--items", type=int, default=24, help="needle items of 1K tokens, the same for every recipe")
    parser.add_argument("--json", type=Path, help="file to write")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        rows = compare(arguments, Path(directory))
    print(table("recipe", rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
