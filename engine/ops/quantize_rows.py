"""Activations in 8 bits with a scale per 64, plain or behind the operation that makes them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, has_dependent_launch, launch_options, next_power_of_2
from engine.ops.quantized_dot import groups_of, load_where
from engine.ops.quantized_weight import GROUP


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """x[r, k] = values[r, k] * scales[r, k // 64]

    values  [rows, columns] int8
    scales  [rows, groups]  fp32
    sums    [rows, groups]  int32, of the values of a group
    """

    values: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """values = round(x * 127 / m), scale = m / 127, m the largest magnitude of the group; halves to even

    x  [rows, columns]  contiguous, columns a multiple of 64
    """
    if x.is_cuda:
        return quantize_rows_triton(x)
    return quantize_rows_reference(x)


def quantize_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    """The same of x / sqrt(mean(x**2) + eps) * weight, which is never rounded to another type on the way.

    weight  [columns] fp32
    """
    if x.is_cuda:
        return quantize_rms_norm_triton(x, weight, eps)
    return quantize_rms_norm_reference(x, weight, eps)


def quantize_silu_mul(x: torch.Tensor) -> QuantizedRows:
    """The same of silu(gate) * up.

    x  [rows, 2 * columns]  gate, then up
    """
    if x.is_cuda:
        return quantize_silu_mul_triton(x)
    return quantize_silu_mul_reference(x)


def quantize_rows_reference(x: torch.Tensor) -> QuantizedRows:
    wide = _wide(x).unflatten(-1, (-1, GROUP))
    largest = wide.abs().amax(-1)
    # a true division: 127 / largest would multiply by a rounded reciprocal
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    values = (wide * inverse.unsqueeze(-1)).round().to(torch.int8)
    return QuantizedRows(values.flatten(-2), largest / 127, values.sum(-1, dtype=torch.int32))


def quantize_rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    wide = _wide(x)
    rows = quantize_rows_reference(wide * weight.to(wide.dtype))
    return QuantizedRows(rows.values, rows.scales * inverse_rms_reference(wide, eps), rows.sums)


def inverse_rms_reference(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x**2) + eps) of each row.  return [rows, 1]"""
    return 1 / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps)


def quantize_silu_mul_reference(x: torch.Tensor) -> QuantizedRows:
    gate, up = _wide(x).chunk(2, dim=-1)
    return quantize_rows_reference(torch.nn.functional.silu(gate) * up)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def quantize_rows_triton(x: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, x, x.shape[1], is_swiglu=False)


def quantize_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    assert x.is_contiguous() and weight.is_contiguous()
    rows, groups = empty_rows(len(x), x.shape[1], x.device), groups_of(x.shape[1])
    quantize_rms_norm_kernel[(len(x),)](
        x, weight, rows.values, rows.scales, rows.sums, x.shape[1], eps,
        BLOCK=next_power_of_2(groups), EVEN=groups == next_power_of_2(groups),
        PDL=has_dependent_launch(x.device), **launch_options(x.device, 8, 128),
    )  # fmt: skip
    return rows


def quantize_silu_mul_triton(x: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, x[:, x.shape[1] // 2 :], x.shape[1] // 2, is_swiglu=True)


def _launch_rows(x: torch.Tensor, other: torch.Tensor, columns: int, *, is_swiglu: bool) -> QuantizedRows:
    assert x.stride(1) == 1 and other.stride(1) == 1
    rows = empty_rows(len(x), columns, x.device)
    groups = columns // GROUP
    block = min(8, next_power_of_2(groups))
    quantize_rows_kernel[(len(x), cdiv(groups, block))](
        x, other, rows.values, rows.scales, rows.sums, x.stride(0), other.stride(0), groups,
        IS_SWIGLU=is_swiglu, BLOCK=block, PDL=has_dependent_launch(x.device), **launch_options(x.device, 4),
    )  # fmt: skip
    return rows


def empty_rows(rows: int, columns: int, device: torch.device) -> QuantizedRows:
    groups = groups_of(columns)
    return QuantizedRows(
        torch.empty(rows, columns, dtype=torch.int8, device=device),
        torch.empty(rows, groups, dtype=torch.float32, device=device),
        torch.empty(rows, groups, dtype=torch.int32, device=device),
    )


@triton.jit
def round_groups(wide):
    """wide [groups, 64]  ->  numbers from -127 to 127 [groups, 64] and scales [groups], all fp32"""
    largest = tl.max(tl.abs(wide), axis=1)
    top = tl.zeros_like(largest) + 127.0
    inverse = tl.where(largest > 0, tl.div_rn(top, tl.where(largest > 0, largest, 1.0)), 0.0)
    # adding and taking away 1.5 * 2**23 rounds to an integer, halves to even
    return (wide * inverse[:, None] + 12582912.0) - 12582912.0, tl.div_rn(largest, top)


@triton.jit
def store_rounded(wide, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK: tl.constexpr):
    """Rounds wide [BLOCK, 64], the groups of a row from `first` on."""
    rounded, scales = round_groups(wide)
    store_groups(rounded, scales, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK)


@triton.jit
def store_groups(rounded, scales, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK: tl.constexpr):
    group = first + tl.arange(0, BLOCK)
    mask = group < groups
    at = row.to(tl.int64) * groups + group
    element = tl.arange(0, 64)[None, :]
    tl.store(values_ptr + at[:, None] * 64 + element, rounded.to(tl.int8), mask=mask[:, None])
    tl.store(scales_ptr + at, scales, mask=mask)
    tl.store(sums_ptr + at, tl.sum(rounded.to(tl.int32), axis=1), mask=mask)


@triton.jit
def inverse_rms(x, width, eps):
    """1 / sqrt(mean(x**2) + eps) of one row x [groups, 64] fp32, zeros beyond its width."""
    total = tl.sum(tl.sum(x * x, axis=1), axis=0)
    return tl.rsqrt(total / width.to(tl.float32) + eps)


@triton.jit
def quantize_rms_norm_kernel(
    x_ptr, weight_ptr, values_ptr, scales_ptr, sums_ptr, width, eps,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * width
    round_normed(x_ptr, weight_ptr, values_ptr, scales_ptr, sums_ptr, row, width, eps, BLOCK, EVEN, PDL)


@triton.jit
def round_normed(
    x_ptr, weight_ptr, values_ptr, scales_ptr, sums_ptr, row, width, eps,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rounds a whole row, at x_ptr, of BLOCK groups at most. EVEN: just so many"""
    at = tl.arange(0, BLOCK)[:, None] * 64 + tl.arange(0, 64)[None, :]
    weight = load_where(weight_ptr + at, at < width, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = load_where(x_ptr + at, at < width, EVEN).to(tl.float32)
    rounded, scales = round_groups(x * weight)
    scales *= inverse_rms(x, width, eps)
    store_groups(rounded, scales, values_ptr, scales_ptr, sums_ptr, row, 0, width // 64, BLOCK)


@triton.jit
def quantize_rows_kernel(
    x_ptr, other_ptr, values_ptr, scales_ptr, sums_ptr, x_stride, other_stride, groups,
    IS_SWIGLU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    group = first + tl.arange(0, BLOCK)[:, None]
    at = group * 64 + tl.arange(0, 64)[None, :]
    mask = group < groups
    wide = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    if IS_SWIGLU:
        other = tl.load(other_ptr + row.to(tl.int64) * other_stride + at, mask=mask, other=0.0).to(tl.float32)
        wide = wide * tl.sigmoid(wide) * other
    store_rounded(wide, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK)
