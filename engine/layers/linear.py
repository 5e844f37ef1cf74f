"""A product with a stored matrix."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W norm(x) + residual, the norm and the residual where they are given.  weight [outputs, inputs]"""

    weight: torch.Tensor

    def __call__(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        *,
        is_prompt: bool = False,
    ) -> torch.Tensor:
        """is_prompt  the rows are a prompt's; a plain matrix makes no difference between them and others"""
        y = F.linear(norm(x) if norm else x, self.weight)
        return y if residual is None else residual + y


def linear(weight: torch.Tensor) -> Linear:
    """weight [outputs, inputs], laid out as its device multiplies few rows fastest"""
    if weight.is_cpu:
        # BLAS reads a matrix whose outputs are adjacent about twice as fast when there are only a few rows
        return Linear(weight.t().contiguous().t())
    return Linear(weight)
