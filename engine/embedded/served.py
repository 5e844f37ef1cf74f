"""The engine's model over its own caches, without the engine around it: prompts, then tokens one by one."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from config.engine import BLOCK_SIZE
from engine.batch import BlockTables, RequestRows, build_batch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS
from engine.cache.state_cache import StateCache
from engine.models.qwen3_5 import Qwen3_5

# as many tokens of prompts in one pass as a GPU's kernels are given while serving
_PASS_TOKENS = 4096


class ServedDecoder:
    """In the form that `decoder.generate` asks for: `prefill`, then `step`."""

    def __init__(self, model: Qwen3_5, device: torch.device, dtype: torch.dtype, codec: str = "bf16") -> None:
        """dtype  of keys and values that are not coded"""
        self.model = model
        self._device, self._dtype, self._codec = device, dtype, CODECS[codec]

    def prefill(self, prompts: Sequence[Sequence[int]], room: int) -> torch.Tensor:
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

    def read_logits(self, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Of every token of prompts of one length.  [rows, tokens, ids that stand for a token]"""
        self._allocate([len(prompt) for prompt in prompts])
        return torch.stack([self.logits(self._read(slot, prompt)) for slot, prompt in enumerate(prompts)])

    def _allocate(self, rooms: list[int]) -> None:
        """Caches for requests of that many tokens, which follow one another block by block."""
        counts = [-(-room // BLOCK_SIZE) for room in rooms]
        self._kv = KVCache(self.model.config, sum(counts), self._device, self._dtype, self._codec)
        self._states = StateCache(self.model.config, len(rooms), self._device)
        self._tables = BlockTables(len(rooms), max(counts), self._device)
        for slot, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
            self._tables.extend(slot, range(end - count, end))
        self._lengths, self._num_pending = [0] * len(rooms), 0

    def _read(self, slot: int, prompt: Sequence[int]) -> torch.Tensor:
        """[tokens, hidden]"""
        self._lengths[slot] = len(prompt)
        starts = range(0, len(prompt), _PASS_TOKENS)
        parts = [RequestRows(slot, start, prompt[start : start + _PASS_TOKENS]) for start in starts]
        return torch.cat([self._forward([part], commits=True) for part in parts])

    def _forward(self, rows: list[RequestRows], commits: bool) -> torch.Tensor:
        return self.model.forward(build_batch(rows, self._tables, commits), self._kv, self._states)
