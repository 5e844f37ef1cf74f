"""Writing of new keys and values into the KV cache."""

import torch

from engine.ops.paged_kv import PagedKV


def kv_append(keys: torch.Tensor, values: torch.Tensor, cache: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Row i goes to the token at slot_mapping[i] = block_id * block_size + offset.

    keys, values  [rows, kv_heads, head_dim]
    slot_mapping  [rows] int64, all different; -1: the row is dropped
    writes        those tokens of cache.keys and cache.values
    """
    kv_append_reference(keys, values, cache, slot_mapping)


def kv_append_reference(keys: torch.Tensor, values: torch.Tensor, cache: PagedKV, slot_mapping: torch.Tensor) -> None:
    kept = slot_mapping >= 0
    for rows, stored in ((keys, cache.keys), (values, cache.values)):
        stored.flatten(0, 1).index_copy_(0, slot_mapping[kept], rows[kept].to(stored.dtype))
