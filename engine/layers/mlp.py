"""SwiGLU feed-forward."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.ops.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class Mlp:
    """y = x + down(silu(gate n) * up n), n = norm(x)

    gate_up  [2 * width, hidden]  gate above up
    down     [hidden, width]
    """

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor, norm: RMSNorm, *, is_prompt: bool = False) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x, norm)), residual=x)
