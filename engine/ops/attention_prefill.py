"""Attention of many rows per request (chunks of a prompt) over plain or coded blocks."""

# Triton compiles tuple sums and plain branches, not unpacking
# ruff: noqa: RUF005

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.attention_decode import attention_decode_reference, is_interpreted, kernel_storage, storage_tensors
from engine.ops.attention_tile import attend, load_query
from engine.ops.coded_kv import CodedKV
from engine.ops.hadamard import rotate_planes
from engine.ops.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How the kernel is cut; never changes what it computes. block_m counts query rows times heads of a KV head."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def attention_prefill(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int | None = None,
) -> torch.Tensor:
    """softmax(scale * q kT) v, where the rows of a request are the last tokens of its context and see no later ones.

    The rows' own keys and values are read from the cache like all others: as they were coded. A row's result does not
    depend on where a prompt was cut into chunks.

    query         [rows, heads, head_dim] contiguous; query head h reads KV head h // (heads / kv_heads)
    query_starts  [requests + 1] int32  request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens  [requests] int32      tokens in the cache, the rows' own included
    block_tables  [requests, blocks] int32
    bounds        at most max_rows rows per request (by default all rows)
    return        shape and dtype of query
    """
    if query.is_cuda:
        rows = max_rows or len(query)
        return attention_prefill_triton(query, cache, query_starts, context_lens, block_tables, scale, rows)
    return attention_prefill_reference(query, cache, query_starts, context_lens, block_tables, scale)


attention_prefill_reference = attention_decode_reference


def attention_prefill_triton(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int,
    shape: PrefillShape | None = None,
) -> torch.Tensor:
    _, heads, head_dim = query.shape
    kv_heads = cache.keys.shape[2]
    assert query.is_contiguous() and block_tables.stride(1) == 1
    storage = kernel_storage(cache, head_dim)
    shape = shape or prefill_shape(query.device, storage["VALUE_FOLD"])
    output = torch.empty_like(query)
    rows_per_program = shape.block_m // (heads // kv_heads)
    attention_prefill_kernel[(triton.cdiv(max_rows, rows_per_program), kv_heads, len(context_lens))](
        query,
        *storage_tensors(cache),
        block_tables,
        query_starts,
        context_lens,
        output,
        scale * math.log2(math.e),
        block_tables.stride(0),
        GROUP=heads // kv_heads,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        NUM_STAGES=shape.num_stages,
        PORTABLE=is_interpreted(),
        num_warps=shape.num_warps,
        **storage,
    )
    return output


def prefill_shape(device: torch.device, value_fold: int) -> PrefillShape:
    if device.type != "cuda":
        return PrefillShape(block_m=32, block_n=64, num_warps=4, num_stages=1)
    return prefill_shape_for(torch.cuda.get_device_capability(device), value_fold)


def prefill_shape_for(capability: tuple[int, int], value_fold: int) -> PrefillShape:
    """Cards with 100 KB of shared memory per multiprocessor take smaller tiles; decoding codes takes registers."""
    block_n = 64 if capability in ((9, 0), (10, 0)) else 32
    if value_fold > 1:
        return PrefillShape(block_m=64, block_n=block_n, num_warps=8, num_stages=2)
    if capability in ((8, 0), (9, 0), (10, 0)):
        return PrefillShape(block_m=128, block_n=block_n, num_warps=8, num_stages=2)
    return PrefillShape(block_m=64, block_n=block_n, num_warps=4, num_stages=2)


# one compilation for every length of context
@triton.jit(do_not_specialize=["tables_stride"])
def attention_prefill_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    output_ptr,
    scale,
    tables_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    KEY_FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    KEY_SCALE_STRIDES: tl.constexpr,
    VALUE_SCALE_STRIDES: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    rows_per_program: tl.constexpr = BLOCK_M // GROUP
    # the last rows see most: first
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, request = tl.program_id(1), tl.program_id(2)
    first_row = tl.load(starts_ptr + request)
    rows = tl.load(starts_ptr + request + 1) - first_row
    if chunk * rows_per_program < rows:
        context = tl.load(lens_ptr + request)
        lane = tl.arange(0, BLOCK_M)
        row = chunk * rows_per_program + lane // GROUP
        live = (lane < rows_per_program * GROUP) & (row < rows)
        limits = tl.where(live, context - rows + row + 1, 0)
        # int64: rows * heads * head_dim passes 2**31 for long prompts
        item = (first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + lane % GROUP
        query = load_query(query_ptr + item * HEAD_DIM, live, HEAD_DIM, KEY_FOLD, IS_ROTATED, PORTABLE)
        acc, _, total = attend(
            query, limits, 0, tl.max(limits, axis=0), context, scale, kv_head,
            tables_ptr + request.to(tl.int64) * tables_stride, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
            BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_SIZE, KEY_FOLD, VALUE_FOLD, KEY_STRIDES, VALUE_STRIDES,
            KEY_SCALE_STRIDES, VALUE_SCALE_STRIDES, NUM_STAGES, PORTABLE,
        )  # fmt: skip
        width: tl.constexpr = HEAD_DIM // VALUE_FOLD
        total = tl.where(live, total, 1.0)[:, None]
        planes = ()
        for j in tl.static_range(VALUE_FOLD):
            planes = planes + (acc[j] / total,)
        if IS_ROTATED:
            planes = rotate_planes(planes, width, VALUE_FOLD, 2, PORTABLE)
        c = VALUE_FOLD * tl.arange(0, width)
        for j in tl.static_range(VALUE_FOLD):
            target = output_ptr + (item * HEAD_DIM)[:, None] + (c + j)[None, :]
            tl.store(target, planes[j].to(output_ptr.dtype.element_ty), mask=live[:, None])
