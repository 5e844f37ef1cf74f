"""From token ids to vectors and from vectors to logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]"""

    weight: torch.Tensor

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


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
