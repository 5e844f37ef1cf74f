"""Attention of many rows per request (chunks of a prompt) over plain or coded blocks.

A context is cut into parts of PART tokens. What a row knows of each part is computed from nothing, and parts are merged
in order: so the bits of a row are the same whether parts were computed one after another, by programs with many rows,
or side by side, where few rows alone would leave most of a card idle.
"""

# Triton compiles tuple sums and plain branches, not unpacking

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from engine.ops.attention_decode import attention_decode_reference, kernel_storage
from engine.ops.attention_tile import LOWEST, multiply
from engine.ops.coded_kv import CodedKV
from engine.ops.hadamard import hadamard_triton
from engine.ops.kv_restore import kv_restore_triton
from engine.ops.launch import capability_of, cdiv, is_interpreted, next_power_of_2, plain_options
from engine.ops.paged_kv import PagedKV
from engine.ops.ragged import lengths

PART = 8192
# parts side by side at most, and so many of a coded context are restored at a time
MOST_SIDE_BY_SIDE = 4
# programs that a card takes at a time, the share of them that may find nothing to do, and how many programs' results
# there is room for where parts are computed side by side
PROGRAMS, IDLE_SHARE, MOST_PROGRAMS = 132, 0.1, 3 * 132


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
    part: int = PART,
    side_by_side: int | None = None,
) -> torch.Tensor:
    """shape, side_by_side  only for measurements and tests; they change no result. part  changes it by rounding"""
    assert query.is_contiguous() and block_tables.stride(1) == 1
    num_rows = num_rows or lengths(query_starts)
    is_rotated = isinstance(cache, CodedKV) and cache.is_rotated
    max_context = max_context or block_tables.shape[1] * cache.keys.shape[1]
    attention = Attention(
        query=query,
        output=torch.empty_like(query, dtype=torch.float32 if is_rotated else query.dtype),
        state=Running.of(query, 1) if max_context > part else None,
        kv_heads=cache.keys.shape[2],
        scale=scale * math.log2(math.e),
        part=part,
        num_parts=cdiv(max_context, part),
        shape=shape or prefill_shape(query.device),
        side_by_side=side_by_side,
    )
    if isinstance(cache, PagedKV):
        attention.run(PromptRows(query_starts, context_lens, block_tables, max(num_rows)), lambda _: (cache, 0))
    else:
        _attend_coded(attention, cache, query_starts, context_lens, block_tables, num_rows, max_context)
    return hadamard_triton(attention.output).to(query.dtype) if is_rotated else attention.output


