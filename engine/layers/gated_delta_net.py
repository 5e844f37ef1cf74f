"""Gated DeltaNet: linear attention with a state of fixed size."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import GatedRMSNorm, RMSNorm
from engine.layers.quantized import QuantizedLinear
from engine.layers.rows import Rows
from engine.ops.causal_conv_heads import causal_conv_heads
from engine.ops.delta_state import DeltaState, DeltaWeights
from engine.ops.gated_delta_decode import gated_delta_decode, gated_delta_decode_rounded
from engine.ops.gated_delta_fold import gated_delta_fold
from engine.ops.gated_delta_prefill import gated_delta_prefill


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The rows of the last pass that turned out to stand are folded into the state, then the new ones are run.

    projection      [channels + value_heads * value_dim + 2 * value_heads, hidden]  query|key|value, z, a, b
    conv            [channels, width] over query|key|value
    decay, dt_bias  [value_heads] fp32; decay is -exp(A_log)
    """

    projection: Linear | QuantizedLinear
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: GatedRMSNorm
    output: Linear | QuantizedLinear
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __call__(self, x: torch.Tensor, norm: RMSNorm, rows: Rows, memory: DeltaState) -> torch.Tensor:
        """x + the linear attention over norm(x)"""
        projected = self.projection(x, norm, is_prompt=rows.commits)
        if rows.commits:
            return self._output_of_prompt(self._prefill(projected, rows, memory), projected, x)
        # what follows reads 8 bits where its matrix is stored in few
        decode = gated_delta_decode_rounded if isinstance(self.output, QuantizedLinear) else gated_delta_decode
        attended = decode(
            projected, self._weights(), memory, rows.state_slots, rows.query_starts, rows.num_accepted, rows.num_rows
        )
        return self.output(attended, residual=x)

    def _prefill(self, projected: torch.Tensor, rows: Rows, memory: DeltaState) -> torch.Tensor:
        weights, where = self._weights(), (rows.state_slots, rows.query_starts, rows.num_rows)
        mixed, _, a, b = weights.split(projected)
        if rows.folds:
            gated_delta_fold(memory, rows.state_slots, rows.num_accepted)
        state, taps = (memory.kept.state, memory.kept.taps) if memory.kept else (None, None)
        heads = {"unit_heads": 2 * self.key_heads, "dim": self.key_dim}
        convolved, norms = causal_conv_heads(
            mixed, self.conv, memory.inputs, *where, **heads, keeps=rows.keeps, taps=taps
        )
        return gated_delta_prefill(convolved, norms, a, b, weights, memory.state, *where, rows.keeps, state)

    def _output_of_prompt(self, attended: torch.Tensor, projected: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z = self._weights().split(projected)[1].unflatten(-1, (self.value_heads, self.value_dim))
        if isinstance(self.output, QuantizedLinear):
            return self.output.of_prompt(self.norm(attended, z, self.output.is_halved).flatten(1), x)
        return self.output(self.norm(attended, z).flatten(1), residual=x, is_prompt=True)

    def _weights(self) -> DeltaWeights:
        return DeltaWeights(
            conv=self.conv,
            decay=self.decay,
            dt_bias=self.dt_bias,
            norm=self.norm.weight,
            eps=self.norm.eps,
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            dim=self.key_dim,
        )
