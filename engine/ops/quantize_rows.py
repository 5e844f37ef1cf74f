"""Activations in 8 bits with a scale per 64, plain or behind the operation that makes them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.quantized_dot import has_dependent_launch, launch_options
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


def quantize_silu_mul_reference(x: torch.Tensor) -> QuantizedRows:
    gate, up = _wide(x).chunk(2, dim=-1)
    return quantize_rows_reference(torch.nn.functional.silu(gate) * up)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def quantize_rows_triton(x: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, x, x.shape[1], is_swiglu=False)


def quantize_silu_mul_triton(x: torch.Tensor) -> QuantizedRows:
    return _launch_rows(x, x[:, x.shape[1] // 2 :], x.shape[1] // 2, is_swiglu=True)


def _launch_rows(x: torch.Tensor, other: torch.Tensor, columns: int, *, is_swiglu: bool) -> QuantizedRows:
    assert x.stride(1) == 1 and other.stride(1) == 1
    rows = empty_rows(len(x), columns, x.device)
    groups = columns // GROUP
    block = min(8, triton.next_power_of_2(groups))
    quantize_rows_kernel[(len(x), triton.cdiv(groups, block))](
        x, other, rows.values, rows.scales, rows.sums, x.stride(0), other.stride(0), groups,
        IS_SWIGLU=is_swiglu, BLOCK=block, PDL=has_dependent_launch(x.device), **launch_options(x.device, 4),
    )  # fmt: skip
    return rows


def empty_rows(rows: int, columns: int, device: torch.device) -> QuantizedRows:
    assert columns % GROUP == 0
    groups = columns // GROUP
    return QuantizedRows(
        torch.empty(rows, columns, dtype=torch.int8, device=device),
        torch.empty(rows, groups, dtype=torch.float32, device=device),
        torch.empty(rows, groups, dtype=torch.int32, device=device),
    )


@triton.jit
def store_rounded(wide, values_ptr, scales_ptr, sums_ptr, row, first, groups, BLOCK: tl.constexpr):
    """Rounds wide [BLOCK, 64], the groups of a row from `first` on."""
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
    tl.store(scales_ptr + at, tl.div_rn(largest, top), mask=mask)
    tl.store(sums_ptr + at, tl.sum(rounded.to(tl.int32), axis=1), mask=mask)


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