@dataclass(frozen=True, slots=True)
class Running:
    """What rows know after parts of their context; the first dimension counts those side by side.

    planes  [parts, rows, heads, head_dim] fp32, unnormalised outputs
    stats   [parts, rows, heads, 2] fp32, the maximum of the log2 weights and the sum of the weights
    """

    planes: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, parts: int) -> Self:
        stats = torch.empty(parts, *query.shape[:2], 2, dtype=torch.float32, device=query.device)
        return cls(torch.empty(parts, *query.shape, dtype=torch.float32, device=query.device), stats)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of requests, and the tables of their blocks. most  rows of any of them"""

    starts: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    most: int


@dataclass(frozen=True, slots=True)
class Attention:
    """One pass of rows over the parts of their contexts.

    state  of all rows, where there is more than one part
    scale  of the base-2 logarithms of weights
    """

    query: torch.Tensor
    output: torch.Tensor
    state: Running | None
    kv_heads: int
    scale: float
    part: int
    num_parts: int
    shape: PrefillShape
    side_by_side: int | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv_heads

    def run(self, rows: PromptRows, numbers_from: Callable[[int], tuple[PagedKV, int]]) -> None:
        """numbers_from  keys and values from a position on, and the position where the tables begin"""
        if self.state is None:
            self._launch(rows, *numbers_from(0), 0, 1, None)
            return
        side = self.side_by_side or min(self.num_parts, parts_side_by_side(math.prod(self._grid(rows, 1))))
        partial = Running.of(self.query, side) if side > 1 else None
        for first in range(0, self.num_parts, side):
            self._launch(rows, *numbers_from(first * self.part), first, side, partial or self.state)
            is_last = first + side >= self.num_parts
            if partial is not None:
                self._merge(rows, partial, side, first, is_last)
            elif is_last:
                self._merge(rows, self.state, 0, first + 1, is_last)

    def _grid(self, rows: PromptRows, side: int) -> tuple[int, int, int]:
        return cdiv(rows.most, self.shape.block_m // self.group), self.kv_heads, len(rows.context_lens) * side

    def _launch(
        self, rows: PromptRows, numbers: PagedKV, begin: int, first: int, side: int, state: Running | None
    ) -> None:
        planes, stats = (self.output, self.output) if state is None else (state.planes, state.stats)
        # products and sums joined in one kernel and not in the other would make bits depend on which one ran
        attention_prefill_kernel[self._grid(rows, side)](
            self.query, numbers.keys, numbers.values, rows.tables, rows.starts, rows.context_lens, planes, stats,
            self.scale, rows.tables.stride(0), begin, first, side, len(self.query), PART=self.part, GROUP=self.group,
            BLOCK_M=self.shape.block_m, BLOCK_N=self.shape.block_n, NUM_STAGES=self.shape.num_stages,
            IS_WHOLE=state is None, MERGES=state is not None and state is self.state, PORTABLE=is_interpreted(),
            **plain_options(self.shape.num_warps), **prefill_storage(numbers, self.query.shape[2]),
        )  # fmt: skip

    def _merge(self, rows: PromptRows, partial: Running, count: int, first: int, is_last: bool) -> None:
        assert self.state is not None
        _, heads, head_dim = self.query.shape
        merge_parts_kernel[(rows.most, len(rows.context_lens))](
            partial.planes, partial.stats, self.state.planes, self.state.stats, self.output, rows.starts, count, first,
            len(self.query), HEADS=heads, BLOCK=next_power_of_2(heads), HEAD_DIM=head_dim, IS_LAST=is_last,
            **plain_options(4),
        )  # fmt: skip


def parts_side_by_side(programs: int) -> int:
    """The fewest parts whose programs leave little of a card idle at the end; else those that leave least.

    programs  of one part
    """

    def idle(count: int) -> float:
        rounds = cdiv(count * programs, PROGRAMS)
        return 1 - count * programs / (rounds * PROGRAMS)

    counts = [n for n in range(1, MOST_SIDE_BY_SIDE + 1) if n == 1 or n * programs <= MOST_PROGRAMS]
    return next((count for count in counts if idle(count) <= IDLE_SHARE), min(counts, key=idle))


def _attend_coded(
    attention: Attention,
    cache: CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_rows: Sequence[int],
    max_context: int,
) -> None:
    """Request after request: codes become numbers once for all rows that read them."""
    numbers, identity = _scratch(cache, min(MOST_SIDE_BY_SIDE * attention.part, max_context))
    for request, rows in enumerate(num_rows):
        lens, table = context_lens[request : request + 1], block_tables[request]

        def restored(first: int, lens: torch.Tensor = lens, table: torch.Tensor = table) -> tuple[PagedKV, int]:
            kv_restore_triton(cache, table, lens, first // cache.keys.shape[1], numbers)
            return numbers, first

        attention.run(PromptRows(query_starts[request : request + 2], lens, identity, rows), restored)


def _scratch(cache: CodedKV, tokens: int) -> tuple[PagedKV, torch.Tensor]:
    """Room for so many tokens of one request, and the table of its blocks."""
    _, size, kv_heads, _ = cache.keys.shape
    blocks, device = cdiv(tokens, size), cache.keys.device
    storage = torch.empty(2, blocks, kv_heads, size, cache.head_dim, dtype=torch.float16, device=device)
    return PagedKV(*storage.transpose(2, 3)), torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0)


def prefill_storage(numbers: PagedKV, head_dim: int) -> dict:
    constants = kernel_storage(numbers, head_dim)
    unused = ("KEY_FOLD", "VALUE_FOLD", "KEY_SCALE_STRIDES", "VALUE_SCALE_STRIDES", "IS_ROTATED")
    return {name: value for name, value in constants.items() if name not in unused}


def prefill_shape(device: torch.device) -> PrefillShape:
    if device.type != "cuda":
        return PrefillShape(block_m=32, block_n=64, num_warps=4, num_stages=1)
    return prefill_shape_for(capability_of(device))


def prefill_shape_for(capability: tuple[int, int]) -> PrefillShape:
    """Cards with 100 KB of shared memory per multiprocessor take smaller tiles."""
    block_n = 64 if capability in ((9, 0), (10, 0)) else 32
    if capability in ((8, 0), (9, 0), (10, 0)):
        return PrefillShape(block_m=128, block_n=block_n, num_warps=8, num_stages=2)
    return PrefillShape(block_m=64, block_n=block_n, num_warps=4, num_stages=2)


# one compilation for every length of context
@triton.jit(do_not_specialize=["tables_stride", "begin", "first_part", "side", "num_rows"])
def attention_prefill_kernel(
    query_ptr, keys_ptr, values_ptr, tables_ptr, starts_ptr, lens_ptr, planes_ptr, stats_ptr, scale, tables_stride,
    begin, first_part, side, num_rows,
    PART: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, KEY_STRIDES: tl.constexpr,
    VALUE_STRIDES: tl.constexpr, IS_WHOLE: tl.constexpr, MERGES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """Some rows of a KV head over one part. The table's first entry is the block of position begin.

    IS_WHOLE  the part is the whole context, planes the output
    MERGES    planes are the state of the parts before, and then after; else what the rows know of this part, at its
              place among those side by side
    """
    rows_per_program: tl.constexpr = BLOCK_M // GROUP
    # the last rows see most: first
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, request, place = tl.program_id(1), tl.program_id(2) // side, tl.program_id(2) % side
    first_row = tl.load(starts_ptr + request)
    rows = tl.load(starts_ptr + request + 1) - first_row
    if chunk * rows_per_program < rows:
        part_first = (first_part + place) * PART
        # all that follows counts from the part's first position: the remainder of a position in its block is then
        # known to be a tile's
        context = tl.load(lens_ptr + request) - part_first
        lane = tl.arange(0, BLOCK_M)
        row = chunk * rows_per_program + lane // GROUP
        live = (lane < rows_per_program * GROUP) & (row < rows)
        limits = tl.where(live, context - rows + row + 1, 0)
        # int64: rows * heads * head_dim passes 2**31 for long prompts
        item = (first_row + row).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + lane % GROUP
        at = (item * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        last = tl.minimum(tl.max(limits, axis=0), PART)
        # positions that every row sees
        seen = tl.minimum(context - rows + chunk * rows_per_program + 1, PART)
        # the table may end before a part of which nothing is seen
        tables_ptr += request.to(tl.int64) * tables_stride + tl.where(last > 0, part_first - begin, 0) // BLOCK_SIZE
        query = tl.load(query_ptr + at, mask=live[:, None], other=0.0).to(keys_ptr.dtype.element_ty)
        acc, highest, total = attend_wide(
            query, limits, tl.maximum(seen, 0), last, context, scale, kv_head, tables_ptr, keys_ptr, values_ptr,
            BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_SIZE, KEY_STRIDES, VALUE_STRIDES, NUM_STAGES, PORTABLE,
        )  # fmt: skip
        if IS_WHOLE:
            total = tl.where(live, total, 1.0)[:, None]
            tl.store(planes_ptr + at, (acc / total).to(planes_ptr.dtype.element_ty), mask=live[:, None])
        else:
            if MERGES:
                known = live & (row < tl.where(part_first > 0, rows, 0))
                before = tl.load(planes_ptr + at, mask=known[:, None], other=0.0)
                highest_before = tl.load(stats_ptr + 2 * item, mask=known, other=LOWEST)
                total_before = tl.load(stats_ptr + 2 * item + 1, mask=known, other=0.0)
                acc, highest, total = merged(before, highest_before, total_before, acc, highest, total)
            else:
                offset = (place * num_rows).to(tl.int64) * (KV_HEADS * GROUP)
                item += offset
                at += offset * HEAD_DIM
            tl.store(planes_ptr + at, acc, mask=live[:, None])
            tl.store(stats_ptr + 2 * item, highest, mask=live)
            tl.store(stats_ptr + 2 * item + 1, total, mask=live)


@triton.jit
def merged(before, highest_before, total_before, acc, highest, total):
    """What rows know after some parts and the next one."""
    higher = tl.maximum(highest_before, highest)
    old, new = tl.exp2(highest_before - higher), tl.exp2(highest - higher)
    acc = before * old[:, None] + acc * new[:, None]
    return acc, higher, total_before * old + total * new


@triton.jit(do_not_specialize=["count", "first_part", "num_rows"])
def merge_parts_kernel(
    partials_ptr, partial_stats_ptr, state_ptr, stats_ptr, output_ptr, starts_ptr, count, first_part, num_rows,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """All heads of one row: `count` parts side by side follow upon the state, if there is one, in order."""
    row = tl.program_id(0) + tl.load(starts_ptr + tl.program_id(1))
    if row < tl.load(starts_ptr + tl.program_id(1) + 1):
        head = tl.arange(0, BLOCK)
        live = head < HEADS
        known = head < tl.minimum(first_part, 1) * HEADS
        item = row.to(tl.int64) * HEADS + head
        at = (item * HEAD_DIM)[:, None] + tl.arange(0, HEAD_DIM)[None, :]
        acc = tl.load(state_ptr + at, mask=known[:, None], other=0.0)
        highest = tl.load(stats_ptr + 2 * item, mask=known, other=LOWEST)
        total = tl.load(stats_ptr + 2 * item + 1, mask=known, other=0.0)
        for place in range(count):
            offset = (place * num_rows).to(tl.int64) * HEADS
            next_acc = tl.load(partials_ptr + offset * HEAD_DIM + at, mask=live[:, None], other=0.0)
            next_highest = tl.load(partial_stats_ptr + 2 * (offset + item), mask=live, other=LOWEST)
            next_total = tl.load(partial_stats_ptr + 2 * (offset + item) + 1, mask=live, other=0.0)
            acc, highest, total = merged(acc, highest, total, next_acc, next_highest, next_total)
        if IS_LAST:
            total = tl.where(live, total, 1.0)[:, None]
            tl.store(output_ptr + at, (acc / total).to(output_ptr.dtype.element_ty), mask=live[:, None])
        else:
            tl.store(state_ptr + at, acc, mask=live[:, None])
            tl.store(stats_ptr + 2 * item, highest, mask=live)
            tl.store(stats_ptr + 2 * item + 1, total, mask=live)


@triton.jit
def attend_wide(
    query, limits, seen, last, context, scale, kv_head, table_ptr, keys_ptr, values_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, NUM_STAGES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """Online softmax of many rows over the positions below last of plain numbers, from nothing seen on.

    Positions count from the first block of the table. Row i sees those below limits[i], and every row those below seen.
    A tile of which a row sees nothing leaves that row's results as they were, bit for bit: the weights are zero and the
    maximum stays.

    query   [BLOCK_M, HEAD_DIM]
    return  unnormalised outputs [BLOCK_M, HEAD_DIM], the maximum of the log2 weights and their sum, [BLOCK_M]; 0,
            LOWEST and 0 where nothing is seen
    """
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)
    whole = tl.minimum(seen, last) // BLOCK_N * BLOCK_N
    # one tile ahead: a table entry read where it is used would take a stage of the pipeline from the tiles
    following = tl.load(table_ptr)
    for start in tl.range(0, whole, BLOCK_N, num_stages=NUM_STAGES):
        block = following.to(tl.int64)
        following = tl.load(table_ptr + tl.minimum(start + BLOCK_N, last - 1) // BLOCK_SIZE)
        acc, highest, total = attend_tile(
            query, acc, highest, total, limits, start, context, scale, kv_head, block, keys_ptr, values_ptr,
            BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_SIZE, KEY_STRIDES, VALUE_STRIDES, False, PORTABLE,
        )  # fmt: skip
    for start in tl.range(whole, last, BLOCK_N, num_stages=1):
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        acc, highest, total = attend_tile(
            query, acc, highest, total, limits, start, context, scale, kv_head, block, keys_ptr, values_ptr,
            BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_SIZE, KEY_STRIDES, VALUE_STRIDES, True, PORTABLE,
        )  # fmt: skip
    # all columns are the same sum
    return acc, highest, tl.max(total, axis=1)


@triton.jit
def attend_tile(
    query, acc, highest, total, limits, start, context, scale, kv_head, block, keys_ptr, values_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, IS_CUT: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """IS_CUT  some rows may not see all of the tile, and the context may end in it"""
    token = tl.arange(0, BLOCK_N)
    number: tl.constexpr = values_ptr.dtype.element_ty
    offsets = start % BLOCK_SIZE + token
    # positions within the block at which the context ends
    end = context - start + start % BLOCK_SIZE if IS_CUT else BLOCK_SIZE
    key_base = keys_ptr + block * KEY_STRIDES[0] + kv_head * KEY_STRIDES[2]
    keys = load_numbers(key_base, offsets, end, HEAD_DIM, KEY_STRIDES[1], IS_CUT)
    scores = multiply(query, tl.trans(keys), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PORTABLE)
    if IS_CUT:
        scores = tl.where((start + token)[None, :] < limits[:, None], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
    # spelled out: a compiler that joined the two here and not there would make bits depend on how rows lie in programs
    weights = tl.exp2(tl.fma(scores, scale, -higher[:, None])).to(number)
    shrink = tl.exp2(highest - higher)
    # a product with ones, so that the order of the sum is that of the tensor cores
    ones = tl.full([BLOCK_N, 16], 1.0, number)
    total = multiply(weights, ones, total * shrink[:, None], PORTABLE)
    value_base = values_ptr + block * VALUE_STRIDES[0] + kv_head * VALUE_STRIDES[2]
    values = load_numbers(value_base, offsets, end, HEAD_DIM, VALUE_STRIDES[1], IS_CUT)
    acc = multiply(weights, values, acc * shrink[:, None], PORTABLE)
    return acc, higher, total


@triton.jit
def load_numbers(ptr, offsets, end, WIDTH: tl.constexpr, STRIDE: tl.constexpr, IS_CUT: tl.constexpr):
    """[tokens, WIDTH] of one block; what lies from end on is zero."""
    at = ptr + offsets[:, None] * STRIDE + tl.arange(0, WIDTH)[None, :]
    if IS_CUT:
        return tl.load(at, mask=(offsets < end)[:, None], other=0.0)
    else:
        return tl.load(at)
