"""Angles of the rotary position embedding."""

import math
from dataclasses import dataclass

import torch

from engine.ops.rope_angles import rope_angles

# turns that a pair makes over the context of training: from FAST on it stays as it is, up to SLOW it is divided whole
FAST, SLOW = 32, 1


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies [pairs] fp32, radians per token; scale  of cosines and sines, and so of rotated dims"""

    inverse_frequencies: torch.Tensor
    scale: float = 1.0

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows] -> cosines and sines [rows, pairs] fp32"""
        return rope_angles(positions, self.inverse_frequencies, self.scale)


def plain_rope(rotated_dims: int, theta: float, device: torch.device) -> Rope:
    """Angle of pair i at position p: p * theta ** (-2 i / rotated_dims)"""
    exponents = torch.arange(0, rotated_dims, 2, dtype=torch.float32) / rotated_dims
    return Rope((1.0 / theta**exponents).to(device))


def yarn_rope(rotated_dims: int, theta: float, factor: int, native_context: int, device: torch.device) -> Rope:
    """Positions up to factor * native_context: pairs that turn often stay, those that turn less than once over the
    native context turn `factor` times as slowly, and between the two runs a ramp in the number of the pair.

    Cosines and sines are multiplied by 1 + 0.1 ln(factor).
    """
    plain = plain_rope(rotated_dims, theta, torch.device("cpu")).inverse_frequencies

    def pair_of(turns: float) -> float:
        return rotated_dims * math.log(native_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_of(FAST)), 0)
    last = min(math.ceil(pair_of(SLOW)), rotated_dims - 1)
    ramp = ((torch.arange(len(plain)).float() - first) / max(last - first, 0.001)).clamp(0, 1)
    stretched = plain / factor * ramp + plain * (1 - ramp)
    return Rope(stretched.to(device), 0.1 * math.log(factor) + 1)
