"""The decode attention over codes with explicit layouts: words go from memory to the registers that multiply them."""

import math

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from engine.ops.attention_decode import (
    DecodeWorkspace,
    attention_combine_kernel,
    kernel_storage,
    storage_tensors,
)
from engine.ops.attention_splits import (
    FAR_SIZE,
    MIDDLE_COUNT,
    MIDDLE_END,
    MIDDLE_SIZE,
    NEAR_COUNT,
    NEAR_END,
    NEAR_SIZE,
    num_splits,
)
from engine.ops.attention_tile import load_query
from engine.ops.coded_kv import CodedKV
from engine.ops.kv_codec_e8 import E8_PLANES_ASM, EIGHT_HALVES
from engine.ops.kv_codec_int8 import INT8_PLANES_ASM

# Triton compiles tuple sums and plain branches, not unpacking
# ruff: noqa: RUF005

BLOCK_M, BLOCK_N = 16, 64


def attention_decode_gluon(
    query: torch.Tensor,
    cache: CodedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    max_rows: int,
    max_context: int,
    workspace: DecodeWorkspace,
    programs: int,
    dependent: bool = False,
    max_registers: int | None = None,
) -> torch.Tensor:
    """attention_decode_triton for coded caches on a GPU; splits, their order and the workspace are the same.

    programs       that share the splits of all KV heads, row chunks and requests
    max_registers  of a thread: fewer let more programs run on a multiprocessor
    """
    rows, heads, head_dim = query.shape
    requests, kv_heads = len(context_lens), cache.keys.shape[2]
    splits = workspace.partials.shape[2]
    storage = kernel_storage(cache, head_dim)
    group = heads // kv_heads
    chunks = triton.cdiv(max_rows, BLOCK_M // group)
    per_head = min(triton.cdiv(programs, kv_heads * chunks * requests), num_splits(max_context))
    launch = {"launch_pdl": True} if dependent else {}
    planes = torch.empty(rows * heads, head_dim, dtype=torch.float16, device=query.device)
    query_planes_kernel[(triton.cdiv(rows * heads, BLOCK_M),)](
        query,
        planes,
        rows * heads,
        HEAD_DIM=head_dim,
        FOLD=storage["KEY_FOLD"],
        IS_ROTATED=storage["IS_ROTATED"],
        BLOCK_M=BLOCK_M,
        DEPENDENT=dependent,
        num_warps=4,
        **launch,
    )
    attention_decode_gluon_kernel[(per_head, kv_heads * chunks, requests)](
        planes,
        *storage_tensors(cache),
        block_tables,
        query_starts,
        context_lens,
        workspace.partials,
        workspace.stats,
        scale * math.log2(math.e),
        block_tables.stride(0),
        splits,
        GROUP=group,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        DEPENDENT=dependent,
        num_warps=4,
        maxnreg=max_registers,
        **{name: value for name, value in storage.items() if name != "IS_ROTATED"},
        **launch,
    )
    output = torch.empty_like(query)
    attention_combine_kernel[(max_rows, heads * head_dim // 64, requests)](
        workspace.partials,
        workspace.stats,
        query_starts,
        context_lens,
        output,
        splits,
        HEADS=heads,
        HEAD_DIM=head_dim,
        FOLD=storage["VALUE_FOLD"],
        IS_ROTATED=storage["IS_ROTATED"],
        TILE=64,
        DEPENDENT=dependent,
        num_warps=4,
        **launch,
    )
    return output


@triton.jit(do_not_specialize=["items"])
def query_planes_kernel(
    query_ptr,
    planes_ptr,
    items,
    HEAD_DIM: tl.constexpr,
    FOLD: tl.constexpr,
    IS_ROTATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Heads of rows in fp16, rotated and cut into planes: plane j of an item at j * HEAD_DIM / FOLD."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    item = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    live = item < items
    planes = load_query(query_ptr + item * HEAD_DIM, live, HEAD_DIM, FOLD, IS_ROTATED, False)
    width: tl.constexpr = HEAD_DIM // FOLD
    c = tl.arange(0, width)
    for j in tl.static_range(FOLD):
        tl.store(planes_ptr + (item * HEAD_DIM)[:, None] + (j * width + c)[None, :], planes[j], mask=live[:, None])


@gluon.jit
def _split_count(context):
    near = (gl.minimum(context, NEAR_END) + NEAR_SIZE - 1) // NEAR_SIZE
    middle = (gl.maximum(gl.minimum(context, MIDDLE_END) - NEAR_END, 0) + MIDDLE_SIZE - 1) // MIDDLE_SIZE
    far = (gl.maximum(context - MIDDLE_END, 0) + FAR_SIZE - 1) // FAR_SIZE
    return near + middle + far


@gluon.jit
def _split_start(split):
    middle = split - NEAR_COUNT
    far = middle - MIDDLE_COUNT
    in_near = gl.minimum(split, NEAR_COUNT) * NEAR_SIZE
    in_middle = gl.minimum(gl.maximum(middle, 0), MIDDLE_COUNT) * MIDDLE_SIZE
    return in_near + in_middle + gl.maximum(far, 0) * FAR_SIZE


@gluon.jit
def _planes(words, scales, FOLD: gl.constexpr):
    if FOLD == 4:
        planes = gl.inline_asm_elementwise(
            INT8_PLANES_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, scales],
            dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        planes = gl.inline_asm_elementwise(
            E8_PLANES_ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [words, scales],
            dtype=EIGHT_HALVES,
            is_pure=True,
            pack=2,
        )
    return planes


@gluon.jit(do_not_specialize=["tables_stride", "max_splits"])
def attention_decode_gluon_kernel(
    planes_ptr,
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
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    KEY_FOLD: gl.constexpr,
    VALUE_FOLD: gl.constexpr,
    KEY_STRIDES: gl.constexpr,
    VALUE_STRIDES: gl.constexpr,
    KEY_SCALE_STRIDES: gl.constexpr,
    VALUE_SCALE_STRIDES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """A word is loaded by the thread whose tensor-core operand it decodes to: no shared memory between the two."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    over_rows: gl.constexpr = gl.SliceLayout(1, product)
    key_width: gl.constexpr = HEAD_DIM // KEY_FOLD
    value_width: gl.constexpr = HEAD_DIM // VALUE_FOLD
    rows_per_chunk: gl.constexpr = BLOCK_M // GROUP
    heads: gl.constexpr = KV_HEADS * GROUP
    kv_head, chunk, request = gl.program_id(1) % KV_HEADS, gl.program_id(1) // KV_HEADS, gl.program_id(2)
    first_row = gl.load(starts_ptr + request)
    rows = gl.load(starts_ptr + request + 1) - first_row
    context = gl.load(lens_ptr + request)

    rowwise: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 4], [1, 0])
    query_lane = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, rowwise))
    query_row = chunk * rows_per_chunk + query_lane // GROUP
    query_live = (query_lane < rows_per_chunk * GROUP) & (query_row < rows)
    query_item = (first_row + query_row).to(gl.int64) * heads + kv_head * GROUP + query_lane % GROUP
    query_c = gl.arange(0, key_width, layout=gl.SliceLayout(0, rowwise))
    # in shared memory: in registers the query would take a quarter of them
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 128 // (2 * key_width), key_width // 8, order=[1, 0])
    queries = gl.allocate_shared_memory(gl.float16, [KEY_FOLD, BLOCK_M, key_width], swizzled)
    for j in gl.static_range(KEY_FOLD):
        query_ptrs = planes_ptr + (query_item * HEAD_DIM)[:, None] + (j * key_width + query_c)[None, :]
        queries.index(j).store(gl.load(query_ptrs, mask=query_live[:, None], other=0.0))

    lane = gl.arange(0, BLOCK_M, layout=over_rows)
    row = chunk * rows_per_chunk + lane // GROUP
    live = (lane < rows_per_chunk * GROUP) & (row < rows)
    limits = gl.where(live, context - rows + row + 1, 0)
    item = (first_row + row).to(gl.int64) * heads + kv_head * GROUP + lane % GROUP
    token = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, product))

    # keys stand transposed: [words, tokens]
    key_word = gl.arange(0, key_width, layout=gl.SliceLayout(1, right))
    key_token = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, right))
    key_offsets = key_word[:, None] + (key_token * KEY_STRIDES[1])[None, :]
    key_groups = key_word // (64 // KEY_FOLD)
    key_scale_offsets = (key_groups * KEY_SCALE_STRIDES[3])[:, None] + (key_token * KEY_SCALE_STRIDES[1])[None, :]
    value_token = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, right))
    value_word = gl.arange(0, value_width, layout=gl.SliceLayout(0, right))
    value_offsets = (value_token * VALUE_STRIDES[1])[:, None] + value_word[None, :]
    value_groups = value_word // (64 // VALUE_FOLD)
    value_scale_offsets = (value_token * VALUE_SCALE_STRIDES[1])[:, None] + (value_groups * VALUE_SCALE_STRIDES[3])[
        None, :
    ]
    ones = gl.full([BLOCK_N, 16], 1.0, gl.float16, layout=right)
    c = gl.arange(0, value_width, layout=gl.SliceLayout(0, product))
    table_ptr = tables_ptr + request.to(gl.int64) * tables_stride

    # no row of a chunk sees more than its last; a chunk beyond the rows has nothing to do
    last_row = gl.minimum((chunk + 1) * rows_per_chunk, rows) - 1
    splits = 0
    if chunk * rows_per_chunk < rows:
        splits = _split_count(context - rows + last_row + 1)
    # the far splits are the long ones: first
    for turn in range(gl.program_id(0), splits, gl.num_programs(0)):
        split = splits - 1 - turn
        acc = ()
        for _ in gl.static_range(VALUE_FOLD):
            acc = acc + (gl.zeros([BLOCK_M, value_width], gl.float32, layout=product),)
        total = gl.zeros([BLOCK_M, 16], gl.float32, layout=product)
        # finite, so that a row that sees nothing yet has weights exp2(-inf) = 0 and not NaN
        highest = gl.full([BLOCK_M], -1.0e30, gl.float32, layout=over_rows)
        last = gl.minimum(_split_start(split + 1), context)
        for start in range(_split_start(split), last, BLOCK_N):
            block = gl.load(table_ptr + start // BLOCK_SIZE).to(gl.int64)
            key_words = gl.load(keys_ptr + block * KEY_STRIDES[0] + kv_head * KEY_STRIDES[2] + key_offsets)
            key_scales = gl.load(
                key_scales_ptr + block * KEY_SCALE_STRIDES[0] + kv_head * KEY_SCALE_STRIDES[2] + key_scale_offsets,
                mask=(start + key_token < context)[None, :],
                other=0.0,
            )
            value_words = gl.load(values_ptr + block * VALUE_STRIDES[0] + kv_head * VALUE_STRIDES[2] + value_offsets)
            # any word is a finite code, but a stale scale may be NaN
            value_scales = gl.load(
                value_scales_ptr
                + block * VALUE_SCALE_STRIDES[0]
                + kv_head * VALUE_SCALE_STRIDES[2]
                + value_scale_offsets,
                mask=(start + value_token < context)[:, None],
                other=0.0,
            )
            keys = _planes(key_words, key_scales, KEY_FOLD)
            scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=product)
            for j in gl.static_range(KEY_FOLD):
                scores = mma_v2(queries.index(j).load(left), keys[j], scores)
            seen = (start + token)[None, :] < limits[:, None]
            scores = gl.where(seen, scores * scale, float("-inf"))
            higher = gl.maximum(highest, gl.max(scores, axis=1))
            weights = gl.convert_layout(gl.exp2(scores - higher[:, None]).to(gl.float16), left)
            shrink = gl.exp2(highest - higher)
            highest = higher
            total = mma_v2(weights, ones, total * shrink[:, None])
            values = _planes(value_words, value_scales, VALUE_FOLD)
            grown = ()
            for j in gl.static_range(VALUE_FOLD):
                grown = grown + (mma_v2(weights, values[j], acc[j] * shrink[:, None]),)
            acc = grown
        place = item * max_splits + split
        for j in gl.static_range(VALUE_FOLD):
            target = partials_ptr + (place * HEAD_DIM)[:, None] + (j * value_width + c)[None, :]
            gl.store(target, acc[j], mask=live[:, None])
        gl.store(stats_ptr + 2 * place, highest, mask=live)
        gl.store(stats_ptr + 2 * place + 1, gl.max(total, axis=1), mask=live)
