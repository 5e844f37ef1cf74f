"""What the projection of an attention layer becomes: a query ready to attend, and keys and values in the cache."""

import torch
import triton
import triton.language as tl

from engine.ops.coded_kv import CodedKV
from engine.ops.hadamard import hadamard_reference, rotate_groups
from engine.ops.kv_append import kv_append_reference
from engine.ops.kv_append_coded import kv_append_coded_reference
from engine.ops.kv_codec_e8 import encode_e8_groups
from engine.ops.kv_codec_int8 import encode_int8_groups
from engine.ops.launch import has_dependent_launch
from engine.ops.paged_kv import PagedKV
from engine.ops.prefetch import prefetch
from engine.ops.rms_norm import rms_norm_reference
from engine.ops.rope import rope_reference


def kv_append_projected(
    projected: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: PagedKV | CodedKV,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """query, keys = rope(x / sqrt(mean(x**2) + eps) * weight) per head, rounded once; keys and values are appended.

    projected     [rows, >= (heads + 2 * kv_heads) * head_dim]  query, keys, values, and whatever follows
    weight        [heads + kv_heads, head_dim] fp32
    cos, sin      [rows, pairs] fp32; the pairs (i, i + pairs) of the first 2 * pairs dims are rotated
    slot_mapping  [rows] int64, block_id * block_size + offset, all different where not negative; below 0 a row's keys
                  and values are dropped
    writes        those tokens of the cache
    return        [rows, heads, head_dim]  the query as attention over this cache takes it: through hadamard where the
                  keys went through it, fp16 where they are coded
    """
    if projected.is_cuda:
        dependent = has_dependent_launch(projected.device)
        return kv_append_projected_triton(projected, weight, eps, cos, sin, cache, slot_mapping, dependent)
    return kv_append_projected_reference(projected, weight, eps, cos, sin, cache, slot_mapping)


def kv_append_projected_reference(
    projected: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: PagedKV | CodedKV,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    normed, head_dim = weight.shape
    kv_heads = cache.keys.shape[2]
    heads = projected[:, : (normed + kv_heads) * head_dim].unflatten(-1, (-1, head_dim))
    wide = heads.to(torch.promote_types(projected.dtype, torch.float32))
    query_key = rope_reference(rms_norm_reference(wide[:, :normed], weight, eps), cos, sin)
    query, keys = query_key.split([normed - kv_heads, kv_heads], dim=1)
    append = kv_append_coded_reference if isinstance(cache, CodedKV) else kv_append_reference
    append(keys, wide[:, normed:], cache, slot_mapping)
    if not isinstance(cache, CodedKV):
        return query.to(projected.dtype)
    query = hadamard_reference(query) if cache.is_rotated else query
    return query.to(torch.float16) if projected.dtype == torch.bfloat16 else query


def kv_append_projected_triton(
    projected: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: PagedKV | CodedKV,
    slot_mapping: torch.Tensor,
    dependent: bool = False,
) -> torch.Tensor:
    rows = len(projected)
    normed, head_dim = weight.shape
    kv_heads = cache.keys.shape[2]
    heads = normed - kv_heads
    is_coded = isinstance(cache, CodedKV)
    scales = (cache.key_scales, cache.value_scales) if is_coded else (cache.keys, cache.values)
    assert projected.stride(1) == 1 and weight.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert cache.keys.stride(3) == cache.values.stride(3) == 1
    query_dtype = torch.float16 if is_coded else projected.dtype
    query = torch.empty(rows, heads, head_dim, dtype=query_dtype, device=projected.device)
    folds = cache.folds if is_coded else (1, 1)
    kv_append_projected_kernel[(rows, normed + kv_heads)](
        projected,
        weight,
        cos,
        sin,
        slot_mapping,
        query,
        cache.keys,
        cache.values,
        *scales,
        eps,
        projected.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAIRS=cos.shape[1],
        BLOCK_SIZE=cache.keys.shape[1],
        KEY_FOLD=folds[0],
        VALUE_FOLD=folds[1],
        KEY_STRIDES=cache.keys.stride(),
        VALUE_STRIDES=cache.values.stride(),
        KEY_SCALE_STRIDES=scales[0].stride(),
        VALUE_SCALE_STRIDES=scales[1].stride(),
        IS_ROTATED=is_coded and cache.is_rotated,
        DEPENDENT=dependent,
        # a head in one warp: no maximum or sum passes from warp to warp
        num_warps=1,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if dependent else {}),
    )
    return query


@triton.jit(do_not_specialize=["x_stride"])
def kv_append_projected_kernel(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    eps,
    x_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
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
    """One head of one row; dimension 64 g + 8 a + b stands at [g, a, b]."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups: tl.constexpr = HEAD_DIM // 64
    octets = 64 * tl.arange(0, groups)[:, None] + 8 * tl.arange(0, 8)[None, :]
    dims = octets[:, :, None] + tl.arange(0, 8)[None, None, :]
    if DEPENDENT:
        if head < HEADS + KV_HEADS:
            prefetch(weight_ptr + head * HEAD_DIM + 32 * tl.arange(0, HEAD_DIM // 32))
        tl.extra.cuda.gdc_wait()
    source = x_ptr + row * x_stride + head * HEAD_DIM
    x = tl.load(source + dims).to(tl.float32)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if head < HEADS + KV_HEADS:
        x = _normed_and_turned(
            x, source, dims, weight_ptr + head * HEAD_DIM, cos_ptr + row * PAIRS, sin_ptr + row * PAIRS, eps,
            HEAD_DIM, PAIRS,
        )  # fmt: skip
    if IS_ROTATED:
        x = rotate_groups(x)
    if head < HEADS:
        target = query_ptr + (row * HEADS + head) * HEAD_DIM
        tl.store(target + dims, x.to(query_ptr.dtype.element_ty))
    elif slot >= 0:
        if head < HEADS + KV_HEADS:
            store_head(
                x, keys_ptr, key_scales_ptr, slot, head - HEADS,
                HEAD_DIM, BLOCK_SIZE, KEY_FOLD, KEY_STRIDES, KEY_SCALE_STRIDES,
            )  # fmt: skip
        else:
            store_head(
                x, values_ptr, value_scales_ptr, slot, head - HEADS - KV_HEADS,
                HEAD_DIM, BLOCK_SIZE, VALUE_FOLD, VALUE_STRIDES, VALUE_SCALE_STRIDES,
            )  # fmt: skip


@triton.jit
def _normed_and_turned(x, source, dims, weight_ptr, cos_ptr, sin_ptr, eps, HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr):
    is_turned = dims < 2 * PAIRS
    partner = tl.where(dims < PAIRS, dims + PAIRS, dims - PAIRS)
    other = tl.load(source + partner, mask=is_turned, other=0.0).to(tl.float32)
    other_weight = tl.load(weight_ptr + partner, mask=is_turned, other=0.0)
    cos = tl.load(cos_ptr + dims % PAIRS, mask=is_turned, other=1.0)
    sin = tl.load(sin_ptr + dims % PAIRS, mask=is_turned, other=0.0)
    mean = tl.sum(tl.sum(tl.sum(x * x, axis=2), axis=1), axis=0) / HEAD_DIM
    inverse = 1.0 / tl.sqrt(mean + eps)
    own = x * inverse * tl.load(weight_ptr + dims)
    other = other * inverse * other_weight
    return own * cos + tl.where(dims < PAIRS, -other, other) * sin


@triton.jit
def store_head(
    x, stored_ptr, scales_ptr, slot, head,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr,
    STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr,
):  # fmt: skip
    """x [groups, 8, 8] of one token and KV head, as a number each or as words and scales."""
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    target = stored_ptr + block * STRIDES[0] + offset * STRIDES[1] + head * STRIDES[2]
    groups: tl.constexpr = HEAD_DIM // 64
    group = tl.arange(0, groups)
    if FOLD == 1:
        octets = 64 * group[:, None] + 8 * tl.arange(0, 8)[None, :]
        tl.store(target + octets[:, :, None] + tl.arange(0, 8)[None, None, :], x.to(stored_ptr.dtype.element_ty))
    else:
        if FOLD == 4:
            words, scales = encode_int8_groups(tl.reshape(x, [groups, 16, 4]))
        else:
            words, scales = encode_e8_groups(x)
        words_per_group: tl.constexpr = 64 // FOLD
        tl.store(target + words_per_group * group[:, None] + tl.arange(0, words_per_group)[None, :], words)
        place = block * SCALE_STRIDES[0] + offset * SCALE_STRIDES[1] + head * SCALE_STRIDES[2]
        tl.store(scales_ptr + place + group * SCALE_STRIDES[3], scales)
