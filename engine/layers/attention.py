"""Gated full attention."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.quantized import QuantizedLinear
from engine.layers.rows import Rows
from engine.ops.attention_decode import MAX_ROWS, attention_decode, attention_decode_rounded
from engine.ops.attention_prefill import attention_prefill
from engine.ops.coded_kv import CodedKV
from engine.ops.kv_append import kv_append
from engine.ops.kv_append_projected import kv_append_projected
from engine.ops.paged_attention import paged_attention
from engine.ops.paged_kv import PagedKV
from engine.ops.rope import rope
from engine.ops.sigmoid_mul import sigmoid_gate, sigmoid_mul


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Query and key are normalised per head, then rotated; the output is gated before its projection.

    projection  [(heads + kv_heads + kv_heads + heads) * head_dim, hidden]  query, key, value, gate
    norm        weight [heads + kv_heads, head_dim]                         query, key
    """

    projection: Linear | QuantizedLinear
    norm: RMSNorm
    output: Linear | QuantizedLinear
    heads: int
    kv_heads: int
    head_dim: int

    def __call__(self, x: torch.Tensor, norm: RMSNorm, rows: Rows, cache: PagedKV | CodedKV) -> torch.Tensor:
        """x + the attention over norm(x)"""
        projected = self.projection(x, norm, is_prompt=rows.commits)
        if isinstance(cache, PagedKV) and not x.is_cuda:
            attended = self._attend_plain(projected, rows, cache)
            return self.output(attended, residual=x, is_prompt=rows.commits)
        query = kv_append_projected(
            projected, self.norm.weight, self.norm.eps, rows.cos, rows.sin, cache, rows.slot_mapping
        )
        gate = projected[:, -self.heads * self.head_dim :]
        context = rows.query_starts, rows.context_lens, rows.block_tables, self.head_dim**-0.5
        most = max(rows.num_rows)
        if rows.commits or most > MAX_ROWS:
            attended = attention_prefill(query, cache, *context, rows.num_rows, rows.max_context)
        elif isinstance(self.output, QuantizedLinear):
            rounded = attention_decode_rounded(query, gate, cache, *context, most, rows.max_context)
            return self.output(rounded, residual=x)
        else:
            attended = attention_decode(query, cache, *context, most, rows.max_context)
        if rows.commits and isinstance(self.output, QuantizedLinear):
            return self.output.of_prompt(sigmoid_gate(attended.flatten(1), gate, self.output.is_halved), x)
        gated = sigmoid_mul(attended.flatten(1).to(gate.dtype), gate)
        return self.output(gated, residual=x, is_prompt=rows.commits)

    def _attend_plain(self, projected: torch.Tensor, rows: Rows, cache: PagedKV) -> torch.Tensor:
        """Operation by operation, rounded after each: gated, before the projection."""
        query, keys, values, gate = self._split(projected, rows)
        kv_append(keys, values, cache, rows.slot_mapping)
        attended = paged_attention(
            query, cache, rows.query_starts, rows.context_lens, rows.block_tables, self.head_dim**-0.5
        )
        return sigmoid_mul(attended.flatten(1), gate)

    def _split(self, projected: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, ...]:
        normed, kv_heads = self.heads + self.kv_heads, self.kv_heads
        sizes = [count * self.head_dim for count in (normed, kv_heads, self.heads)]
        query_key, values, gate = projected.split(sizes, dim=-1)
        query_key = rope(self.norm(query_key.unflatten(-1, (normed, self.head_dim))), rows.cos, rows.sin)
        query, keys = query_key.split([self.heads, kv_heads], dim=1)
        return query, keys, values.unflatten(-1, (kv_heads, self.head_dim)), gate
