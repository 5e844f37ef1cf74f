"""Products of many rows with a quantised matrix, whose weights become bf16 on the way to the matrix instructions."""

# Triton compiles plain branches
# ruff: noqa: SIM108

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.quantized_dot import groups_of, is_interpreted
from engine.ops.quantized_weight import TILE_ROWS, QuantizedWeight, dequantize_weight


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """How the kernel is cut; changes results by rounding alone.

    block_m  rows, block_n  outputs of one program
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def quantized_matmul(
    x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """y = x W^T (+ residual), for prompts: x is not rounded, unlike in quantized_linear

    x         [rows, columns] bf16
    residual  [rows, outputs]
    return    [rows, outputs]  of dtype; products of bf16, sums in fp32
    """
    if x.is_cuda:
        return quantized_matmul_triton(x, weight, dtype, residual)
    return quantized_matmul_reference(x, weight, dtype, residual)


def quantized_swiglu(x: torch.Tensor, gate_up: QuantizedWeight) -> torch.Tensor:
    """y = silu(gate x) * up x

    x        [rows, columns] bf16
    gate_up  [2 * width, columns]  gate above up, width a multiple of 16
    return   [rows, width]  dtype of x
    """
    if x.is_cuda:
        return quantized_swiglu_triton(x, gate_up)
    return quantized_swiglu_reference(x, gate_up)


def quantized_matmul_reference(
    x: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype, residual: torch.Tensor | None = None
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(wide), dequantize_weight(weight).to(wide))
    return (y if residual is None else y + residual.to(wide)).to(dtype)


def quantized_swiglu_reference(x: torch.Tensor, gate_up: QuantizedWeight) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = quantized_matmul_reference(x, gate_up, wide).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def quantized_matmul_triton(
    x: torch.Tensor,
    weight: QuantizedWeight,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    shape: MatmulShape | None = None,
) -> torch.Tensor:
    y = torch.empty(len(x), weight.rows, dtype=dtype, device=x.device)
    assert residual is None or residual.is_contiguous()
    launch_matmul(x, weight, y, shape or dense_shape(x.device, len(x)), residual=residual)
    return y


def quantized_swiglu_triton(
    x: torch.Tensor, gate_up: QuantizedWeight, shape: MatmulShape | None = None
) -> torch.Tensor:
    y = torch.empty(len(x), gate_up.rows // 2, dtype=x.dtype, device=x.device)
    launch_matmul(x, gate_up, y, shape or dense_shape(x.device, len(x)), is_swiglu=True)
    return y


def dense_shape(device: torch.device, rows: int) -> MatmulShape:
    capability = (0, 0) if is_interpreted() else torch.cuda.get_device_capability(device)
    return matmul_shape_for(capability, rows)


def matmul_shape_for(capability: tuple[int, int], rows: int) -> MatmulShape:
    """rows  that share a matrix, on average"""
    block_m = min(128, max(16, triton.next_power_of_2(rows)))
    has_wide_tiles = capability in ((9, 0), (10, 0))
    if block_m == 128 and not has_wide_tiles:
        block_m = 64
    return MatmulShape(block_m, 128, 8 if block_m == 128 else 4, 4 if has_wide_tiles else 3)


def launch_matmul(
    x: torch.Tensor,
    weight: QuantizedWeight,
    y: torch.Tensor,
    shape: MatmulShape,
    *,
    is_swiglu: bool = False,
    residual: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
    gathers: int = 0,
    scatters: bool = False,
) -> None:
    """Of one matrix, or of a stack of them with `blocks` [n, 3] int32: matrix, first row and end of its rows.

    order     [rows] int32  places of the rows that `blocks` speaks of
    gathers   row p reads x[order[p] // gathers]; 0: x[p]
    scatters  row p writes y[order[p]] and not y[p]
    """
    assert x.stride(1) == 1 and y.is_contiguous()
    outputs = weight.rows // 2 if is_swiglu else weight.rows
    assert not is_swiglu or outputs % TILE_ROWS == 0
    # gate and up stand beside each other in a program
    block_n = shape.block_n // 2 if is_swiglu else shape.block_n
    num_blocks = triton.cdiv(len(x), shape.block_m) if blocks is None else len(blocks)
    options = {} if is_interpreted() else {"num_warps": shape.num_warps}
    quantized_matmul_kernel[(triton.cdiv(outputs, block_n), num_blocks)](
        x, weight.words.view(torch.int8), weight.scales, y, y if residual is None else residual,
        x if order is None else order, x if blocks is None else blocks,
        x.stride(0), len(x), outputs, groups_of(weight.columns), weight.scales.shape[-3],
        BITS=weight.bits, BLOCK_M=shape.block_m, BLOCK_N=block_n, NUM_STAGES=shape.num_stages, IS_SWIGLU=is_swiglu,
        HAS_RESIDUAL=residual is not None, IS_GROUPED=blocks is not None, GATHERS=gathers, SCATTERS=scatters,
        INTERPRETED=is_interpreted(), **options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def quantized_matmul_kernel(
    x_ptr, bytes_ptr, scales_ptr, y_ptr, residual_ptr, order_ptr, blocks_ptr, x_stride, rows, outputs, groups, tiles,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    IS_SWIGLU: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GROUPED: tl.constexpr, GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The outputs of a tile stand as the rows of the product, so that the weights never leave the registers."""
    block = tl.program_id(1)
    if IS_GROUPED:
        matrix = tl.load(blocks_ptr + 3 * block)
        first = tl.load(blocks_ptr + 3 * block + 1)
        end = tl.load(blocks_ptr + 3 * block + 2)
    else:
        matrix = 0
        first = block * BLOCK_M
        end = rows
    if first < end:
        place = first + tl.arange(0, BLOCK_M)
        held = place < end
        if GATHERS > 0:
            source = tl.load(order_ptr + place, mask=held, other=0) // GATHERS
        else:
            source = tl.where(held, place, 0)
        x_rows = x_ptr + source.to(tl.int64) * x_stride
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows of the last tile beyond the matrix would belong to the next one
        known = tl.where(output < outputs, output, 0)
        tile = (matrix * tiles + known // 16).to(tl.int64)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if IS_SWIGLU:
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up_tile = tile + outputs // 16
        for group in tl.range(0, groups, num_stages=NUM_STAGES):
            low, high = load_x(x_rows, group, BITS)
            acc = add_product(
                acc, low, high, bytes_ptr, scales_ptr, tile * groups + group, known % 16, BITS, INTERPRETED
            )
            if IS_SWIGLU:
                up = add_product(
                    up, low, high, bytes_ptr, scales_ptr, up_tile * groups + group, known % 16, BITS, INTERPRETED
                )
        if IS_SWIGLU:
            acc = acc * tl.sigmoid(acc) * up
        if SCATTERS:
            target = tl.load(order_ptr + place, mask=held, other=0)
        else:
            target = place
        at = target.to(tl.int64)[:, None] * outputs + output[None, :]
        mask = held[:, None] & (output < outputs)[None, :]
        y = tl.trans(acc)
        if HAS_RESIDUAL:
            y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_x(x_rows, group, BITS: tl.constexpr):
    """The columns of a group in two halves [rows, 32]: for 4 bits those of the low and of the high nibbles."""
    k = tl.arange(0, 32)
    if BITS == 4:
        column = group * 64 + (k // 16) * 32 + k % 16
        low = tl.load(x_rows[:, None] + column[None, :])
        high = tl.load(x_rows[:, None] + column[None, :] + 16)
    else:
        low = tl.load(x_rows[:, None] + (group * 64 + k)[None, :])
        high = tl.load(x_rows[:, None] + (group * 64 + 32 + k)[None, :])
    return low, high


@triton.jit
def add_product(
    acc, x_low, x_high, bytes_ptr, scales_ptr, tile_group, row, BITS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """acc [outputs, rows] plus the product of one group.  tile_group, row  [outputs]"""
    byte = tl.arange(0, 32)
    scale = tl.load(scales_ptr + tile_group * 16 + row)
    at = bytes_ptr + (tile_group * (128 * BITS) + row * 16)[:, None] + ((byte // 16) * 256 + byte % 16)[None, :]
    if BITS == 4:
        pair = tl.load(at)
        low = (pair & 15) - 8
        high = ((pair >> 4) & 15) - 8
    else:
        low = tl.load(at)
        high = tl.load(at + 512)
    acc = multiply(low, scale, x_low, acc, INTERPRETED)
    return multiply(high, scale, x_high, acc, INTERPRETED)


@triton.jit
def multiply(codes, scale, x, acc, INTERPRETED: tl.constexpr):
    """acc + (codes * scale) xT, the weights rounded to the type of x"""
    weights = (codes.to(tl.float32) * scale.to(tl.float32)[:, None]).to(x.dtype)
    # the interpreter multiplies bf16 wrongly
    if INTERPRETED:
        return tl.dot(weights.to(tl.float32), tl.trans(x).to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weights, tl.trans(x), acc)
