"""Gated DeltaNet: linear attention with a state of fixed size."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import GatedRMSNorm, RMSNorm
from engine.layers.rows import Rows
from engine.ops.causal_conv import causal_conv
from engine.ops.delta_state import DeltaState
from engine.ops.gated_delta_chunked import gated_delta_chunked
from engine.ops.gated_delta_fold import gated_delta_fold
from engine.ops.gated_delta_gates import gated_delta_gates
from engine.ops.gated_delta_recurrent import gated_delta_recurrent
from engine.ops.l2_norm import l2_norm


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """The rows of the last pass that turned out to stand are folded into the state, then the new ones are run.

    projection           [channels + value_heads * value_dim + 2 * value_heads, hidden]  query|key|value, z, a, b
    conv                 [channels, width] over query|key|value
    decay, dt_bias  [value_heads] fp32; decay is -exp(A_log)
    """

    projection: Linear
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: GatedRMSNorm
    output: Linear
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __call__(self, x: torch.Tensor, norm: RMSNorm, rows: Rows, memory: DeltaState) -> torch.Tensor:
        """x + the linear attention over norm(x)"""
        gated_delta_fold(memory, rows.state_slots, rows.num_accepted)
        value_width = self.value_heads * self.value_dim
        sizes = [len(self.conv), value_width, self.value_heads, self.value_heads]
        mixed, z, a, b = self.projection(x, norm, is_prompt=rows.commits).split(sizes, dim=-1)
        gates = gated_delta_gates(a, b, self.decay, self.dt_bias)
        attended = self._attend(*self._convolve(mixed, rows, memory), *gates, rows, memory)
        z = z.unflatten(-1, (self.value_heads, self.value_dim))
        return self.output(self.norm(attended, z).flatten(1), residual=x, is_prompt=rows.commits)

    def _convolve(self, mixed: torch.Tensor, rows: Rows, memory: DeltaState) -> tuple[torch.Tensor, ...]:
        """Query and key of unit length and value, one row per token, in fp32."""
        convolved = causal_conv(mixed, self.conv, memory.inputs, rows.state_slots, rows.num_rows, commits=rows.commits)
        width = 2 * self.key_heads * self.key_dim
        query_key = l2_norm(convolved[:, :width].unflatten(-1, (2 * self.key_heads, self.key_dim)))
        value = convolved[:, width:].unflatten(-1, (self.value_heads, self.value_dim)).to(query_key.dtype)
        return *query_key.chunk(2, dim=1), value

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_alpha: torch.Tensor,
        beta: torch.Tensor,
        rows: Rows,
        memory: DeltaState,
    ) -> torch.Tensor:
        inputs = (query, key, value, log_alpha, beta)
        if rows.commits:
            return gated_delta_chunked(*inputs, memory.state, rows.state_slots, rows.num_rows)
        return gated_delta_recurrent(*inputs, memory, rows.state_slots, rows.num_rows)
