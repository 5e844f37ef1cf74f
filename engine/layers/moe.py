"""Sparse feed-forward: chosen experts plus a shared one."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.ops.moe import moe
from engine.ops.route import route
from engine.ops.sigmoid_mul import sigmoid_mul
from engine.ops.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class SparseMoe:
    """y = x + sum of the chosen experts by their weights + sigmoid(shared gate) * shared expert, all over norm(x)

    router   [experts + 1, hidden]            the last row is the gate of the shared expert
    gate_up  [experts, 2 * width, hidden]
    down     [experts, hidden, width]
    shared_gate_up, shared_down               the shared expert
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: Linear
    shared_down: Linear
    num_chosen: int

    def __call__(self, x: torch.Tensor, norm: RMSNorm, *, is_prompt: bool = False) -> torch.Tensor:
        normed = norm(x)
        logits, shared_gate = self.router(normed).split([len(self.gate_up), 1], dim=-1)
        experts, weights = route(logits, self.num_chosen)
        shared = self.shared_down(silu_mul(self.shared_gate_up(normed)))
        y = moe(normed, experts, weights, self.gate_up, self.down) + sigmoid_mul(shared, shared_gate)
        return x + y
