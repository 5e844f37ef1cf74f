"""Angles of the rotary position embedding."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rope:
    """inverse_frequencies [pairs] fp32, radians per token"""

    inverse_frequencies: torch.Tensor

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows] -> cosines and sines [rows, pairs] fp32"""
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies
        return angles.cos(), angles.sin()


def plain_rope(rotated_dims: int, theta: float, device: torch.device) -> Rope:
    """Angle of pair i at position p: p * theta ** (-2 i / rotated_dims)"""
    exponents = torch.arange(0, rotated_dims, 2, dtype=torch.float32) / rotated_dims
    return Rope((1.0 / theta**exponents).to(device))
