"""A product with a stored matrix."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x.  weight [outputs, inputs]"""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def linear(weight: torch.Tensor) -> Linear:
    """weight [outputs, inputs], laid out as its device multiplies few rows fastest"""
    if weight.is_cpu:
        # BLAS reads a matrix whose outputs are adjacent about twice as fast when there are only a few rows
        return Linear(weight.t().contiguous().t())
    return Linear(weight)
