"""Products of many rows with a quantised matrix, whose weights become bf16 on the way to the matrix instructions."""

# Triton compiles plain branches
# ruff: noqa: SIM108

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.dequantized_matmul import dequantized_matmul_triton, is_worth_dequantizing
from engine.ops.halved import halved, halved_column
from engine.ops.launch import capability_of, cdiv, is_interpreted, plain_options
from engine.ops.quantized_dot import groups_of
from engine.ops.quantized_weight import TILE_ROWS, QuantizedWeight, dequantize_weight

# programs that leave much of a card idle
FEW_PROGRAMS = 100


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """How the kernel is cut; changes results by rounding alone.

    block_m  rows, block_n  rows of the matrix of one program
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def quantized_matmul(
    x: torch.Tensor,
    weights: Sequence[QuantizedWeight],
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x W^T (+ residual), for prompts: x is not rounded, unlike in quantized_linear

    x         [rows, columns] bf16
    weights   matrices that stand one above the other
    residual  [rows, outputs]
    ordered   halved(x), where the caller has it; all that is read where every matrix is in 4 bits
    return    [rows, outputs]  of dtype; products of bf16, sums in fp32
    """
    if x.is_cuda:
        return quantized_matmul_triton(x, weights, dtype, residual, ordered)
    return quantized_matmul_reference(x, weights, dtype, residual, ordered)


