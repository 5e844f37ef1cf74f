"""Attention of many rows per request (chunks of a prompt) over plain or coded blocks."""

# Triton compiles tuple sums and plain branches, not unpacking

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
import triton
import triton.language as tl

from engine.ops.attention_decode import attention_decode_reference, kernel_storage
from engine.ops.attention_tile import LOWEST, attend_wide
from engine.ops.coded_kv import CodedKV
from engine.ops.hadamard import hadamard_triton
from engine.ops.kv_restore import kv_restore_triton
from engine.ops.paged_kv import PagedKV
from engine.ops.quantized_dot import is_interpreted
from engine.ops.ragged import lengths

# tokens of a coded context that are restored at a time: their numbers stay in a large card's second-level cache
SEGMENT = 16384


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
    num_rows: Sequence[int] | None = None,
    max_context: int | None = None,
) -> torch.Tensor:
    """softmax(scale * q kT) v, where the rows of a request are the last tokens of its context and see no later ones.

    The rows' own keys and values are read from the cache like all others: as they were coded. A row's result does not
    depend on where a prompt was cut into chunks.

    query         [rows, heads, head_dim] contiguous; query head h reads KV head h // (heads / kv_heads); through
                  hadamard where the keys went through it
    query_starts  [requests + 1] int32  request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens  [requests] int32      tokens in the cache, the rows' own included
    block_tables  [requests, blocks] int32
    num_rows      of each request; read from the device where not given
    bounds        at most max_context tokens of context (by default all that a table holds)
    return        shape and dtype of query, rotated back
    """
    # without tensor cores the kernel's products would spill; torch has its own
    if query.is_cuda and query.dtype != torch.float32:
        return attention_prefill_triton(
            query, cache, query_starts, context_lens, block_tables, scale, num_rows, max_context
        )
    return attention_prefill_reference(query, cache, query_starts, context_lens, block_tables, scale)


attention_prefill_reference = attention_decode_reference


def attention_prefill_triton(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_rows: Sequence[int] | None = None,
    max_context: int | None = None,
    shape: PrefillShape | None = None,
    segment: int = SEGMENT,
) -> torch.Tensor:
    """shape, segment  only for measurements and tests; they change no result"""
    assert query.is_contiguous() and block_tables.stride(1) == 1
    num_rows = num_rows or lengths(query_starts)
    shape = shape or prefill_shape(query.device)
    if isinstance(cache, PagedKV):
        output = torch.empty_like(query)
        everything = Part(0, block_tables.shape[1] * cache.keys.shape[1], is_first=True, is_last=True, state=None)
        _launch(query, cache, query_starts, context_lens, block_tables, scale, max(num_rows), output, everything, shape)
        return output
    max_context = max_context or block_tables.shape[1] * cache.keys.shape[1]
    return _attend_coded(
        query, cache, query_starts, context_lens, block_tables, scale, num_rows, max_context, shape, segment
    )


@dataclass(frozen=True, slots=True)
class Running:
    """What rows know after a part of their context.

    planes  [rows, heads, head_dim] fp32, unnormalised outputs
    stats   [rows, heads, 2] fp32, the maximum of the log2 weights and the sum of the weights
    """

    planes: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def like(cls, query: torch.Tensor) -> Self:
        rows, heads, _ = query.shape
        stats = torch.empty(rows, heads, 2, dtype=torch.float32, device=query.device)
        return cls(torch.empty_like(query, dtype=torch.float32), stats)


@dataclass(frozen=True, slots=True)
class Part:
    """The positions first : last of a context.

    state  read unless the part is the first, written unless it is the last
    """

    first: int
    last: int
    is_first: bool
    is_last: bool
    state: Running | None


def _attend_coded(
    query: torch.Tensor,
    cache: CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    num_rows: Sequence[int],
    max_context: int,
    shape: PrefillShape,
    segment: int,
) -> torch.Tensor:
    """Request after request and segment after segment: codes become numbers once for all rows that read them."""
    output = torch.empty_like(query, dtype=torch.float32 if cache.is_rotated else query.dtype)
    numbers, identity = _scratch(cache, min(segment, max_context))
    starts = range(0, max_context, segment)
    state = Running.like(query) if len(starts) > 1 else None
    for request, first_row in enumerate(accumulate(num_rows[:-1], initial=0)):
        only = slice(request, request + 1)
        rows = slice(first_row, first_row + num_rows[request])
        for start in starts:
            kv_restore_triton(cache, block_tables[request], context_lens[only], start // cache.keys.shape[1], numbers)
            part = Part(start, start + segment, start == 0, start == starts[-1], state)
            _launch(
                query, numbers, query_starts[request : request + 2], context_lens[only], identity, scale,
                rows.stop - rows.start, output, part, shape,
            )  # fmt: skip
    return hadamard_triton(output).to(query.dtype) if cache.is_rotated else output


def _scratch(cache: CodedKV, tokens: int) -> tuple[PagedKV, torch.Tensor]:
    """Room for so many tokens of one request, and the table of its blocks."""
    _, size, kv_heads, _ = cache.keys.shape
    blocks, device = triton.cdiv(tokens, size), cache.keys.device
    storage = torch.empty(2, blocks, kv_heads, size, cache.head_dim, dtype=torch.float16, device=device)
    return PagedKV(*storage.transpose(2, 3)), torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)


