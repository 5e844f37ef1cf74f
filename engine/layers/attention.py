"""Gated full attention."""

from dataclasses import dataclass

import torch

from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rows import Rows
from engine.ops.kv_append import kv_append
from engine.ops.paged_attention import paged_attention
from engine.ops.paged_kv import PagedKV
from engine.ops.rope import rope
from engine.ops.sigmoid_mul import sigmoid_mul


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Query and key are normalised per head, then rotated; the output is gated before its projection.

    projection  [(heads + kv_heads + kv_heads + heads) * head_dim, hidden]  query, key, value, gate
    norm        weight [heads + kv_heads, head_dim]                         query, key
    """

    projection: Linear
    norm: RMSNorm
    output: Linear
    heads: int
    kv_heads: int
    head_dim: int

    def __call__(self, x: torch.Tensor, norm: RMSNorm, rows: Rows, cache: PagedKV) -> torch.Tensor:
        """x + the attention over norm(x)"""
        query, keys, values, gate = self._project(x, norm, rows)
        kv_append(keys, values, cache, rows.slot_mapping)
        attended = paged_attention(
            query, cache, rows.query_starts, rows.context_lens, rows.block_tables, self.head_dim**-0.5
        )
        return self.output(sigmoid_mul(attended.flatten(1), gate), residual=x, is_prompt=rows.commits)

    def _project(self, x: torch.Tensor, norm: RMSNorm, rows: Rows) -> tuple[torch.Tensor, ...]:
        normed, kv_heads = self.heads + self.kv_heads, self.kv_heads
        sizes = [count * self.head_dim for count in (normed, kv_heads, self.heads)]
        query_key, values, gate = self.projection(x, norm, is_prompt=rows.commits).split(sizes, dim=-1)
        query_key = rope(self.norm(query_key.unflatten(-1, (normed, self.head_dim))), rows.cos, rows.sin)
        query, keys = query_key.split([self.heads, kv_heads], dim=1)
        return query, keys, values.unflatten(-1, (kv_heads, self.head_dim)), gate
