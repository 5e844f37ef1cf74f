"""Sparse feed-forward: chosen experts plus a shared one."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.ops.moe import moe
from engine.ops.route import route
from engine.ops.sigmoid_mul import sigmoid_mul


@dataclass(frozen=True, slots=True)
class SparseMoe:
    """y = sum of the chosen experts by their weights + sigmoid(shared gate) * shared expert

    router   [experts + 1, hidden]            the last row is the gate of the shared expert
    gate_up  [experts, 2 * width, hidden]
    down     [experts, hidden, width]
    """

    router: Linear
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Mlp
    num_chosen: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits, shared_gate = self.router(x).split([len(self.gate_up), 1], dim=-1)
        experts, weights = route(logits, self.num_chosen)
        return moe(x, experts, weights, self.gate_up, self.down) + sigmoid_mul(self.shared(x), shared_gate)
