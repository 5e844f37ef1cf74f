"""Products of 8-bit activations with a quantised matrix."""

# ruff: noqa: RUF005 - kernels have no starred expressions

import torch
import triton
import triton.language as tl

from engine.ops.quantize_rows import QuantizedRows
from engine.ops.quantized_dot import (
    add_group,
    add_groups_reference,
    fold,
    group_sums_reference,
    groups_of,
    has_dependent_launch,
    is_interpreted,
    launch_options,
    load_scales,
    load_words,
    multiply_add,
    num_iterations,
    num_segments,
)
from engine.ops.quantized_weight import QuantizedWeight, unpack

_MAX_ROWS = 32


def quantized_linear(
    x: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """y = W x (+ residual), x and W as the numbers they stand for

    residual  [rows, outputs]
    return    [rows, outputs]  of dtype; sums of a group are exact, groups are added in the order of quantized_dot,
              in at least fp32, so that the bits of a row do not depend on the rows beside it
    """
    if x.values.is_cuda:
        return quantized_linear_triton(x, weight, dtype, residual)
    return quantized_linear_reference(x, weight, dtype, residual)


def quantized_linear_reference(
    x: QuantizedRows, weight: QuantizedWeight, dtype: torch.dtype, residual: torch.Tensor | None = None
) -> torch.Tensor:
    codes, scales = unpack(weight)
    rows, groups = x.scales.shape
    sums = group_sums_reference(x.values.view(rows, groups, -1), codes)
    factors = x.scales.T.unsqueeze(2) * scales.to(x.scales.dtype).T.unsqueeze(1)
    y = add_groups_reference([(sums, factors)], num_segments(groups))
    return (y if residual is None else y + residual.to(y.dtype)).to(dtype)


def quantized_linear_triton(
    x: QuantizedRows,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    segments: int | None = None,
    num_rows: int | None = None,
) -> torch.Tensor:
    """segments, num_rows  only for measurements: another order, and rows that a program takes (1, 2, 4, 8, 16, 32)"""
    y = torch.empty(len(x.values), weight.rows, dtype=dtype, device=x.values.device)
    for start in range(0, len(y), _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        rows = QuantizedRows(x.values[part], x.scales[part], x.sums[part])
        _launch(rows, weight, y[part], None if residual is None else residual[part], segments, num_rows)
    return y


def _launch(
    x: QuantizedRows,
    weight: QuantizedWeight,
    y: torch.Tensor,
    residual: torch.Tensor | None,
    segments: int | None,
    num_rows: int | None,
) -> None:
    assert residual is None or residual.is_contiguous()
    groups = groups_of(weight.columns)
    segments = segments or num_segments(groups)
    num_rows = num_rows or rows_of_program(len(y))
    is_few = num_rows <= 4
    kernel = linear_few_rows_kernel if is_few else linear_rows_kernel
    kernel[(weight.words.shape[0], triton.cdiv(len(y), num_rows))](
        x.values.view(torch.int32) if is_few else x.values, x.scales, x.sums,
        weight.words if is_few else weight.words.view(torch.int8), weight.scales,
        y if residual is None else residual, y, len(y), weight.rows, groups,
        ROWS=num_rows, BITS=weight.bits, SEGMENTS=segments, ITERATIONS=num_iterations(groups, segments), AHEAD=4,
        HAS_RESIDUAL=residual is not None, PDL=has_dependent_launch(y.device), INTERPRETED=is_interpreted(),
        **launch_options(y.device, segments // 2),
    )  # fmt: skip


def rows_of_program(rows: int) -> int:
    """Up to 4: dp4a on the ordinary cores; more: matrix instructions, which take 8, 16 or 32."""
    return triton.next_power_of_2(rows)


@triton.jit
def linear_few_rows_kernel(
    x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, residual_ptr, y_ptr, rows, outputs, groups,
    ROWS: tl.constexpr, BITS: tl.constexpr, SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    first = tl.program_id(1) * ROWS
    segment = tl.arange(0, SEGMENTS)
    # weights are read before the activations are there
    words = ()
    scales = ()
    for i in tl.static_range(min(AHEAD, ITERATIONS)):
        group = (segment + i * SEGMENTS)[:, None]
        words = words + (load_words(words_ptr, tile * groups + group, group < groups, BITS),)
        scales = scales + (load_scales(scales_ptr, tile * groups + group, group < groups),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros([SEGMENTS, 16], tl.float32),)
    for i in tl.static_range(ITERATIONS):
        if i + AHEAD < ITERATIONS:
            next_group = (segment + (i + AHEAD) * SEGMENTS)[:, None]
            words = words + (load_words(words_ptr, tile * groups + next_group, next_group < groups, BITS),)
            scales = scales + (load_scales(scales_ptr, tile * groups + next_group, next_group < groups),)
        group = segment + i * SEGMENTS
        added = ()
        for r in tl.static_range(ROWS):
            row = first + r
            mask = group < tl.where(row < rows, groups, 0)
            added = added + (
                add_group(
                    acc[r], words[i], scales[i], x_ptr + row * groups * 16, x_scales_ptr + row * groups,
                    x_sums_ptr + row * groups, group, mask, 1.0, INTERPRETED, BITS,
                ),
            )  # fmt: skip
        acc = added
    column = tile * 16 + tl.arange(0, 16)
    for r in tl.static_range(ROWS):
        y = fold(acc[r], SEGMENTS, 16)
        at = (first + r).to(tl.int64) * outputs + column
        mask = column < tl.where(first + r < rows, outputs, 0)
        if HAS_RESIDUAL:
            y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def linear_rows_kernel(
    x_ptr, x_scales_ptr, x_sums_ptr, bytes_ptr, scales_ptr, residual_ptr, y_ptr, rows, outputs, groups,
    ROWS: tl.constexpr, BITS: tl.constexpr, SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, AHEAD: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    segment = tl.arange(0, SEGMENTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tiles = ()
    scales = ()
    for i in tl.static_range(min(AHEAD, ITERATIONS)):
        group = segment + i * SEGMENTS
        tiles = tiles + (load_bytes(bytes_ptr, tile * groups + group, group < groups, BITS),)
        scales = scales + (load_scales(scales_ptr, (tile * groups + group)[:, None], (group < groups)[:, None]),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([SEGMENTS, 16, ROWS], tl.float32)
    for i in tl.static_range(ITERATIONS):
        if i + AHEAD < ITERATIONS:
            next_group = segment + (i + AHEAD) * SEGMENTS
            next_mask = next_group < groups
            tiles = tiles + (load_bytes(bytes_ptr, tile * groups + next_group, next_mask, BITS),)
            scales = scales + (load_scales(scales_ptr, (tile * groups + next_group)[:, None], next_mask[:, None]),)
        group = segment + i * SEGMENTS
        mask = (group < groups)[:, None] & (row < rows)[None, :]
        sums = dot_tile(tiles[i], x_ptr, row, group, groups, mask, INTERPRETED, BITS)
        at = row[None, :] * groups + group[:, None]
        if BITS == 4:
            sums -= 8 * tl.load(x_sums_ptr + at, mask=mask, other=0)[:, None, :]
        x_scales = tl.load(x_scales_ptr + at, mask=mask, other=0.0)
        acc = multiply_add(sums.to(tl.float32), scales[i][:, :, None] * x_scales[:, None, :], acc, INTERPRETED)
    y = tl.reshape(fold(tl.reshape(acc, [SEGMENTS, 16 * ROWS]), SEGMENTS, 16 * ROWS), [16, ROWS])
    column = tile * 16 + tl.arange(0, 16)[:, None]
    at = row[None, :].to(tl.int64) * outputs + column
    mask = (row < rows)[None, :] & (column < outputs)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_bytes(bytes_ptr, tile_groups, mask, BITS: tl.constexpr):
    """The 16 rows of a group for each of tile_groups [S]: [S, 16, 8 * BITS] int8."""
    byte = tl.arange(0, 8 * BITS)[None, None, :]
    row = tl.arange(0, 16)[None, :, None]
    at = bytes_ptr + tile_groups.to(tl.int64)[:, None, None] * (128 * BITS)
    return tl.load(at + (byte // 16) * 256 + row * 16 + byte % 16, mask=mask[:, None, None], other=0)


@triton.jit
def dot_tile(tile, x_ptr, row, group, groups, mask, INTERPRETED: tl.constexpr, BITS: tl.constexpr):
    """Sums over a group: tile [S, 16, 8 * BITS] times the activations of rows [R]: [S, 16, R] int32."""
    byte = tl.arange(0, 8 * BITS)[None, None, :]
    at = x_ptr + (row[None, :, None] * groups + group[:, None, None]) * 64
    if BITS == 4:
        at += (byte // 16) * 32 + byte % 16
        low = tl.load(at, mask=mask[:, :, None], other=0)
        high = tl.load(at + 16, mask=mask[:, :, None], other=0)
        sums = tl.dot(low_nibbles(tile, INTERPRETED), tl.permute(low, [0, 2, 1]), out_dtype=tl.int32)
        return tl.dot(high_nibbles(tile, INTERPRETED), tl.permute(high, [0, 2, 1]), sums, out_dtype=tl.int32)
    else:
        x = tl.load(at + byte, mask=mask[:, :, None], other=0)
        return tl.dot(tile, tl.permute(x, [0, 2, 1]), out_dtype=tl.int32)


@triton.jit
def low_nibbles(tile, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return tile & 15
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [tile], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def high_nibbles(tile, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        return (tile >> 4) & 15
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.u32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
            "=r,r", [tile], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
