"""Attention of a few rows per request (decode and verification), cut along the context, over plain or coded blocks."""

import math
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from engine.ops.attention_splits import num_splits, split_count, split_start
from engine.ops.attention_tile import LOWEST, attend_narrow, load_query, prefetch_block
from engine.ops.coded_kv import CodedKV, decoded
from engine.ops.hadamard import hadamard_reference, hadamard_signs
from engine.ops.launch import capability_of, cdiv, has_dependent_launch, is_interpreted, processors_of
from engine.ops.paged_attention import paged_attention_reference
from engine.ops.paged_kv import PagedKV
from engine.ops.quantize_rows import QuantizedRows, empty_rows, quantize_rows_reference, store_rounded

MAX_ROWS = 8
# splits that a program reads at a time, all in flight at once
COMBINE_TILE, COMBINE_WARPS, COMBINE_STAGES = 128, 8, tl.constexpr(3)
# blocks that a program asks for before the query is there
PREFETCHED = tl.constexpr(2)


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Results of the splits until they are combined; contents never outlive a call.

    partials  [rows, heads, splits, head_dim] fp32, unnormalised outputs
    stats     [rows, heads, splits, 2] fp32, the maximum of the log2 weights and the sum of the weights
    """

    partials: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, head_dim: int, max_context: int, device: torch.device | str) -> Self:
        return cls.of_splits(rows, heads, head_dim, num_splits(max_context), device)

    @classmethod
    def of_splits(cls, rows: int, heads: int, head_dim: int, splits: int, device: torch.device | str) -> Self:
        partials = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=device)
        return cls(partials, torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """How the kernel is cut; never changes what it computes.

    block_m        query rows times heads of a KV head in one program: 16, or 32 for verification
    max_registers  of a thread
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int | None = None


