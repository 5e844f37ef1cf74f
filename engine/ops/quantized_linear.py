"""Products of 8-bit activations with quantised matrices."""

# ruff: noqa: RUF005 - kernels have no starred expressions

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, has_dependent_launch, is_interpreted, launch_options
from engine.ops.quantize_rows import QuantizedRows
from engine.ops.quantized_dot import (
    activations_at,
    add_group,
    add_groups_reference,
    ahead,
    fold,
    group_sums_reference,
    groups_of,
    load_activations,
    load_weights,
    num_iterations,
    num_segments,
    scales_at,
    words_at,
)
from engine.ops.quantized_linear_rows import linear_rows_triton
from engine.ops.quantized_weight import QuantizedWeight, unpack

# more take matrix instructions, which cost the same for one and for eight
_FEW_ROWS = 2


def quantized_linear(
    x: QuantizedRows,
    weights: Sequence[QuantizedWeight],
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = W x (+ residual), x and W as the numbers they stand for

    weights   one matrix, or two of other bits that stand one above the other
    residual  [rows, outputs]
    return    [rows, outputs]  of dtype; sums of a group are exact, groups are added in the order of quantized_dot,
              in at least fp32, so that the bits of a row do not depend on the rows beside it
    """
    if x.values.is_cuda:
        return quantized_linear_triton(x, weights, dtype, residual)
    return quantized_linear_reference(x, weights, dtype, residual)


def quantized_linear_reference(
    x: QuantizedRows,
    weights: Sequence[QuantizedWeight],
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    y = torch.cat([_one_reference(x, weight) for weight in weights], dim=-1)
    return (y if residual is None else y + residual.to(y.dtype)).to(dtype)


def _one_reference(x: QuantizedRows, weight: QuantizedWeight) -> torch.Tensor:
    codes, scales = unpack(weight)
    rows, groups = x.scales.shape
    sums = group_sums_reference(x.values.view(rows, groups, -1), codes)
    factors = x.scales.T.unsqueeze(2) * scales.to(x.scales.dtype).T.unsqueeze(1)
    return add_groups_reference([(sums, factors)], num_segments(groups))


def quantized_linear_triton(
    x: QuantizedRows,
    weights: Sequence[QuantizedWeight],
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    segments: int | None = None,
    is_few: bool | None = None,
) -> torch.Tensor:
    """segments, is_few  only for measurements: another order, and the kernel for few rows or that for more"""
    assert len(weights) <= 2 and all(weight.columns == x.values.shape[1] for weight in weights)
    assert residual is None or residual.is_contiguous()
    outputs = sum(weight.rows for weight in weights)
    y = torch.empty(len(x.values), outputs, dtype=dtype, device=x.values.device)
    segments = segments or num_segments(groups_of(weights[0].columns))
    # the interpreter has no matrix instructions
    if is_interpreted() or (len(y) <= _FEW_ROWS if is_few is None else is_few):
        _launch_few_rows(x, weights, y, residual, segments)
    else:
        linear_rows_triton(x, weights, y, residual, segments)
    return y


def _launch_few_rows(
    x: QuantizedRows,
    weights: Sequence[QuantizedWeight],
    y: torch.Tensor,
    residual: torch.Tensor | None,
    segments: int,
) -> None:
    first, last = weights[0], weights[-1]
    constants = constants_of(len(y), weights, segments)
    programs = sum(cdiv(weight.words.shape[0], constants["TILES"]) for weight in weights)
    linear_few_rows_kernel[(programs, cdiv(len(y), constants["ROWS"]))](
        x.values.view(torch.int32), x.scales, first.words, first.scales, last.words, last.scales,
        y if residual is None else residual, y, len(y), y.shape[1], first.rows, groups_of(first.columns),
        first.words.shape[0], last.words.shape[0], HAS_RESIDUAL=residual is not None,
        PDL=has_dependent_launch(y.device), INTERPRETED=is_interpreted(), **constants,
        **launch_options(y.device, segments // 2, registers_of(constants)),
    )  # fmt: skip


def constants_of(rows: int, weights: Sequence[QuantizedWeight], segments: int) -> dict[str, int | bool]:
    groups = groups_of(weights[0].columns)
    iterations = num_iterations(groups, segments)
    num_rows = min(_FEW_ROWS, rows)
    # code grows with rows and iterations: with more rows fewer are taken at a time
    most = 24 if num_rows == 1 else 16
    return {
        "ROWS": num_rows,
        # a program of two tiles reads its activations once; of many segments a tile keeps a program busy alone
        "TILES": 2 if segments == 8 else 1,
        "BITS": weights[0].bits,
        "LAST_BITS": weights[-1].bits,
        "IS_PAIR": len(weights) == 2,
        "SEGMENTS": segments,
        "ITERATIONS": iterations,
        "AHEAD": ahead(iterations, most // weights[0].bits),
        "LAST_AHEAD": ahead(iterations, most // weights[-1].bits),
        "EVEN": groups % segments == 0,
    }


def registers_of(constants: dict[str, int | bool]) -> int:
    return 128 if constants["TILES"] == 1 and constants["AHEAD"] == constants["ITERATIONS"] else 168


@triton.jit
def linear_few_rows_kernel(
    x_ptr, x_scales_ptr, words_ptr, scales_ptr, last_words_ptr, last_scales_ptr, residual_ptr, y_ptr,
    rows, outputs, first_outputs, groups, first_tiles, last_tiles,
    ROWS: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, LAST_BITS: tl.constexpr, IS_PAIR: tl.constexpr,
    SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, AHEAD: tl.constexpr, LAST_AHEAD: tl.constexpr,
    EVEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0) * TILES
    after_first = tl.cdiv(first_tiles, TILES) * TILES
    if IS_PAIR:
        if tile >= after_first:
            linear_tiles(
                x_ptr, x_scales_ptr, last_words_ptr, last_scales_ptr, residual_ptr, y_ptr,
                rows, outputs, first_outputs, outputs - first_outputs, groups, tile - after_first, last_tiles,
                ROWS, TILES, LAST_BITS, SEGMENTS, ITERATIONS, LAST_AHEAD, EVEN, HAS_RESIDUAL, PDL, INTERPRETED,
            )  # fmt: skip
        else:
            linear_tiles(
                x_ptr, x_scales_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
                rows, outputs, 0, first_outputs, groups, tile, first_tiles,
                ROWS, TILES, BITS, SEGMENTS, ITERATIONS, AHEAD, EVEN, HAS_RESIDUAL, PDL, INTERPRETED,
            )  # fmt: skip
    else:
        linear_tiles(
            x_ptr, x_scales_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
            rows, outputs, 0, first_outputs, groups, tile, first_tiles,
            ROWS, TILES, BITS, SEGMENTS, ITERATIONS, AHEAD, EVEN, HAS_RESIDUAL, PDL, INTERPRETED,
        )  # fmt: skip


@triton.jit
def linear_tiles(
    x_ptr, x_scales_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
    rows, outputs, first_column, columns, groups, tile, tiles,
    ROWS: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr,
    AHEAD: tl.constexpr, EVEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """TILES tiles of a matrix whose outputs are the columns of y from first_column on."""
    segment = tl.arange(0, SEGMENTS)
    at = ()
    for j in tl.static_range(TILES):
        # one beyond the last is read as the last, and not written
        tile_group = tl.minimum(tile + j, tiles - 1) * groups + segment
        at = at + ((words_at(words_ptr, tile_group, BITS), scales_at(scales_ptr, tile_group)),)
    first = tl.program_id(1) * ROWS
    x_at = ()
    for r in tl.static_range(ROWS):
        row = tl.minimum(first + r, rows - 1)
        x_at = x_at + ((activations_at(x_ptr + row * groups * 16, segment), x_scales_ptr + row * groups + segment),)
    # as many weights as registers hold are read before the activations are there
    weights = load_all_weights(at, groups, BITS, SEGMENTS, AHEAD, TILES, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = ()
    added = ()
    for n in tl.static_range(ROWS * TILES):
        acc = acc + (tl.zeros([SEGMENTS, 16], tl.float32),)
        if HAS_RESIDUAL:
            y_at, mask = outputs_at(first + n // TILES, tile + n % TILES, rows, outputs, first_column, columns)
            added = added + (tl.load(residual_ptr + y_at, mask=mask, other=0.0),)
    if ITERATIONS == AHEAD:
        x = load_all_activations(x_at, groups, SEGMENTS, AHEAD, ROWS, EVEN)
        for i in tl.static_range(AHEAD):
            acc = add_iteration(acc, weights[i], x[i], ROWS, TILES, BITS, INTERPRETED)
    else:
        for start in tl.range(0, ITERATIONS, AHEAD, num_stages=1):
            left = groups - start * SEGMENTS
            x = load_all_activations(x_at, left, SEGMENTS, AHEAD, ROWS, EVEN and ITERATIONS % AHEAD == 0)
            x_at = advance(x_at, AHEAD * SEGMENTS * 16, AHEAD * SEGMENTS, ROWS)
            at = advance(at, AHEAD * SEGMENTS * 32 * BITS, AHEAD * SEGMENTS * 16, TILES)
            for i in tl.static_range(AHEAD):
                acc = add_iteration(acc, weights[i], x[i], ROWS, TILES, BITS, INTERPRETED)
            # groups beyond the last are masked
            weights = load_all_weights(at, left - AHEAD * SEGMENTS, BITS, SEGMENTS, AHEAD, TILES, False)
    for n in tl.static_range(ROWS * TILES):
        y = fold(acc[n], SEGMENTS, 16)
        if HAS_RESIDUAL:
            y += added[n].to(tl.float32)
        y_at, mask = outputs_at(first + n // TILES, tile + n % TILES, rows, outputs, first_column, columns)
        tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def outputs_at(row, tile, rows, outputs, first_column, columns):
    column = tile * 16 + tl.arange(0, 16)
    return row.to(tl.int64) * outputs + first_column + column, column < tl.where(row < rows, columns, 0)


@triton.jit
def advance(pairs, first: tl.constexpr, second: tl.constexpr, COUNT: tl.constexpr):
    """Both pointers of each pair moved on."""
    moved = ()
    for i in tl.static_range(COUNT):
        moved = moved + ((pairs[i][0] + first, pairs[i][1] + second),)
    return moved


@triton.jit
def load_all_weights(
    at, left, BITS: tl.constexpr, SEGMENTS: tl.constexpr, AHEAD: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr
):
    """The next AHEAD groups of every segment, of which `left` are there: by iteration, then by tile."""
    weights = ()
    for i in tl.static_range(AHEAD):
        mask = tl.arange(0, SEGMENTS) + i * SEGMENTS < left
        tiles = ()
        for j in tl.static_range(TILES):
            words = at[j][0] + i * (SEGMENTS * 32 * BITS)
            tiles = tiles + (load_weights(words, at[j][1] + i * (SEGMENTS * 16), mask, BITS, EVEN),)
        weights = weights + (tiles,)
    return weights


@triton.jit
def load_all_activations(
    x_at, left, SEGMENTS: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr
):
    """The same of the activations: by iteration, then by row."""
    x = ()
    for i in tl.static_range(AHEAD):
        mask = tl.arange(0, SEGMENTS) + i * SEGMENTS < left
        rows = ()
        for r in tl.static_range(ROWS):
            words = x_at[r][0] + i * (SEGMENTS * 16)
            rows = rows + (load_activations(words, x_at[r][1] + i * SEGMENTS, mask, EVEN),)
        x = x + (rows,)
    return x


@triton.jit
def add_iteration(
    acc, weights, x, ROWS: tl.constexpr, TILES: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """acc, [SEGMENTS, 16] for each row and tile, plus a group of every segment."""
    sums = ()
    for n in tl.static_range(ROWS * TILES):
        sums = sums + (add_group(acc[n], weights[n % TILES], x[n // TILES], 1.0, INTERPRETED, BITS),)
    return sums
