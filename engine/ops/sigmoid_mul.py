"""Multiplication by a sigmoid gate."""

import torch
import triton
import triton.language as tl

from engine.ops.halved import halved, halved_column
from engine.ops.launch import cdiv, plain_options

BLOCK = 1024


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y = x * sigmoid(gate)

    x       [..., width]
    gate    [..., width] or [..., 1]
    return  shape and dtype of x
    """
    return sigmoid_mul_reference(x, gate)


def sigmoid_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor, halves: bool = False) -> torch.Tensor:
    """y = x * sigmoid(gate), rounded once

    x       [rows, width]  contiguous
    gate    [rows, width]  rows may lie apart
    halves  the result is halved(y); width is then a multiple of 64
    return  [rows, width]  dtype of gate; computed in at least fp32
    """
    if x.is_cuda:
        return sigmoid_gate_triton(x, gate, halves)
    return sigmoid_gate_reference(x, gate, halves)


def sigmoid_gate_reference(x: torch.Tensor, gate: torch.Tensor, halves: bool = False) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x.to(wide) * torch.sigmoid(gate.to(wide))).to(gate.dtype)
    return halved(y) if halves else y


def sigmoid_gate_triton(x: torch.Tensor, gate: torch.Tensor, halves: bool = False) -> torch.Tensor:
    rows, width = x.shape
    assert x.is_contiguous() and gate.stride(1) == 1
    y = torch.empty(rows, width, dtype=gate.dtype, device=x.device)
    sigmoid_gate_kernel[(rows, cdiv(width, BLOCK))](
        x, gate, y, width, gate.stride(0), HALVES=halves, BLOCK=BLOCK, **plain_options(4, is_fused=True)
    )
    return y


@triton.jit
def sigmoid_gate_kernel(x_ptr, gate_ptr, y_ptr, width, gate_stride, HALVES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * width + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    target = halved_column(column) if HALVES else column
    tl.store(y_ptr + row * width + target, (x * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty), mask=mask)
