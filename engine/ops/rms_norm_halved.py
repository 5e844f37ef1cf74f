"""The norm before products of a prompt's rows, also in the order in which matrices in 4 bits read them."""

import torch
import triton
import triton.language as tl

from engine.ops.halved import halved, halved_column
from engine.ops.launch import next_power_of_2, plain_options
from engine.ops.rms_norm import rms_norm_reference


def rms_norm_halved(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x / sqrt(mean(x**2) + eps) * weight, and halved(y)

    x       [rows, width]  rows may lie apart; width a multiple of 64
    weight  [width]
    return  twice the shape and dtype of x; the mean is taken in at least fp32
    """
    if x.is_cuda and x.dtype != torch.float64:
        return rms_norm_halved_triton(x, weight, eps)
    return rms_norm_halved_reference(x, weight, eps)


def rms_norm_halved_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y = rms_norm_reference(x, weight, eps)
    return y, halved(y)


def rms_norm_halved_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous() and width % 64 == 0
    y, ordered = (torch.empty(rows, width, dtype=x.dtype, device=x.device) for _ in range(2))
    block = next_power_of_2(width)
    options = plain_options(min(8, max(1, block // 256)), is_fused=True)
    rms_norm_halved_kernel[(rows,)](x, weight, y, ordered, x.stride(0), width, eps, BLOCK=block, **options)
    return y, ordered


@triton.jit
def rms_norm_halved_kernel(x_ptr, weight_ptr, y_ptr, ordered_ptr, stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    y = (x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + column, y, mask=mask)
    tl.store(ordered_ptr + row * width + halved_column(column), y, mask=mask)