def _launch(
    query: torch.Tensor,
    numbers: PagedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int,
    output: torch.Tensor,
    part: Part,
    shape: PrefillShape,
) -> None:
    _, heads, head_dim = query.shape
    kv_heads = numbers.keys.shape[2]
    group = heads // kv_heads
    state = part.state or Running(output, output)
    grid = (triton.cdiv(max_rows, shape.block_m // group), kv_heads, len(context_lens))
    attention_prefill_kernel[grid](
        query,
        numbers.keys,
        numbers.values,
        block_tables,
        query_starts,
        context_lens,
        output,
        state.planes,
        state.stats,
        scale * math.log2(math.e),
        block_tables.stride(0),
        part.first,
        part.last,
        GROUP=group,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        NUM_STAGES=shape.num_stages,
        IS_FIRST=part.is_first,
        IS_LAST=part.is_last,
        PORTABLE=is_interpreted(),
        num_warps=shape.num_warps,
        **prefill_storage(numbers, head_dim),
    )


def prefill_storage(numbers: PagedKV, head_dim: int) -> dict:
    constants = kernel_storage(numbers, head_dim)
    unused = ("KEY_FOLD", "VALUE_FOLD", "KEY_SCALE_STRIDES", "VALUE_SCALE_STRIDES", "IS_ROTATED")
    return {name: value for name, value in constants.items() if name not in unused}


def prefill_shape(device: torch.device) -> PrefillShape:
    if device.type != "cuda":
        return PrefillShape(block_m=32, block_n=64, num_warps=4, num_stages=1)
    return prefill_shape_for(torch.cuda.get_device_capability(device))


def prefill_shape_for(capability: tuple[int, int]) -> PrefillShape:
    """Cards with 100 KB of shared memory per multiprocessor take smaller tiles."""
    block_n = 64 if capability in ((9, 0), (10, 0)) else 32
    if capability in ((8, 0), (9, 0), (10, 0)):
        return PrefillShape(block_m=128, block_n=block_n, num_warps=8, num_stages=2)
    return PrefillShape(block_m=64, block_n=block_n, num_warps=4, num_stages=2)


# one compilation for every length of context
@triton.jit(do_not_specialize=["tables_stride", "part_first", "part_last"])
def attention_prefill_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    output_ptr,
    state_ptr,
    stats_ptr,
    scale,
    tables_stride,
    part_first,
    part_last,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    PORTABLE: tl.constexpr,
):
    """The table's first entry is the block of part_first."""
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
        place = (item * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        query = tl.load(query_ptr + place, mask=live[:, None], other=0.0).to(keys_ptr.dtype.element_ty)
        if IS_FIRST:
            acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
            highest = tl.full([BLOCK_M], LOWEST, tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
        else:
            acc = tl.load(state_ptr + place, mask=live[:, None], other=0.0)
            highest = tl.load(stats_ptr + 2 * item, mask=live, other=LOWEST)
            total = tl.load(stats_ptr + 2 * item + 1, mask=live, other=0.0)
        # counted from the part's first position: the remainder of a position in its block is then known to be a tile's
        last = tl.minimum(tl.max(limits, axis=0), part_last) - part_first
        acc, highest, total = attend_wide(
            query, acc, highest, total, limits - part_first, last, context - part_first, scale, kv_head,
            tables_ptr + request.to(tl.int64) * tables_stride, keys_ptr, values_ptr,
            BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_SIZE, KEY_STRIDES, VALUE_STRIDES, NUM_STAGES, PORTABLE,
        )  # fmt: skip
        if IS_LAST:
            total = tl.where(live, total, 1.0)[:, None]
            tl.store(output_ptr + place, (acc / total).to(output_ptr.dtype.element_ty), mask=live[:, None])
        else:
            tl.store(state_ptr + place, acc, mask=live[:, None])
            tl.store(stats_ptr + 2 * item, highest, mask=live)
            tl.store(stats_ptr + 2 * item + 1, total, mask=live)
