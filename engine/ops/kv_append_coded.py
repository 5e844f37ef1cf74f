"""Coding and writing of new keys and values into a coded KV cache."""

import torch

from engine.ops.coded_kv import ENCODERS, CodedKV
from engine.ops.hadamard import hadamard_reference


def kv_append_coded_reference(
    keys: torch.Tensor, values: torch.Tensor, cache: CodedKV, slot_mapping: torch.Tensor
) -> None:
    """Row i is coded and goes to the token at slot_mapping[i] = block_id * block_size + offset; below 0 it is dropped.

    keys, values   [rows, kv_heads, head_dim]
    slot_mapping   [rows] int64, all different where not negative
    writes         those tokens of the cache
    """
    kept = slot_mapping >= 0
    blocks, offsets = slot_mapping[kept] // cache.keys.shape[1], slot_mapping[kept] % cache.keys.shape[1]
    sides = (
        (keys, cache.keys, cache.key_scales, cache.folds[0]),
        (values, cache.values, cache.value_scales, cache.folds[1]),
    )
    for rows, stored_words, stored_scales, fold in sides:
        wide = rows[kept].to(torch.promote_types(rows.dtype, torch.float32))
        words, scales = ENCODERS[fold](hadamard_reference(wide) if cache.is_rotated else wide)
        stored_words[blocks, offsets] = words
        stored_scales[blocks, offsets] = scales


def require_finite(name: str, rows: torch.Tensor) -> None:
    """Raises FloatingPointError that names the first row and KV head holding NaN or infinity; waits for the device.

    rows  [rows, kv_heads, head_dim]
    """
    bad = (~torch.isfinite(rows)).any(-1).nonzero()
    if len(bad):
        row, head = bad[0].tolist()
        raise FloatingPointError(f"{name} of row {row}, KV head {head} hold NaN or infinity: a KV code cannot")
