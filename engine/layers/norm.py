"""Root-mean-square normalisation with its weight."""

from dataclasses import dataclass

import torch

from engine.ops.gated_rms_norm import gated_rms_norm
from engine.ops.rms_norm import rms_norm
from engine.ops.rms_norm_halved import rms_norm_halved


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """weight [width] or [heads, width], fp32: the factor itself, so 1 + w for a zero-centred w"""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def of_prompt(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """And the same in the order in which matrices in 4 bits read it."""
        return rms_norm_halved(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedRMSNorm:
    """weight [width], fp32"""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, gate: torch.Tensor, halves: bool = False) -> torch.Tensor:
        return gated_rms_norm(x, gate, self.weight, self.eps, halves)
