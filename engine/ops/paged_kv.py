"""Keys and values of one layer in blocks of tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's share of the KV cache.

    keys, values  [blocks, block_size, kv_heads, head_dim]
    """

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
