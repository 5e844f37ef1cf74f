"""Forward passes of a model without the engine around it."""

import torch

from config.engine import BLOCK_SIZE
from engine.batch import ForwardBatch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS
from engine.cache.state_cache import StateCache

CPU = torch.device("cpu")


class Runner:
    """Several requests, each with its own state slot and blocks that lie scattered in the cache."""

    def __init__(self, model, num_requests=1, max_tokens=512, codec=CODECS["bf16"]):
        self.model = model
        blocks = -(-max_tokens // BLOCK_SIZE)
        order = torch.randperm(num_requests * blocks, generator=torch.Generator().manual_seed(5))
        self.tables = order.view(num_requests, blocks).int()
        self.kv = KVCache(model.config, num_requests * blocks, CPU, torch.float32, codec)
        self.states = StateCache(model.config, num_requests + 1, CPU)

    def batch(self, rows, starts, commits, accepted=None):
        """rows: request -> token ids;  starts: request -> position of the first."""
        requests = list(rows)
        positions = [torch.arange(starts[r], starts[r] + len(rows[r])) for r in requests]
        slots = [
            self.tables[r].long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for r, p in zip(requests, positions, strict=True)
        ]
        counts = [len(rows[r]) for r in requests]
        return ForwardBatch(
            token_ids=torch.cat([torch.as_tensor(rows[r]) for r in requests]),
            positions=torch.cat(positions),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor([starts[r] + len(rows[r]) for r in requests]).int(),
            block_tables=self.tables[requests],
            slot_mapping=torch.cat(slots),
            state_slots=torch.tensor(requests),
            num_accepted=torch.tensor([(accepted or {}).get(r, 0) for r in requests]).int(),
            commits=commits,
            num_rows=tuple(counts),
            max_context=max(starts[r] + len(rows[r]) for r in requests),
        )

    def forward(self, rows, starts, commits, accepted=None):
        return self.model.forward(self.batch(rows, starts, commits, accepted), self.kv, self.states)

    def prefill(self, token_ids, chunk=None, request=0, start=0):
        """Hidden states of a prompt, computed `chunk` tokens at a time."""
        parts = torch.as_tensor(token_ids).split(chunk or len(token_ids))
        hidden = []
        for part in parts:
            hidden.append(self.forward({request: part}, {request: start}, commits=True))
            start += len(part)
        return torch.cat(hidden)

    def decode(self, token_ids, start, request=0):
        """Hidden states of tokens that are given one by one."""
        hidden = []
        for i, token_id in enumerate(token_ids):
            accepted = {request: int(i > 0)}
            hidden.append(self.forward({request: [token_id]}, {request: start + i}, commits=False, accepted=accepted))
        return torch.cat(hidden)


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()
