"""Products of many rows with a small matrix that is not quantised."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.launch import cdiv, is_interpreted, plain_options

BLOCK_ROWS, BLOCK_OUTPUTS = 64, 64


def row_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = x W^T, where the bits of a row do not depend on how many rows there are, as a library's may

    x       [rows, columns]  rows may lie apart; columns a multiple of 64
    weight  [outputs, columns]  contiguous
    return  [rows, outputs]  in at least fp32
    """
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return row_matmul_triton(x, weight)
    return row_matmul_reference(x, weight)


def row_matmul_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


def row_matmul_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    (rows, columns), outputs = x.shape, len(weight)
    assert x.stride(1) == 1 and weight.is_contiguous() and columns % 64 == 0
    y = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    row_matmul_kernel[(cdiv(outputs, BLOCK_OUTPUTS), cdiv(rows, BLOCK_ROWS))](
        x, weight, y, x.stride(0), rows, outputs, columns, ROWS=BLOCK_ROWS, OUTPUTS=BLOCK_OUTPUTS,
        INTERPRETED=is_interpreted(), **plain_options(4, is_fused=True),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def row_matmul_kernel(
    x_ptr, weight_ptr, y_ptr, x_stride, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, 64)
    x_at = x_ptr + tl.where(row < rows, row, 0).to(tl.int64)[:, None] * x_stride + column[None, :]
    weight_at = weight_ptr + tl.where(output < outputs, output, 0)[:, None] * columns + column[None, :]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, columns, 64, num_stages=4):
        x, weight = tl.load(x_at + start), tl.load(weight_at + start)
        # the interpreter multiplies bf16 wrongly
        if INTERPRETED:
            acc = tl.dot(x.to(tl.float32), tl.trans(weight).to(tl.float32), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc)
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(y_ptr + at, acc, mask=(row < rows)[:, None] & (output < outputs)[None, :])
