"""Products of several rows through matrix instructions, whose registers take the weights as they lie in memory."""

# ruff: noqa: RUF005 - kernels have no starred expressions

from collections.abc import Sequence

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from engine.ops.launch import cdiv, has_dependent_launch, launch_options, next_power_of_2, processors_of
from engine.ops.quantize_rows import QuantizedRows
from engine.ops.quantized_dot import ahead, groups_of, num_iterations
from engine.ops.quantized_weight import QuantizedWeight

# of a matrix instruction, whose other side are the 16 outputs of a tile
_ROWS = 8
REGISTERS = 168


def linear_rows_triton(
    x: QuantizedRows,
    weights: Sequence[QuantizedWeight],
    y: torch.Tensor,
    residual: torch.Tensor | None,
    segments: int,
) -> None:
    """quantized_linear for any number of rows; not under the interpreter.

    writes  y
    """
    first, last = weights[0], weights[-1]
    constants = constants_of(len(y), weights, segments)
    tiles = sum(weight.words.shape[0] for weight in weights)
    grid = tiles, cdiv(len(y), _ROWS * constants["BLOCKS"])
    processors = processors_of(y.device)
    linear_rows_kernel[grid](
        x.values.view(torch.int32), x.scales, x.sums, first.words, first.scales, last.words, last.scales,
        y if residual is None else residual, y, len(y), y.shape[1], first.rows, groups_of(first.columns),
        first.words.shape[0], **constants, HAS_RESIDUAL=residual is not None, PDL=has_dependent_launch(y.device),
        **launch_options(y.device, segments // 2, registers_for(segments, grid[0] * grid[1], processors)),
    )  # fmt: skip


def registers_for(segments: int, programs: int, processors: int) -> int | None:
    """Programs of 16 segments with so many are alone on their multiprocessor: that is for where each has one anyway.
    On an H200 four requests of the 27B, whose matrices have 320 tiles and more, lost a tenth by them."""
    return REGISTERS if segments == 8 or programs <= processors else None


def constants_of(rows: int, weights: Sequence[QuantizedWeight], segments: int) -> dict[str, int | bool]:
    blocks = min(4, next_power_of_2(cdiv(rows, _ROWS)))
    iterations = num_iterations(groups_of(weights[0].columns), segments)
    # bits of a group's weights that a lane holds for each output: so much fits into its registers
    most = 16 if blocks == 1 else 8
    return {
        "BLOCKS": blocks,
        "BITS": weights[0].bits,
        "LAST_BITS": weights[-1].bits,
        "IS_PAIR": len(weights) == 2,
        "SEGMENTS": segments,
        "ITERATIONS": iterations,
        "AHEAD": ahead(iterations, most // weights[0].bits),
        "LAST_AHEAD": ahead(iterations, most // weights[-1].bits),
    }


@gluon.jit
def linear_rows_kernel(
    x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, last_words_ptr, last_scales_ptr, residual_ptr, y_ptr,
    rows, outputs, first_outputs, groups, first_tiles,
    BLOCKS: gl.constexpr, BITS: gl.constexpr, LAST_BITS: gl.constexpr, IS_PAIR: gl.constexpr,
    SEGMENTS: gl.constexpr, ITERATIONS: gl.constexpr, AHEAD: gl.constexpr, LAST_AHEAD: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = gl.program_id(0)
    if IS_PAIR:
        if tile >= first_tiles:
            linear_rows_tile(
                x_ptr, x_scales_ptr, x_sums_ptr, last_words_ptr, last_scales_ptr, residual_ptr, y_ptr,
                rows, outputs, first_outputs, outputs - first_outputs, groups, tile - first_tiles,
                BLOCKS, LAST_BITS, SEGMENTS, ITERATIONS, LAST_AHEAD, HAS_RESIDUAL, PDL,
            )  # fmt: skip
        else:
            linear_rows_tile(
                x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
                rows, outputs, 0, first_outputs, groups, tile,
                BLOCKS, BITS, SEGMENTS, ITERATIONS, AHEAD, HAS_RESIDUAL, PDL,
            )  # fmt: skip
    else:
        linear_rows_tile(
            x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
            rows, outputs, 0, first_outputs, groups, tile,
            BLOCKS, BITS, SEGMENTS, ITERATIONS, AHEAD, HAS_RESIDUAL, PDL,
        )  # fmt: skip


@gluon.jit
def linear_rows_tile(
    x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
    rows, outputs, first_column, columns, groups, tile,
    BLOCKS: gl.constexpr, BITS: gl.constexpr, SEGMENTS: gl.constexpr, ITERATIONS: gl.constexpr,
    AHEAD: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One tile of a matrix whose outputs are the columns of y from first_column on."""
    # warp w holds the segments w and w + SEGMENTS / 2, its lane what the matrix instruction wants of it
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [SEGMENTS // 2, 1], [1, 0])
    segment = gl.arange(0, SEGMENTS, layout=gl.SliceLayout(1, LANES))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, LANES))[None, :]
    weights = ()
    for i in gl.static_range(AHEAD):
        weights = weights + (
            load_operands(words_ptr, scales_ptr, tile, segment + i * SEGMENTS, lane, groups, BITS),
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = gl.program_id(1) * (8 * BLOCKS)
    zero = gl.zeros([SEGMENTS, 32], gl.float32, layout=LANES)
    acc = ()
    for _ in gl.static_range(BLOCKS):
        acc = acc + ((zero, zero, zero, zero),)
    if ITERATIONS == AHEAD:
        for i in gl.static_range(AHEAD):
            acc = add_operands(
                acc, weights[i], x_ptr, x_scales_ptr, x_sums_ptr, rows, first, segment + i * SEGMENTS, lane, groups,
                BLOCKS, BITS,
            )  # fmt: skip
    else:
        for start in range(0, ITERATIONS, AHEAD):
            next_weights = ()
            for i in gl.static_range(AHEAD):
                group = segment + (start + i) * SEGMENTS
                acc = add_operands(
                    acc, weights[i], x_ptr, x_scales_ptr, x_sums_ptr, rows, first, group, lane, groups, BLOCKS, BITS
                )
                # groups beyond the last are masked
                group += AHEAD * SEGMENTS
                next_weights = next_weights + (
                    load_operands(words_ptr, scales_ptr, tile, group, lane, groups, BITS),
                )  # fmt: skip
            weights = next_weights
    for i in gl.static_range(BLOCKS):
        store_block(
            acc[i], residual_ptr, y_ptr, rows, outputs, first_column, columns, tile, first + 8 * i,
            SEGMENTS, HAS_RESIDUAL,
        )  # fmt: skip


@gluon.jit
def load_operands(words_ptr, scales_ptr, tile, group, lane, groups, BITS: gl.constexpr):
    """Of each group [SEGMENTS, 1]: the words of outputs lane / 4 and 8 more, plane by plane, and their two scales."""
    mask = group < groups
    at = (tile * groups + group).to(gl.int64)
    words_at = words_ptr + at * (32 * BITS) + lane
    words = ()
    for plane in gl.static_range(BITS // 2):
        words = words + (
            gl.load(words_at + 64 * plane, mask=mask, other=0),
            gl.load(words_at + (64 * plane + 32), mask=mask, other=0),
        )
    scales_at = scales_ptr + at * 16 + lane // 4
    upper = gl.load(scales_at, mask=mask, other=0.0).to(gl.float32)
    lower = gl.load(scales_at + 8, mask=mask, other=0.0).to(gl.float32)
    return words, upper, lower


@gluon.jit
def add_operands(
    acc, weights, x_ptr, x_scales_ptr, x_sums_ptr, rows, first, group, lane, groups,
    BLOCKS: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """acc, four numbers a lane for every eight rows, plus the product of each group [SEGMENTS, 1]."""
    added = ()
    for i in gl.static_range(BLOCKS):
        sums = multiply_group(weights[0], x_ptr, rows, first + 8 * i, group, lane, groups, BITS)
        added = added + (
            scale_sums(acc[i], sums, weights[1], weights[2], x_scales_ptr, x_sums_ptr, rows, first + 8 * i, group,
                       lane, groups, BITS),
        )  # fmt: skip
    return added


@gluon.jit
def multiply_group(words, x_ptr, rows, first, group, lane, groups, BITS: gl.constexpr):
    """Exact sums of outputs lane / 4 (two) and lane / 4 + 8 (two) with rows 2 (lane % 4) and 1 more."""
    row = first + lane // 4
    mask = (group < groups) & (row < rows)
    x_at = x_ptr + (row * groups + group) * 16 + lane % 4
    sums = (group * 0 + lane * 0, group * 0 + lane * 0, group * 0 + lane * 0, group * 0 + lane * 0)
    for half in gl.static_range(2):
        low = gl.load(x_at + 8 * half, mask=mask, other=0)
        high = gl.load(x_at + (8 * half + 4), mask=mask, other=0)
        if BITS == 4:
            one, other = words[2 * half], words[2 * half + 1]
            planes = (one & 0x0F0F0F0F, other & 0x0F0F0F0F, (one >> 4) & 0x0F0F0F0F, (other >> 4) & 0x0F0F0F0F)
        else:
            planes = (words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3])
        sums = multiply_bytes(planes, low, high, sums)
    return sums


@gluon.jit
def multiply_bytes(planes, low, high, sums):
    """sums + 16 outputs times 8 rows over 32 columns, by the registers of one matrix instruction."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [planes[0], planes[1], planes[2], planes[3], low, high, sums[0], sums[1], sums[2], sums[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def scale_sums(acc, sums, upper, lower, x_scales_ptr, x_sums_ptr, rows, first, group, lane, groups, BITS: gl.constexpr):
    row = first + 2 * (lane % 4)
    at = row * groups + group
    mask = (group < groups) & (row < rows)
    next_mask = (group < groups) & (row + 1 < rows)
    even = gl.load(x_scales_ptr + at, mask=mask, other=0.0)
    odd = gl.load(x_scales_ptr + at + groups, mask=next_mask, other=0.0)
    a, b, c, d = sums[0], sums[1], sums[2], sums[3]
    if BITS == 4:
        # codes of 4 bits count eight too much each
        even_offset = 8 * gl.load(x_sums_ptr + at, mask=mask, other=0)
        odd_offset = 8 * gl.load(x_sums_ptr + at + groups, mask=next_mask, other=0)
        a, b, c, d = a - even_offset, b - odd_offset, c - even_offset, d - odd_offset
    return (
        gl.fma(a.to(gl.float32), upper * even, acc[0]), gl.fma(b.to(gl.float32), upper * odd, acc[1]),
        gl.fma(c.to(gl.float32), lower * even, acc[2]), gl.fma(d.to(gl.float32), lower * odd, acc[3]),
    )  # fmt: skip


@gluon.jit
def store_block(
    acc, residual_ptr, y_ptr, rows, outputs, first_column, columns, tile, first,
    SEGMENTS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Folds segments and writes 16 outputs of 8 rows."""
    # every thread gets all segments of its numbers
    WHOLE: gl.constexpr = gl.BlockedLayout([SEGMENTS, 1], [1, 32], [1, SEGMENTS // 2], [0, 1])
    NUMBERS: gl.constexpr = gl.BlockedLayout([1], [32], [SEGMENTS // 2], [0])
    together = gl.join(gl.join(acc[0], acc[1]), gl.join(acc[2], acc[3]))
    folded = gl.convert_layout(gl.reshape(together, [SEGMENTS, 128]), WHOLE)
    if SEGMENTS == 16:
        folded = halve_segments(folded, 8)
    folded = halve_segments(halve_segments(halve_segments(folded, 4), 2), 1)
    y = gl.convert_layout(gl.reshape(folded, [128]), NUMBERS)
    # number 4 lane + 2 (odd row) + (lower output)
    number = gl.arange(0, 128, layout=NUMBERS)
    column = tile * 16 + number // 16 + 8 * (number % 2)
    row = first + 2 * ((number // 4) % 4) + (number // 2) % 2
    at = row.to(gl.int64) * outputs + first_column + column
    mask = (row < rows) & (column < columns)
    if HAS_RESIDUAL:
        y += gl.load(residual_ptr + at, mask=mask, other=0.0).to(gl.float32)
    gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def halve_segments(acc, HALF: gl.constexpr):
    first, second = gl.split(gl.permute(gl.reshape(acc, [2, HALF, 128]), [1, 2, 0]))
    return first + second
