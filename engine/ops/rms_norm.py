"""Root-mean-square normalisation over the last dimension."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import has_dependent_launch, launch_options, next_power_of_2


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x**2) + eps) * weight

    x       [..., width]
    weight  [width], or one row per head: [heads, width] for x [rows, heads, width]
    return  shape and dtype of x; the mean is taken in at least fp32
    """
    if x.is_cuda and x.dtype != torch.float64:
        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(dtype)).to(x.dtype)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    heads = weight.numel() // width
    # vectors lie in rows; with heads, rows of a projection may be wider than its heads
    stride = x.stride(-2) if x.dim() == 2 or heads == 1 else x.stride(0)
    assert x.stride(-1) == 1 and weight.is_contiguous()
    assert x.dim() == 2 or x.is_contiguous() or (x.dim() == 3 and heads == x.shape[1] and x.stride(1) == width)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(width)
    options = launch_options(x.device, min(8, max(1, block // 256)), is_fused=True)
    rms_norm_kernel[(x.numel() // width,)](
        x, weight, y, stride, width, eps, HEADS=heads, BLOCK=block, PDL=has_dependent_launch(x.device), **options
    )
    return y


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr, stride, width, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    vector = tl.program_id(0).to(tl.int64)
    row, head = vector // HEADS, vector % HEADS
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = tl.load(weight_ptr + head * width + column, mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + row * stride + head * width + column, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * weight
    tl.store(y_ptr + vector * width + column, y.to(y_ptr.dtype.element_ty), mask=mask)
