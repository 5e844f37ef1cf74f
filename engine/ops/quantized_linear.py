"""Products of 8-bit activations with quantised matrices."""

# ruff: noqa: RUF005 - kernels have no starred expressions

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.quantize_rows import QuantizedRows
from engine.ops.quantized_dot import (
    add_group,
    add_groups_reference,
    ahead,
    fold,
    group_sums_reference,
    groups_of,
    has_dependent_launch,
    is_interpreted,
    launch_options,
    load_scales,
    load_words,
    num_iterations,
    num_segments,
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
    groups = groups_of(first.columns)
    iterations = num_iterations(groups, segments)
    tiles = sum(weight.words.shape[0] for weight in weights)
    num_rows = min(_FEW_ROWS, len(y))
    # code grows with rows and iterations: with more rows fewer are taken at a time
    most = 24 if num_rows == 1 else 16
    linear_few_rows_kernel[(tiles, triton.cdiv(len(y), num_rows))](
        x.values.view(torch.int32), x.scales, x.sums, first.words, first.scales, last.words, last.scales,
        y if residual is None else residual, y, len(y), y.shape[1], first.rows, groups, first.words.shape[0],
        ROWS=num_rows, BITS=first.bits, LAST_BITS=last.bits, IS_PAIR=len(weights) == 2, SEGMENTS=segments,
        ITERATIONS=iterations, AHEAD=ahead(iterations, most // first.bits),
        LAST_AHEAD=ahead(iterations, most // last.bits), HAS_RESIDUAL=residual is not None,
        PDL=has_dependent_launch(y.device), INTERPRETED=is_interpreted(),
        **launch_options(y.device, segments // 2),
    )  # fmt: skip


@triton.jit
def linear_few_rows_kernel(
    x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, last_words_ptr, last_scales_ptr, residual_ptr, y_ptr,
    rows, outputs, first_outputs, groups, first_tiles,
    ROWS: tl.constexpr, BITS: tl.constexpr, LAST_BITS: tl.constexpr, IS_PAIR: tl.constexpr, SEGMENTS: tl.constexpr,
    ITERATIONS: tl.constexpr, AHEAD: tl.constexpr, LAST_AHEAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if IS_PAIR:
        if tile >= first_tiles:
            linear_tile(
                x_ptr, x_scales_ptr, x_sums_ptr, last_words_ptr, last_scales_ptr, residual_ptr, y_ptr,
                rows, outputs, first_outputs, outputs - first_outputs, groups, tile - first_tiles,
                ROWS, LAST_BITS, SEGMENTS, ITERATIONS, LAST_AHEAD, HAS_RESIDUAL, PDL, INTERPRETED,
            )  # fmt: skip
        else:
            linear_tile(
                x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
                rows, outputs, 0, first_outputs, groups, tile,
                ROWS, BITS, SEGMENTS, ITERATIONS, AHEAD, HAS_RESIDUAL, PDL, INTERPRETED,
            )  # fmt: skip
    else:
        linear_tile(
            x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
            rows, outputs, 0, first_outputs, groups, tile,
            ROWS, BITS, SEGMENTS, ITERATIONS, AHEAD, HAS_RESIDUAL, PDL, INTERPRETED,
        )  # fmt: skip


@triton.jit
def linear_tile(
    x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr,
    rows, outputs, first_column, columns, groups, tile,
    ROWS: tl.constexpr, BITS: tl.constexpr, SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile of a matrix whose outputs are the columns of y from first_column on."""
    # as many weights as registers hold are read before the activations are there
    words = ()
    scales = ()
    for i in tl.static_range(AHEAD):
        words = words + (load_iteration(words_ptr, tile, i, groups, BITS, SEGMENTS),)
        scales = scales + (load_iteration_scales(scales_ptr, tile, i, groups, SEGMENTS),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(1) * ROWS
    column = tile * 16 + tl.arange(0, 16)
    acc = ()
    added = ()
    for r in tl.static_range(ROWS):
        acc = acc + (tl.zeros([SEGMENTS, 16], tl.float32),)
        if HAS_RESIDUAL:
            at = (first + r).to(tl.int64) * outputs + first_column + column
            mask = column < tl.where(first + r < rows, columns, 0)
            added = added + (tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32),)
    if ITERATIONS == AHEAD:
        for i in tl.static_range(AHEAD):
            acc = add_iteration(
                acc, words[i], scales[i], x_ptr, x_scales_ptr, x_sums_ptr, rows, first, i, groups,
                ROWS, BITS, SEGMENTS, INTERPRETED,
            )  # fmt: skip
    else:
        for start in tl.range(0, ITERATIONS, AHEAD, num_stages=1):
            next_words = ()
            next_scales = ()
            for i in tl.static_range(AHEAD):
                acc = add_iteration(
                    acc, words[i], scales[i], x_ptr, x_scales_ptr, x_sums_ptr, rows, first, start + i, groups,
                    ROWS, BITS, SEGMENTS, INTERPRETED,
                )  # fmt: skip
                # groups beyond the last are masked
                after = start + AHEAD + i
                next_words = next_words + (load_iteration(words_ptr, tile, after, groups, BITS, SEGMENTS),)
                next_scales = next_scales + (load_iteration_scales(scales_ptr, tile, after, groups, SEGMENTS),)
            words = next_words
            scales = next_scales
    for r in tl.static_range(ROWS):
        y = fold(acc[r], SEGMENTS, 16)
        if HAS_RESIDUAL:
            y += added[r]
        at = (first + r).to(tl.int64) * outputs + first_column + column
        mask = column < tl.where(first + r < rows, columns, 0)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_iteration(
    acc, words, scales, x_ptr, x_scales_ptr, x_sums_ptr, rows, first, i, groups,
    ROWS: tl.constexpr, BITS: tl.constexpr, SEGMENTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """acc, [SEGMENTS, 16] for each row, plus the i-th group of every segment."""
    group = tl.arange(0, SEGMENTS) + i * SEGMENTS
    sums = ()
    for r in tl.static_range(ROWS):
        row = first + r
        mask = group < tl.where(row < rows, groups, 0)
        sums = sums + (
            add_group(
                acc[r], words, scales, x_ptr + row * groups * 16, x_scales_ptr + row * groups,
                x_sums_ptr + row * groups, group, mask, 1.0, INTERPRETED, BITS,
            ),
        )  # fmt: skip
    return sums


@triton.jit
def load_iteration(words_ptr, tile, i, groups, BITS: tl.constexpr, SEGMENTS: tl.constexpr):
    group = (tl.arange(0, SEGMENTS) + i * SEGMENTS)[:, None]
    return load_words(words_ptr, tile * groups + group, group < groups, BITS)


@triton.jit
def load_iteration_scales(scales_ptr, tile, i, groups, SEGMENTS: tl.constexpr):
    group = (tl.arange(0, SEGMENTS) + i * SEGMENTS)[:, None]
    return load_scales(scales_ptr, tile * groups + group, group < groups)
