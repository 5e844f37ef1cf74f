"""Products of very many rows with a quantised matrix that becomes bf16 in memory before it is multiplied."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.ops.halved import halved_column
from engine.ops.launch import capability_of, cdiv, is_interpreted, plain_options
from engine.ops.quantized_dot import groups_of
from engine.ops.quantized_weight import TILE_ROWS, QuantizedWeight

# fewer rows would wait for the weights longer than they gain
MANY_ROWS = 2048
# of bf16 weights at a time
MOST_BYTES = 64 * 2**20
BLOCK_M, BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES = 256, 128, 64, 8, 3
# row blocks that go over all outputs together, so that both stay in the second-level cache
TOGETHER = 8


def is_worth_dequantizing(device: torch.device, rows: int) -> bool:
    """Where tiles are copied by the memory unit and multiplied out of shared memory."""
    return rows >= MANY_ROWS and capability_of(device) in ((9, 0), (10, 0))


def dequantized_matmul_triton(
    x: torch.Tensor,
    weight: QuantizedWeight,
    y: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    is_swiglu: bool = False,
    halves_output: bool = False,
) -> None:
    """What launch_matmul does for one matrix, with the same arguments and the same bits: products of a row and an
    output are added in the same order."""
    outputs = weight.rows // 2 if is_swiglu else weight.rows
    assert x.stride(1) == y.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    assert not is_swiglu or outputs % TILE_ROWS == 0
    per_output = 2 if is_swiglu else 1
    # whole blocks of the product
    most = max(BLOCK_N, MOST_BYTES // (2 * weight.columns) // BLOCK_N * BLOCK_N) // per_output
    numbers = torch.empty(
        min(most, -(-outputs // TILE_ROWS) * TILE_ROWS) * per_output, weight.columns, dtype=x.dtype, device=x.device
    )
    rows = TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K])
    matrix = TensorDescriptor.from_tensor(numbers, [BLOCK_N, BLOCK_K])
    options = plain_options(NUM_WARPS, is_fused=True)
    for first in range(0, outputs, most):
        count = min(most, outputs - first)
        _dequantize(weight, first, count, numbers, is_swiglu)
        grid = (cdiv(len(x), BLOCK_M) * cdiv(count * per_output, BLOCK_N),)
        dequantized_matmul_kernel[grid](
            rows, matrix, y, y if residual is None else residual, len(x), first, count, weight.columns,
            y.stride(0), y.stride(0) if residual is None else residual.stride(0), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
            BLOCK_K=BLOCK_K, TOGETHER=TOGETHER, NUM_STAGES=NUM_STAGES, IS_SWIGLU=is_swiglu,
            HAS_RESIDUAL=residual is not None, HALVES_OUTPUT=halves_output, INTERPRETED=is_interpreted(), **options,
        )  # fmt: skip


def _dequantize(weight: QuantizedWeight, first: int, count: int, target: torch.Tensor, is_swiglu: bool) -> None:
    """Rows first, first + 1, ... of a matrix, or pairs of a gate and its up, columns in the order of `in_order_of`."""
    groups = groups_of(weight.columns)
    tiles = cdiv(count, TILE_ROWS)
    dequantize_kernel[(tiles * (2 if is_swiglu else 1), cdiv(groups, 4))](
        weight.words.view(torch.int8), weight.scales, target, first // TILE_ROWS, tiles, groups,
        weight.rows // 2 // TILE_ROWS, BITS=weight.bits, BLOCK=4, IS_SWIGLU=is_swiglu,
        **plain_options(4, is_fused=True),
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_tile", "tiles", "up_tile"])
def dequantize_kernel(
    bytes_ptr, scales_ptr, target_ptr, first_tile, tiles, groups, up_tile,
    BITS: tl.constexpr, BLOCK: tl.constexpr, IS_SWIGLU: tl.constexpr,
):  # fmt: skip
    """Some groups of a tile of 16 rows. bf16 weights are the products of bf16 codes and bf16 scales."""
    tile, half = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row = tl.arange(0, 16)
    target_row = tile * 16 + row
    if IS_SWIGLU:
        target_row = 2 * target_row + half
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = (group < groups)[:, None]
    source = ((first_tile + tile + half * up_tile).to(tl.int64) * groups + group)[:, None]
    scale = tl.load(scales_ptr + source * 16 + row[None, :], mask=held, other=0.0)[:, :, None]
    byte = tl.arange(0, 32)[None, None, :]
    at = bytes_ptr + (source * (128 * BITS) + row[None, :] * 16)[:, :, None] + byte // 16 * 256 + byte % 16
    target = target_ptr + (target_row[None, :].to(tl.int64) * (groups * 64) + group[:, None] * 64)[:, :, None] + byte
    held = held[:, :, None]
    codes = tl.load(at, mask=held, other=0)
    number: tl.constexpr = target_ptr.dtype.element_ty
    if BITS == 4:
        low = ((codes & 15).to(tl.int32) - 8).to(number) * scale.to(number)
        high = (((codes >> 4) & 15).to(tl.int32) - 8).to(number) * scale.to(number)
    else:
        low = (codes.to(tl.float32) * scale.to(tl.float32)).to(number)
        high = (tl.load(at + 512, mask=held, other=0).to(tl.float32) * scale.to(tl.float32)).to(number)
    tl.store(target, low, mask=held)
    tl.store(target + 32, high, mask=held)


@triton.jit(do_not_specialize=["rows", "first"])
def dequantized_matmul_kernel(
    rows_desc, matrix_desc, y_ptr, residual_ptr, rows, first, count, columns, y_stride, residual_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    NUM_STAGES: tl.constexpr, IS_SWIGLU: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HALVES_OUTPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    per_output: tl.constexpr = 2 if IS_SWIGLU else 1
    row_blocks = tl.cdiv(rows, BLOCK_M)
    per_group = TOGETHER * tl.cdiv(count * per_output, BLOCK_N)
    first_block = tl.program_id(0) // per_group * TOGETHER
    together = tl.minimum(row_blocks - first_block, TOGETHER)
    row_block = first_block + tl.program_id(0) % per_group % together
    block = tl.program_id(0) % per_group // together
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, columns, BLOCK_K, num_stages=NUM_STAGES):
        x = rows_desc.load([row_block * BLOCK_M, start])
        weights = matrix_desc.load([block * BLOCK_N, start])
        # the interpreter multiplies bf16 wrongly
        if INTERPRETED:
            acc = tl.dot(x.to(tl.float32), tl.trans(weights).to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weights), acc)
    output = block * (BLOCK_N // per_output) + tl.arange(0, BLOCK_N // per_output)
    if IS_SWIGLU:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        acc = gate * tl.sigmoid(gate) * up
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (row < rows)[:, None] & (output < count)[None, :]
    column = first + output
    if HALVES_OUTPUT:
        column = halved_column(column)
    wide = row.to(tl.int64)[:, None]
    if HAS_RESIDUAL:
        at = residual_ptr + wide * residual_stride + column[None, :]
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + wide * y_stride + column[None, :], acc.to(y_ptr.dtype.element_ty), mask=mask)
