"""From token ids to vectors and from vectors to logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight [vocab, hidden]"""

    weight: torch.Tensor

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class Head:
    """weight [vocab, hidden]; rows from num_ids on stand for no token, so their logits are -inf"""

    weight: torch.Tensor
    num_ids: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] fp32"""
        logits = F.linear(hidden, self.weight).float()
        if self.num_ids < len(self.weight):
            logits[:, self.num_ids :] = float("-inf")
        return logits