def quantized_mlp(
    x: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = (silu(gate x) * up x) down^T (+ residual), what stands between the products in the type of x

    x         [rows, columns] bf16
    gate_up   [2 * width, columns]  gate above up, width a multiple of 64
    down      [outputs, width]
    residual  [rows, outputs]
    ordered   halved(x), where the caller has it
    return    [rows, outputs]  of dtype
    """
    if x.is_cuda:
        return quantized_mlp_triton(x, gate_up, down, dtype, residual, ordered)
    return quantized_mlp_reference(x, gate_up, down, dtype, residual)


def quantized_matmul_reference(
    x: torch.Tensor,
    weights: Sequence[QuantizedWeight],
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x if ordered is None else halved(ordered)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.linear(x.to(wide), torch.cat([dequantize_weight(weight) for weight in weights]).to(wide))
    return (y if residual is None else y + residual.to(wide)).to(dtype)


def quantized_mlp_reference(
    x: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    gate, up = quantized_matmul_reference(x, [gate_up], torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return quantized_matmul_reference((F.silu(gate) * up).to(x.dtype), [down], dtype, residual)


def quantized_matmul_triton(
    x: torch.Tensor,
    weights: Sequence[QuantizedWeight],
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
    shape: MatmulShape | None = None,
) -> torch.Tensor:
    y = torch.empty(x.shape[0], sum(weight.rows for weight in weights), dtype=dtype, device=x.device)
    first = 0
    for weight in weights:
        part = y[:, first : first + weight.rows]
        _multiply(in_order_of(weight, x, ordered), weight, part, shape, residual=residual)
        first += weight.rows
    return y


def _multiply(
    x: torch.Tensor,
    weight: QuantizedWeight,
    y: torch.Tensor,
    shape: MatmulShape | None = None,
    *,
    residual: torch.Tensor | None = None,
    is_swiglu: bool = False,
    halves_output: bool = False,
) -> None:
    """launch_matmul of one matrix, or what takes its place where there are very many rows."""
    options = {"residual": residual, "is_swiglu": is_swiglu, "halves_output": halves_output}
    # where the memory unit copies tiles, rows begin at multiples of 16 bytes
    rows = x.shape[0]
    if shape is None and is_worth_dequantizing(x.device, rows) and x.stride(0) % 8 == 0:
        dequantized_matmul_triton(x, weight, y, **options)
    else:
        chosen = shape or shape_of(x.device, rows, is_paired=is_swiglu, outputs=weight.rows)
        launch_matmul(x, weight, y, chosen, **options)


def quantized_mlp_triton(
    x: torch.Tensor,
    gate_up: QuantizedWeight,
    down: QuantizedWeight,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    """ordered  halved(x), where the caller has it"""
    inner = torch.empty(x.shape[0], gate_up.rows // 2, dtype=x.dtype, device=x.device)
    # written as the second product reads it
    x = in_order_of(gate_up, x, ordered)
    _multiply(x, gate_up, inner, is_swiglu=True, halves_output=down.bits == 4)
    y = torch.empty(x.shape[0], down.rows, dtype=dtype, device=x.device)
    _multiply(inner, down, y, residual=residual)
    return y


def shape_of(device: torch.device, rows: int, *, is_paired: bool = False, outputs: int | None = None) -> MatmulShape:
    return matmul_shape_for(capability_of(device), rows, is_paired, outputs)


def down_shape_of(device: torch.device, rows: int) -> MatmulShape:
    return down_shape_for(capability_of(device), rows)


def matmul_shape_for(
    capability: tuple[int, int], rows: int, is_paired: bool, outputs: int | None = None
) -> MatmulShape:
    """As measured on an H200.

    outputs    rows of the matrix, where there is one: its programs alone fill the card
    rows       that share a matrix, on average
    is_paired  gates beside ups, where experts' last block of rows is seldom full
    """
    shape = _widest_shape(capability, rows, is_paired)
    if outputs is None or cdiv(rows, shape.block_m) * cdiv(outputs, shape.block_n) >= FEW_PROGRAMS:
        return shape
    return MatmulShape(64, 64, 4, 4)


def _widest_shape(capability: tuple[int, int], rows: int, is_paired: bool) -> MatmulShape:
    # few shapes, because each is compiled
    if is_paired and rows < 32:
        return MatmulShape(16, 128, 4, 3)
    if capability not in ((9, 0), (10, 0)):
        return MatmulShape(64, 128, 4, 3)
    if is_paired:
        return MatmulShape(128, 128, 8, 3) if rows >= 96 else MatmulShape(64, 128, 4, 3)
    return MatmulShape(64, 256, 4, 3) if rows < 128 else MatmulShape(128, 128, 8, 3)


def down_shape_for(capability: tuple[int, int], rows: int) -> MatmulShape:
    """Likewise of experts' second product, whose sums are short: wide, so that rows are written in long pieces."""
    shape = matmul_shape_for(capability, rows, is_paired=True)
    is_large = capability in ((9, 0), (10, 0)) and rows >= 32
    return MatmulShape(64, 256, 4, 3) if is_large else shape


def in_order_of(weight: QuantizedWeight, x: torch.Tensor, ordered: torch.Tensor | None = None) -> torch.Tensor:
    """The columns of x in the order in which the codes of a weight come out of its bytes.

    ordered  halved(x), if it is there already
    """
    if weight.bits != 4:
        return x
    return halved(x) if ordered is None else ordered


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
    halves_output: bool = False,
) -> None:
    """Of one matrix, or of a stack of them with `blocks` [n, 3] int32: matrix, first row and end of its rows.

    x         its columns as `in_order_of` has them
    y         its rows may lie apart where there is no residual
    order     [rows] int32  places of the rows that `blocks` speaks of
    gathers   row p reads x[order[p] // gathers]; 0: x[p]
    scatters  row p writes y[order[p]] and not y[p]
    halves_output  the columns of y stand as `halved` puts them
    """
    assert x.stride(1) == y.stride(1) == 1
    assert residual is None or (residual.is_contiguous() and y.is_contiguous())
    outputs = weight.rows // 2 if is_swiglu else weight.rows
    assert not is_swiglu or outputs % TILE_ROWS == 0
    # of a program, half of whose weights are gates and half ups
    block_n = shape.block_n // 2 if is_swiglu else shape.block_n
    # shape[0] throughout: torch's len() takes the host a microsecond
    rows = x.shape[0]
    num_blocks = cdiv(rows, shape.block_m) if blocks is None else blocks.shape[0]
    options = plain_options(shape.num_warps, is_fused=True)
    quantized_matmul_kernel[(cdiv(outputs, block_n), num_blocks)](
        x, weight.words.view(torch.int8), weight.scales, y, y if residual is None else residual,
        x if order is None else order, x if blocks is None else blocks,
        x.stride(0), y.stride(0), rows, outputs, groups_of(weight.columns), weight.scales.shape[-3],
        BITS=weight.bits, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, NUM_STAGES=shape.num_stages,
        IS_SWIGLU=is_swiglu, HAS_RESIDUAL=residual is not None, IS_GROUPED=blocks is not None, GATHERS=gathers,
        SCATTERS=scatters, HALVES_OUTPUT=halves_output, WAITS=capability_of(x.device)[0] == 9,
        INTERPRETED=is_interpreted(), **options,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def quantized_matmul_kernel(
    x_ptr, bytes_ptr, scales_ptr, y_ptr, residual_ptr, order_ptr, blocks_ptr, x_stride, y_stride, rows, outputs,
    groups, tiles,
    BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    IS_SWIGLU: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_GROUPED: tl.constexpr, GATHERS: tl.constexpr,
    SCATTERS: tl.constexpr, HALVES_OUTPUT: tl.constexpr, WAITS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if IS_GROUPED:
        matrix = tl.load(blocks_ptr + 3 * block)
        first = tl.load(blocks_ptr + 3 * block + 1)
        end = tl.load(blocks_ptr + 3 * block + 2)
    else:
        matrix = 0
        first = block * BLOCK_M
        end = rows
    # the outputs stand as the rows of the product, so that the weights go into it from registers
    if first < end:
        place = first + tl.arange(0, BLOCK_M)
        held = place < end
        if GATHERS > 0:
            source = tl.load(order_ptr + place, mask=held, other=0) // GATHERS
        else:
            source = tl.where(held, place, 0)
        x_rows = x_ptr + source.to(tl.int64) * x_stride
        lane = tl.arange(0, BLOCK_N)
        if IS_SWIGLU:
            # eight gates, then their ups: where matrix instructions leave results, a thread has both of an output
            output = tl.program_id(0) * (BLOCK_N // 2) + lane // 16 * 8 + lane % 8
            matrix_tile = matrix * tiles + lane % 16 // 8 * (outputs // 16)
        else:
            output = tl.program_id(0) * BLOCK_N + lane
            matrix_tile = matrix * tiles
        # rows of the last tile beyond the matrix would belong to the next one
        known = tl.where(output < outputs, output, 0)
        tile = (matrix_tile + known // 16).to(tl.int64)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for group in tl.range(0, groups, num_stages=NUM_STAGES):
            half = x_rows[:, None] + group * 64 + tl.arange(0, 32)[None, :]
            low, high = tl.load(half), tl.load(half + 32)
            acc = add_product(
                acc, low, high, bytes_ptr, scales_ptr, tile * groups + group, known % 16, BITS, INTERPRETED
            )
            if WAITS:
                acc = ended(acc)
        if IS_SWIGLU:
            pairs = tl.permute(tl.reshape(acc, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
            gate, up = tl.split(pairs)
            acc = tl.reshape(gate * tl.sigmoid(gate) * up, [BLOCK_N // 2, BLOCK_M])
            output = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        if SCATTERS:
            target = tl.load(order_ptr + place, mask=held, other=0)
        else:
            target = place
        column = output
        if HALVES_OUTPUT:
            column = halved_column(output)
        at = target.to(tl.int64)[:, None] * y_stride + column[None, :]
        mask = held[:, None] & (output < outputs)[None, :]
        acc = tl.trans(acc)
        if HAS_RESIDUAL:
            acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_product(
    acc, x_low, x_high, bytes_ptr, scales_ptr, tile_group, row, BITS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """acc [outputs, rows] plus the product of one group.  tile_group, row  [outputs]"""
    scale = tl.load(scales_ptr + tile_group * 16 + row)
    low, high = load_weights(bytes_ptr + (tile_group * (128 * BITS) + row * 16), scale, x_low.dtype, BITS)
    acc = multiply(low, x_low, acc, INTERPRETED)
    return multiply(high, x_high, acc, INTERPRETED)


@triton.jit
def ended(acc):
    """acc, once the matrix instructions that add to it have ended.

    Those of a warp group read weights from registers until then. Triton lets the last one of an iteration end in the
    next, and the ptxas of Triton 3.6 (12.8) gives its registers to what that begins with: on an H200 rows had other
    bits than alone, and now and then an infinite number. Without the wait it also makes some of these loops wait for
    each instruction.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)


@triton.jit
def load_weights(ptrs, scale, dtype: tl.constexpr, BITS: tl.constexpr):
    """The columns of a group in two halves [outputs, 32], as `halved` has them for 4 bits.  ptrs, scale  [outputs]"""
    outputs: tl.constexpr = ptrs.shape[0]
    # three dimensions, so that the 16 bytes of a row stay one load
    at = ptrs[:, None, None] + 256 * tl.arange(0, 2)[None, :, None] + tl.arange(0, 16)[None, None, :]
    if BITS == 4:
        pair = tl.reshape(tl.load(at), [outputs, 32]).to(tl.int16)
        low = nibble_weights(pair & 15, scale, dtype)
        high = nibble_weights((pair >> 4) & 15, scale, dtype)
    else:
        low = byte_weights(tl.reshape(tl.load(at), [outputs, 32]), scale, dtype)
        high = byte_weights(tl.reshape(tl.load(at + 512), [outputs, 32]), scale, dtype)
    return low, high


@triton.jit
def nibble_weights(nibbles, scale, dtype: tl.constexpr):
    """(n - 8) * scale of nibbles [outputs, 32] int16"""
    if dtype == tl.bfloat16:
        # a nibble is the lowest bits of a bf16 number from 128 on: integers take the hardware longer to convert
        codes = (nibbles | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        return codes.to(tl.bfloat16) * scale.to(tl.bfloat16)[:, None]
    else:
        return (nibbles - 8).to(dtype) * scale.to(dtype)[:, None]


@triton.jit
def byte_weights(codes, scale, dtype: tl.constexpr):
    return (codes.to(tl.float32) * scale.to(tl.float32)[:, None]).to(dtype)


@triton.jit
def multiply(weights, x, acc, INTERPRETED: tl.constexpr):
    # the interpreter multiplies bf16 wrongly
    if INTERPRETED:
        return tl.dot(weights.to(tl.float32), tl.trans(x).to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(weights, tl.trans(x), acc)
