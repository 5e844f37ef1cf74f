"""From token ids to vectors and from vectors to logits."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.ops.embedding_rows import embedding_rows


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]; may lie in pinned host memory"""

    weight: torch.Tensor

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return embedding_rows(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class Head:
    """projection [vocab, hidden]; rows from num_ids on stand for no token, so their logits are -inf"""

    projection: Linear
    num_ids: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32"""
        logits = self.projection(hidden).float()
        logits[:, self.num_ids :] = float("-inf")
        return logits
