"""Activations in 8 bits with a scale per 64, plain or behind the operation that makes them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.quantized_dot import has_dependent_launch, launch_options
from engine.ops.quantized_weight import GROUP

_PLAIN, _SILU_MUL, _SIGMOID_MUL = 0, 1, 2


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
    """The same of x / sqrt(mean(x**2) + eps) * weight; the values are those of x * weight, which has the same ratios.

    x       [rows, columns]
    weight  [columns]
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


def quantize_sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> QuantizedRows:
    """The same of x * sigmoid(gate).

    x, gate  [rows, columns]
    """
    if x.is_cuda:
        return quantize_sigmoid_mul_triton(x, gate)
    return quantize_sigmoid_mul_reference(x, gate)


def quantize_rows_reference(x: torch.Tensor) -> QuantizedRows:
    wide = _wide(x).unflatten(-1, (-1, GROUP))
    largest = wide.abs().amax(-1)
    # a true division: 127 / largest would multiply by a rounded reciprocal
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    values = (wide * inverse.unsqueeze(-1)).round().to(torch.int8)
    return QuantizedRows(values.flatten(-2), largest / 127, values.sum(-1, dtype=torch.int32))


def quantize_rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    wide = _wide(x)
    plain = quantize_rows_reference(wide * weight.to(wide.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return QuantizedRows(plain.values, plain.scales * scale, plain.sums)


def quantize_silu_mul_reference(x: torch.Tensor) -> QuantizedRows:
    gate, up = _wide(x).chunk(2, dim=-1)
    return quantize_rows_reference(torch.nn.functional.silu(gate) * up)


def quantize_sigmoid_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> QuantizedRows:
    return quantize_rows_reference(_wide(x) * torch.sigmoid(_wide(gate)))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def quantize_rows_triton(x: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, x, x.shape[1], _PLAIN)


def quantize_silu_mul_triton(x: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, x[:, x.shape[1] // 2 :], x.shape[1] // 2, _SILU_MUL)


def quantize_sigmoid_mul_triton(x: torch.Tensor, gate: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, gate, x.shape[1], _SIGMOID_MUL)


def _launch_rows(x: torch.Tensor, other: torch.Tensor, columns: int, operation: int) -> QuantizedRows:
    assert x.stride(1) == 1 and other.stride(1) == 1
    rows = _empty_rows(len(x), columns, x.device)
    groups = columns // GROUP
    block = min(8, triton.next_power_of_2(groups))
    quantize_rows_kernel[(len(x), triton.cdiv(groups, block))](
        x, other, rows.values, rows.scales, rows.sums, x.stride(0), other.stride(0), groups,
        OPERATION=operation, BLOCK=block, PDL=has_dependent_launch(x.device), **launch_options(x.device, 4),
    )  # fmt: skip
    return rows


def quantize_rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> QuantizedRows:
    assert x.stride(1) == 1 and weight.is_contiguous()
    rows = _empty_rows(*x.shape, x.device)
    groups = x.shape[1] // GROUP
    block = triton.next_power_of_2(groups)
    quantize_rms_norm_kernel[(len(x),)](
        x, weight, rows.values, rows.scales, rows.sums, x.stride(0), groups, eps,
        BLOCK=block, PDL=has_dependent_launch(x.device), **launch_options(x.device, 8),
    )  # fmt: skip
    return rows


def _empty_rows(rows: int, columns: int, device: torch.device) -> QuantizedRows:
    assert columns % GROUP == 0
    groups = columns // GROUP
    return QuantizedRows(
        torch.empty(rows, columns, dtype=torch.int8, device=device),
        torch.empty(rows, groups, dtype=torch.float32, device=device),
        torch.empty(rows, groups, dtype=torch.int32, device=device),
    )


@triton.jit
def store_rounded(wide, factor, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK: tl.constexpr):
    """Rounds wide [BLOCK, 64], the groups of a row from `first` on; scales are multiplied by factor."""
    group = first + tl.arange(0, BLOCK)
    mask = group < groups
    largest = tl.max(tl.abs(wide), axis=1)
    top = tl.zeros_like(largest) + 127.0
    inverse = tl.where(largest > 0, tl.div_rn(top, tl.where(largest > 0, largest, 1.0)), 0.0)
    # adding and taking away 1.5 * 2**23 rounds to an integer, halves to even
    rounded = (wide * inverse[:, None] + 12582912.0) - 12582912.0
    at = row.to(tl.int64) * groups + group
    element = tl.arange(0, 64)[None, :]
    tl.store(values_ptr + at[:, None] * 64 + element, rounded.to(tl.int8), mask=mask[:, None])
    tl.store(scales_ptr + at, tl.div_rn(largest, top) * factor, mask=mask)
    tl.store(sums_ptr + at, tl.sum(rounded.to(tl.int32), axis=1), mask=mask)


@triton.jit
def quantize_rows_kernel(
    x_ptr, other_ptr, values_ptr, scales_ptr, sums_ptr, x_stride, other_stride, groups,
    OPERATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    if OPERATION != 0:
        other = tl.load(other_ptr + row.to(tl.int64) * other_stride + at, mask=mask, other=0.0).to(tl.float32)
        wide = wide * tl.sigmoid(wide) * other if OPERATION == 1 else wide * tl.sigmoid(other)
    store_rounded(wide, 1.0, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK)


@triton.jit
def quantize_rms_norm_kernel(
    x_ptr, weight_ptr, values_ptr, scales_ptr, sums_ptr, x_stride, groups, eps,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = tl.arange(0, BLOCK)[:, None]
    at = group * 64 + tl.arange(0, 64)[None, :]
    mask = group < groups
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x_ptr + row.to(tl.int64) * x_stride + at, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / (groups * 64) + eps)
    store_rounded(wide * weight, factor, values_ptr, scales_ptr, sums_ptr, row, 0, groups, BLOCK)
