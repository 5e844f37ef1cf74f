"""Coding and writing of new keys and values into a coded KV cache."""

import torch
import triton
import triton.language as tl

from engine.ops.coded_kv import ENCODERS, CodedKV
from engine.ops.hadamard import GROUP, hadamard_reference, rotate_groups
from engine.ops.kv_codec_e8 import encode_e8_groups
from engine.ops.kv_codec_int8 import encode_int8_groups


def kv_append_coded(
    keys: torch.Tensor, values: torch.Tensor, cache: CodedKV, slot_mapping: torch.Tensor, checks_finite: bool = False
) -> None:
    """Row i is coded and goes to the token at slot_mapping[i] = block_id * block_size + offset; below 0 it is dropped.

    keys, values   [rows, kv_heads, head_dim]
    slot_mapping   [rows] int64, all different where not negative
    checks_finite  raise FloatingPointError on NaN and infinity, which no code can hold; waits for the device
    writes         those tokens of the cache
    """
    if checks_finite:
        require_finite("keys", keys)
        require_finite("values", values)
    if keys.is_cuda:
        kv_append_coded_triton(keys, values, cache, slot_mapping)
    else:
        kv_append_coded_reference(keys, values, cache, slot_mapping)


def require_finite(name: str, rows: torch.Tensor) -> None:
    """Raises FloatingPointError that names the first row and KV head holding NaN or infinity."""
    bad = (~torch.isfinite(rows)).any(-1).nonzero()
    if len(bad):
        row, head = bad[0].tolist()
        raise FloatingPointError(f"{name} of row {row}, KV head {head} hold NaN or infinity: a KV code cannot")


def kv_append_coded_reference(
    keys: torch.Tensor, values: torch.Tensor, cache: CodedKV, slot_mapping: torch.Tensor
) -> None:
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


def kv_append_coded_triton(
    keys: torch.Tensor, values: torch.Tensor, cache: CodedKV, slot_mapping: torch.Tensor, dependent: bool = False
) -> None:
    rows, kv_heads, head_dim = keys.shape
    assert keys.stride()[1:] == values.stride()[1:] == (head_dim, 1)
    assert cache.keys.stride(3) == cache.values.stride(3) == 1
    # a program codes 8 groups of 64 at a time
    heads_per_program = 8 * GROUP // head_dim
    grid = (triton.cdiv(rows * kv_heads, heads_per_program), 2)
    extra = {"launch_pdl": True} if dependent else {}
    kv_append_coded_kernel[grid](
        keys,
        values,
        slot_mapping,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        rows,
        keys.stride(0),
        values.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS_PER_PROGRAM=heads_per_program,
        BLOCK_SIZE=cache.keys.shape[1],
        KEY_FOLD=cache.folds[0],
        VALUE_FOLD=cache.folds[1],
        KEY_STRIDES=cache.keys.stride()[:3],
        VALUE_STRIDES=cache.values.stride()[:3],
        KEY_SCALE_STRIDES=cache.key_scales.stride(),
        VALUE_SCALE_STRIDES=cache.value_scales.stride(),
        IS_ROTATED=cache.is_rotated,
        DEPENDENT=dependent,
        num_warps=4,
        **extra,
    )


@triton.jit(do_not_specialize=["rows"])
def kv_append_coded_kernel(
    keys_ptr,
    values_ptr,
    slots_ptr,
    key_words_ptr,
    value_words_ptr,
    key_scales_ptr,
    value_scales_ptr,
    rows,
    keys_stride,
    values_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    KEY_SCALE_STRIDES: tl.constexpr,
    VALUE_SCALE_STRIDES: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    groups: tl.constexpr = HEAD_DIM // 64
    first = tl.program_id(0) * HEADS_PER_PROGRAM
    lane = tl.arange(0, HEADS_PER_PROGRAM * groups)
    item = first + lane // groups
    row, head, group = item // KV_HEADS, item % KV_HEADS, lane % groups
    slot = tl.load(slots_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    if tl.program_id(1) == 0:
        _append_side(
            keys_ptr, key_words_ptr, key_scales_ptr, row, head, group, slot, keys_stride,
            HEAD_DIM, BLOCK_SIZE, KEY_FOLD, KEY_STRIDES, KEY_SCALE_STRIDES, IS_ROTATED,
        )  # fmt: skip
    else:
        _append_side(
            values_ptr, value_words_ptr, value_scales_ptr, row, head, group, slot, values_stride,
            HEAD_DIM, BLOCK_SIZE, VALUE_FOLD, VALUE_STRIDES, VALUE_SCALE_STRIDES, IS_ROTATED,
        )  # fmt: skip


@triton.jit
def _append_side(
    x_ptr, words_ptr, scales_ptr, row, head, group, slot, x_stride,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr,
    STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr, IS_ROTATED: tl.constexpr,
):  # fmt: skip
    is_kept = slot >= 0
    octet, place = tl.arange(0, 8), tl.arange(0, 8)
    source = x_ptr + row.to(tl.int64) * x_stride + head * HEAD_DIM + group * 64
    dims = (8 * octet)[None, :, None] + place[None, None, :]
    x = tl.load(source[:, None, None] + dims, mask=is_kept[:, None, None], other=0.0).to(tl.float32)
    if IS_ROTATED:
        x = rotate_groups(x)
    if FOLD == 4:
        words, scales = encode_int8_groups(tl.reshape(x, [x.shape[0], 16, 4]))
    else:
        words, scales = encode_e8_groups(x)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    words_per_group: tl.constexpr = 64 // FOLD
    target = words_ptr + block * STRIDES[0] + offset * STRIDES[1] + head * STRIDES[2] + group * words_per_group
    word = tl.arange(0, words_per_group)
    tl.store(target[:, None] + word[None, :], words, mask=is_kept[:, None])
    place_of_scale = block * SCALE_STRIDES[0] + offset * SCALE_STRIDES[1] + head * SCALE_STRIDES[2]
    tl.store(scales_ptr + place_of_scale + group * SCALE_STRIDES[3], scales, mask=is_kept)