def attention_decode(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int = MAX_ROWS,
    max_context: int | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """softmax(scale * q kT) v, where the rows of a request are the last tokens of its context and see no later ones.

    A row's result does not depend on the rows or requests beside it, nor on how its context came into the cache.

    query         [rows, heads, head_dim] contiguous; query head h reads KV head h // (heads / kv_heads); through
                  hadamard where the keys went through it
    query_starts  [requests + 1] int32  request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens  [requests] int32      tokens in the cache, the rows' own included
    block_tables  [requests, blocks] int32
    bounds        at most max_rows rows per request and max_context tokens of context (all that a table holds)
    workspace     for at least as many rows and splits; allocated when not given
    return        shape and dtype of query, rotated back
    """
    if not query.is_cuda:
        return attention_decode_reference(query, cache, query_starts, context_lens, block_tables, scale)
    return attention_decode_triton(
        query, cache, query_starts, context_lens, block_tables, scale, max_rows, max_context, workspace,
        dependent=has_dependent_launch(query.device),
    )  # fmt: skip


def attention_decode_rounded(
    query: torch.Tensor,
    gate: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int = MAX_ROWS,
    max_context: int | None = None,
    workspace: DecodeWorkspace | None = None,
) -> QuantizedRows:
    """attention_decode times sigmoid(gate), rounded as quantize_rows rounds and by nothing before that.

    gate    [rows, heads * head_dim]  its rows may lie apart
    return  rows of heads * head_dim columns
    """
    if not query.is_cuda:
        return attention_decode_rounded_reference(query, gate, cache, query_starts, context_lens, block_tables, scale)
    return attention_decode_rounded_triton(
        query, gate, cache, query_starts, context_lens, block_tables, scale, max_rows, max_context, workspace,
        dependent=has_dependent_launch(query.device),
    )  # fmt: skip


def attention_decode_reference(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return _attend_wide(query, cache, query_starts, context_lens, block_tables, scale).to(query.dtype)


def attention_decode_rounded_reference(
    query: torch.Tensor,
    gate: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> QuantizedRows:
    attended = _attend_wide(query, cache, query_starts, context_lens, block_tables, scale).flatten(1)
    return quantize_rows_reference(attended * torch.sigmoid(gate.to(attended.dtype)))


def _attend_wide(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """In at least fp32."""
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    if not isinstance(cache, CodedKV):
        return paged_attention_reference(wide, cache, query_starts, context_lens, block_tables, scale)
    block_ids = block_tables.flatten().long()
    parts = (x[block_ids] for x in (cache.keys, cache.values, cache.key_scales, cache.value_scales))
    # as they are stored: the query is rotated already, and of the values the sum is rotated back
    stored = decoded(CodedKV(*parts, is_rotated=False), wide.dtype)
    tables = torch.arange(len(block_ids), device=block_tables.device).view_as(block_tables)
    attended = paged_attention_reference(wide, stored, query_starts, context_lens, tables, scale)
    return hadamard_reference(attended) if cache.is_rotated else attended


def attention_decode_triton(
    query: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int = MAX_ROWS,
    max_context: int | None = None,
    workspace: DecodeWorkspace | None = None,
    shape: DecodeShape | None = None,
    dependent: bool = False,
) -> torch.Tensor:
    call = DecodeCall(query, cache, query_starts, context_lens, block_tables, max_rows, dependent)
    workspace = call.attend(scale, max_context, workspace, shape)
    output = torch.empty_like(query)
    call.combine(workspace, output, query, None)
    return output


def attention_decode_rounded_triton(
    query: torch.Tensor,
    gate: torch.Tensor,
    cache: PagedKV | CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int = MAX_ROWS,
    max_context: int | None = None,
    workspace: DecodeWorkspace | None = None,
    shape: DecodeShape | None = None,
    dependent: bool = False,
) -> QuantizedRows:
    assert gate.stride(1) == 1
    call = DecodeCall(query, cache, query_starts, context_lens, block_tables, max_rows, dependent)
    workspace = call.attend(scale, max_context, workspace, shape)
    rounded = empty_rows(len(query), query.shape[1] * query.shape[2], query.device)
    call.combine(workspace, rounded.values, gate, rounded)
    return rounded


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """The two launches over one set of arguments."""

    query: torch.Tensor
    cache: PagedKV | CodedKV
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_rows: int
    dependent: bool

    @property
    def launch(self) -> dict[str, bool]:
        return {"launch_pdl": True} if self.dependent else {}

    def attend(
        self, scale: float, max_context: int | None, workspace: DecodeWorkspace | None, shape: DecodeShape | None
    ) -> DecodeWorkspace:
        """Writes the results of the splits into the workspace that it returns."""
        rows, heads, head_dim = self.query.shape
        kv_heads = self.cache.keys.shape[2]
        group = heads // kv_heads
        most = num_splits(max_context or self.block_tables.shape[1] * self.cache.keys.shape[1])
        workspace = workspace or DecodeWorkspace.of_splits(rows, heads, head_dim, most, self.query.device)
        splits = workspace.partials.shape[2]
        assert self.query.is_contiguous() and self.block_tables.stride(1) == 1
        assert workspace.partials.shape[0] >= rows and most <= splits
        storage = kernel_storage(self.cache, head_dim)
        shape = shape or decode_shape(self.cache, self.max_rows * group)
        chunks = cdiv(self.max_rows, shape.block_m // group)
        per_head = cdiv(shape.programs, kv_heads * chunks * len(self.context_lens))
        attention_decode_kernel[(kv_heads * chunks, min(per_head, most), len(self.context_lens))](
            self.query,
            *storage_tensors(self.cache),
            self.block_tables,
            self.query_starts,
            self.context_lens,
            workspace.partials,
            workspace.stats,
            scale * math.log2(math.e),
            self.block_tables.stride(0),
            splits,
            GROUP=group,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            NUM_STAGES=shape.num_stages,
            PORTABLE=is_interpreted(),
            DEPENDENT=self.dependent,
            num_warps=shape.num_warps,
            enable_fp_fusion=True,
            maxnreg=shape.max_registers,
            **storage,
            **self.launch,
        )
        return workspace

    def combine(
        self, workspace: DecodeWorkspace, output: torch.Tensor, gate: torch.Tensor, rounded: QuantizedRows | None
    ) -> None:
        """Writes output, or what is rounded."""
        _, heads, head_dim = self.query.shape
        is_coded = isinstance(self.cache, CodedKV)
        attention_combine_kernel[(heads * head_dim // 64, self.max_rows, len(self.context_lens))](
            workspace.partials,
            workspace.stats,
            self.query_starts,
            self.context_lens,
            output,
            gate,
            rounded.scales if rounded else output,
            rounded.sums if rounded else output,
            workspace.partials.shape[2],
            gate.stride(0),
            HEADS=heads,
            HEAD_DIM=head_dim,
            FOLD=self.cache.folds[1] if is_coded else 1,
            IS_ROTATED=is_coded and self.cache.is_rotated,
            IS_ROUNDED=rounded is not None,
            TILE=COMBINE_TILE,
            DEPENDENT=self.dependent,
            num_warps=COMBINE_WARPS,
            enable_fp_fusion=True,
            **self.launch,
        )


def storage_tensors(cache: PagedKV | CodedKV) -> tuple[torch.Tensor, ...]:
    """Keys, values and their scales; plain numbers have none, and their own tensors stand in."""
    if isinstance(cache, CodedKV):
        return cache.keys, cache.values, cache.key_scales, cache.value_scales
    return cache.keys, cache.values, cache.keys, cache.values


def kernel_storage(cache: PagedKV | CodedKV, head_dim: int) -> dict:
    """What a kernel is compiled for: the form of keys and values and where they lie."""
    is_coded = isinstance(cache, CodedKV)
    keys, values, key_scales, value_scales = storage_tensors(cache)
    assert keys.stride(3) == values.stride(3) == 1
    key_fold, value_fold = cache.folds if is_coded else (1, 1)
    return {
        "KV_HEADS": keys.shape[2],
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": keys.shape[1],
        "KEY_FOLD": key_fold,
        "VALUE_FOLD": value_fold,
        "KEY_STRIDES": keys.stride(),
        "VALUE_STRIDES": values.stride(),
        "KEY_SCALE_STRIDES": key_scales.stride(),
        "VALUE_SCALE_STRIDES": value_scales.stride(),
        "IS_ROTATED": is_coded and cache.is_rotated,
    }


def decode_shape(cache: PagedKV | CodedKV, rows_per_kv_head: int) -> DecodeShape:
    """As many programs as run at once; on a CPU (the interpreter) as few as exercise the loop over splits."""
    device = cache.keys.device
    block_m = 32 if rows_per_kv_head > 16 else 16
    if device.type != "cuda":
        return DecodeShape(block_m, block_n=32, num_warps=4, num_stages=1, programs=4)
    processors = processors_of(device)
    if cache.keys.dtype == torch.float32:
        return DecodeShape(block_m, block_n=16, num_warps=4, num_stages=1, programs=2 * processors)
    fold = cache.folds[1] if isinstance(cache, CodedKV) else 1
    return decode_shape_for(capability_of(device), rows_per_kv_head, fold, processors)


def decode_shape_for(
    capability: tuple[int, int], rows_per_kv_head: int, value_fold: int, processors: int
) -> DecodeShape:
    """Cards with 100 KB of shared memory per multiprocessor keep fewer tokens in flight."""
    is_large = capability in ((8, 0), (9, 0), (10, 0))
    # planes of 32 rows leave too few registers to decode in: a second program reads the codes once more
    is_wide = rows_per_kv_head > 16 and value_fold == 1
    return DecodeShape(
        block_m=32 if is_wide else 16,
        block_n=64 if is_large or value_fold > 1 else 32,
        num_warps=8 if is_wide else 4,
        # a tile in flight while one is multiplied, where both fit beside two other programs
        num_stages=3 if is_large and value_fold > 1 else 2,
        programs=6 * processors,
        # three programs at a time on a multiprocessor instead of two
        max_registers=168 if value_fold > 1 else None,
    )


# one compilation for every length of context
@triton.jit(do_not_specialize=["tables_stride", "max_splits"])
def attention_decode_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    starts_ptr,
    lens_ptr,
    partials_ptr,
    stats_ptr,
    scale,
    tables_stride,
    max_splits,
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
    DEPENDENT: tl.constexpr,
):
    """What is read before the wait is older than the pass; keys and values are only asked for there."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    rows_per_chunk: tl.constexpr = BLOCK_M // GROUP
    heads: tl.constexpr = KV_HEADS * GROUP
    kv_head, chunk, request = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS, tl.program_id(2)
    first_row = tl.load(starts_ptr + request)
    rows = tl.load(starts_ptr + request + 1) - first_row
    context = tl.load(lens_ptr + request)
    lane = tl.arange(0, BLOCK_M)
    row = chunk * rows_per_chunk + lane // GROUP
    live = (lane < rows_per_chunk * GROUP) & (row < rows)
    limits = tl.where(live, context - rows + row + 1, 0)
    # int64: rows * heads * splits * head_dim passes 2**31 for several requests
    item = (first_row + row).to(tl.int64) * heads + kv_head * GROUP + lane % GROUP
    number: tl.constexpr = keys_ptr.dtype.element_ty if KEY_FOLD == 1 else tl.float16
    splits = split_count(tl.max(limits, axis=0))
    # the far splits are the long ones: first
    turn = tl.program_id(1)
    if turn >= splits:
        return
    tables_ptr += request.to(tl.int64) * tables_stride
    if DEPENDENT:
        first = split_start(splits - 1 - turn) // BLOCK_SIZE
        for i in tl.static_range(PREFETCHED):
            if (first + i) * BLOCK_SIZE < tl.minimum(split_start(splits - turn), context):
                block = tl.load(tables_ptr + first + i).to(tl.int64)
                prefetch_block(keys_ptr, block, kv_head, HEAD_DIM, BLOCK_SIZE, KEY_FOLD, KEY_STRIDES)
                prefetch_block(values_ptr, block, kv_head, HEAD_DIM, BLOCK_SIZE, VALUE_FOLD, VALUE_STRIDES)
        tl.extra.cuda.gdc_wait()
    query, factors = load_query(query_ptr + item * HEAD_DIM, live, scale, HEAD_DIM, KEY_FOLD, number)
    width: tl.constexpr = HEAD_DIM // VALUE_FOLD
    c = tl.arange(0, width)
    for turn in range(tl.program_id(1), splits, tl.num_programs(1)):
        split = splits - 1 - turn
        acc, highest, total = attend_narrow(
            query, factors, limits, split_start(split), tl.minimum(split_start(split + 1), context), context, kv_head,
            tables_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, BLOCK_M, BLOCK_N, HEAD_DIM, BLOCK_SIZE,
            KEY_FOLD, VALUE_FOLD, KEY_STRIDES, VALUE_STRIDES, KEY_SCALE_STRIDES, VALUE_SCALE_STRIDES, NUM_STAGES,
            PORTABLE,
        )  # fmt: skip
        place = item * max_splits + split
        for j in tl.static_range(VALUE_FOLD):
            target = partials_ptr + (place * HEAD_DIM)[:, None] + (j * width + c)[None, :]
            tl.store(target, acc[j], mask=live[:, None])
        tl.store(stats_ptr + 2 * place, highest, mask=live)
        tl.store(stats_ptr + 2 * place + 1, total, mask=live)


@triton.jit(do_not_specialize=["max_splits", "gate_stride"])
def attention_combine_kernel(
    partials_ptr,
    stats_ptr,
    starts_ptr,
    lens_ptr,
    output_ptr,
    gate_ptr,
    scales_ptr,
    sums_ptr,
    max_splits,
    gate_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FOLD: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    IS_ROUNDED: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One group of 64 dimensions of one head of one row, over its splits in their order."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    groups: tl.constexpr = HEAD_DIM // 64
    request, head, group = tl.program_id(2), tl.program_id(0) // groups, tl.program_id(0) % groups
    first_row = tl.load(starts_ptr + request)
    rows = tl.load(starts_ptr + request + 1) - first_row
    row = tl.program_id(1)
    if row < rows:
        splits = split_count(tl.load(lens_ptr + request) - rows + row + 1)
        item = (first_row + row).to(tl.int64) * HEADS + head
        tile = tl.arange(0, TILE)
        lane = tl.arange(0, 64)
        # dimension FOLD * c + j of the head stands at j * width + c: runs of 64 / FOLD numbers belong to the group
        run: tl.constexpr = 64 // FOLD
        position = lane // run * (HEAD_DIM // FOLD) + group * run + lane % run
        sums = tl.zeros([TILE, 64], tl.float32)
        totals = tl.zeros([TILE], tl.float32)
        top = tl.full([], LOWEST, tl.float32)
        for start in tl.range(0, splits, TILE, num_stages=COMBINE_STAGES):
            place = item * max_splits + start + tile
            held = start + tile < splits
            highest = tl.load(stats_ptr + 2 * place, mask=held, other=float("-inf"))
            total = tl.load(stats_ptr + 2 * place + 1, mask=held, other=0.0)
            source = partials_ptr + (place * HEAD_DIM)[:, None] + position[None, :]
            part = tl.load(source, mask=held[:, None], other=0.0)
            higher = tl.maximum(top, tl.max(highest, axis=0))
            weights, shrink = tl.exp2(highest - higher), tl.exp2(top - higher)
            totals = totals * shrink + weights * total
            sums = sums * shrink + weights[:, None] * part
            top = higher
        output = tl.sum(sums, axis=0)
        total = tl.sum(totals, axis=0)
        output = output / total
        dim = tl.arange(0, 64)
        if FOLD > 1:
            stored = lane % run * FOLD + lane // run
            if IS_ROTATED:
                mix = 0.125 * hadamard_signs(dim[:, None], stored[None, :])
            else:
                mix = (dim[:, None] == stored[None, :]).to(tl.float32)
            output = tl.sum(mix * output[None, :], axis=1)
        if IS_ROUNDED:
            column = head * HEAD_DIM + group * 64 + dim
            gate = tl.load(gate_ptr + (first_row + row).to(tl.int64) * gate_stride + column).to(tl.float32)
            gated = tl.reshape(output * tl.sigmoid(gate), [1, 64])
            store_rounded(
                gated, output_ptr, scales_ptr, sums_ptr, first_row + row, head * groups + group, HEADS * groups, BLOCK=1
            )
        else:
            target = output_ptr + item * HEAD_DIM + group * 64 + dim
            tl.store(target, output.to(output_ptr.dtype.element_ty))
