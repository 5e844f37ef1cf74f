"""Coded keys and values of a part of a context, as the fp16 numbers that the codes stand for."""

import torch
import triton
import triton.language as tl

from engine.ops.attention_tile import load_planes
from engine.ops.coded_kv import CodedKV, decoded
from engine.ops.launch import is_interpreted, plain_options
from engine.ops.paged_kv import PagedKV


def kv_restore(
    cache: CodedKV, block_table: torch.Tensor, context_len: torch.Tensor, first_block: int, target: PagedKV
) -> None:
    """Blocks first_block, first_block + 1, ... of a request, one after the other, still rotated where they are.

    block_table  [blocks] int32
    context_len  [1] int32
    writes       of target [blocks, block_size, kv_heads, head_dim] fp16, as many blocks as hold context; what lies
                 beyond the context in the last one is zero
    """
    if target.keys.is_cuda:
        kv_restore_triton(cache, block_table, context_len, first_block, target)
    else:
        kv_restore_reference(cache, block_table, context_len, first_block, target)


def kv_restore_reference(
    cache: CodedKV, block_table: torch.Tensor, context_len: torch.Tensor, first_block: int, target: PagedKV
) -> None:
    size = cache.keys.shape[1]
    length = min(int(context_len) - first_block * size, len(target.keys) * size)
    ids = block_table[first_block : first_block + -(-length // size)].long()
    parts = (x[ids] for x in (cache.keys, cache.values, cache.key_scales, cache.value_scales))
    plain = decoded(CodedKV(*parts, is_rotated=False), target.keys.dtype)
    for restored, stored in ((plain.keys, target.keys), (plain.values, target.values)):
        is_held = torch.arange(len(ids) * size, device=ids.device).view(-1, size, 1, 1) < length
        stored[: len(ids)] = torch.where(is_held, restored, 0)


def kv_restore_triton(
    cache: CodedKV, block_table: torch.Tensor, context_len: torch.Tensor, first_block: int, target: PagedKV
) -> None:
    blocks, size, kv_heads, head_dim = target.keys.shape
    assert target.keys.stride() == target.values.stride() and target.keys.stride(3) == 1
    kv_restore_kernel[(2 * blocks, kv_heads, 2)](
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        block_table,
        context_len,
        target.keys,
        target.values,
        first_block,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=size,
        TOKENS=size // 2,
        KEY_FOLD=cache.folds[0],
        VALUE_FOLD=cache.folds[1],
        KEY_STRIDES=cache.keys.stride(),
        VALUE_STRIDES=cache.values.stride(),
        KEY_SCALE_STRIDES=cache.key_scales.stride(),
        VALUE_SCALE_STRIDES=cache.value_scales.stride(),
        TARGET_STRIDES=target.keys.stride(),
        PORTABLE=is_interpreted(),
        **plain_options(4, is_fused=True),
    )


@triton.jit(do_not_specialize=["first_block"])
def kv_restore_kernel(
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    lens_ptr,
    target_keys_ptr,
    target_values_ptr,
    first_block,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    KEY_SCALE_STRIDES: tl.constexpr,
    VALUE_SCALE_STRIDES: tl.constexpr,
    TARGET_STRIDES: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    parts: tl.constexpr = BLOCK_SIZE // TOKENS
    block, offset = tl.program_id(0) // parts, tl.program_id(0) % parts * TOKENS
    kv_head = tl.program_id(1)
    end = tl.load(lens_ptr) - (first_block + block) * BLOCK_SIZE
    if end > 0:
        source = tl.load(table_ptr + first_block + block).to(tl.int64)
        target = block.to(tl.int64) * TARGET_STRIDES[0] + offset * TARGET_STRIDES[1] + kv_head * TARGET_STRIDES[2]
        if tl.program_id(2) == 0:
            _restore_side(
                keys_ptr, key_scales_ptr, target_keys_ptr + target, source, kv_head, offset, end,
                HEAD_DIM, TOKENS, KEY_FOLD, KEY_STRIDES, KEY_SCALE_STRIDES, TARGET_STRIDES[1], PORTABLE,
            )  # fmt: skip
        else:
            _restore_side(
                values_ptr, value_scales_ptr, target_values_ptr + target, source, kv_head, offset, end,
                HEAD_DIM, TOKENS, VALUE_FOLD, VALUE_STRIDES, VALUE_SCALE_STRIDES, TARGET_STRIDES[1], PORTABLE,
            )  # fmt: skip


@triton.jit
def _restore_side(
    words_ptr, scales_ptr, target_ptr, block, kv_head, offset, end,
    HEAD_DIM: tl.constexpr, TOKENS: tl.constexpr, FOLD: tl.constexpr,
    STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr, TARGET_STRIDE: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, TOKENS)
    planes = load_planes(
        words_ptr + block * STRIDES[0] + kv_head * STRIDES[2],
        scales_ptr + block * SCALE_STRIDES[0] + kv_head * SCALE_STRIDES[2],
        offset + token, end, HEAD_DIM, FOLD, STRIDES, SCALE_STRIDES, PORTABLE,
    )  # fmt: skip
    if FOLD == 4:
        numbers = _joined_4(planes[0], planes[1], planes[2], planes[3])
    else:
        even = _joined_4(planes[0], planes[2], planes[4], planes[6])
        odd = _joined_4(planes[1], planes[3], planes[5], planes[7])
        numbers = tl.join(even, odd)
    numbers = tl.reshape(numbers, [TOKENS, HEAD_DIM])
    dim = tl.arange(0, HEAD_DIM)
    tl.store(target_ptr + token[:, None] * TARGET_STRIDE + dim[None, :], numbers)


@triton.jit
def _joined_4(a, b, c, d):
    """[...] -> [..., 2, 2], a and b first"""
    return tl.join(tl.join(a, c), tl.join(b, d))
