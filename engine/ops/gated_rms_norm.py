"""Root-mean-square normalisation whose output is gated by SiLU."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.halved import halved, halved_column
from engine.ops.launch import cdiv, next_power_of_2, plain_options

BLOCK_ITEMS = 8


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, halves: bool = False
) -> torch.Tensor:
    """y = x / sqrt(mean(x**2) + eps) * weight * gate * sigmoid(gate)

    x       [..., width]
    gate    [..., width]
    weight  [width]
    halves  the result is halved(y); width is then a multiple of 64
    return  shape of x, dtype of gate; computed in at least fp32
    """
    if x.is_cuda:
        return gated_rms_norm_triton(x, gate, weight, eps, halves)
    return gated_rms_norm_reference(x, gate, weight, eps, halves)


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, halves: bool = False
) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    y = (wide * scale * weight.to(dtype) * F.silu(gate.to(dtype))).to(gate.dtype)
    return halved(y) if halves else y


def gated_rms_norm_triton(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, halves: bool = False
) -> torch.Tensor:
    width = x.shape[-1]
    y = torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
    # rows of heads, as z is in a projection; anything else is laid out anew
    if gate.dim() != 3 or gate.stride()[1:] != (width, 1):
        gate = gate.contiguous().view(1, -1, width)
    heads = gate.shape[1]
    assert x.is_contiguous() and weight.is_contiguous() and width == next_power_of_2(width)
    options = plain_options(4)
    gated_rms_norm_kernel[(len(gate), cdiv(heads, BLOCK_ITEMS))](
        x, gate, weight, y, gate.stride(0), heads, eps, ITEMS=BLOCK_ITEMS, WIDTH=width, HALVES=halves,
        **options,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["eps"])
def gated_rms_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, gate_stride, heads, eps,
    ITEMS: tl.constexpr, WIDTH: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Some heads of a row."""
    # int64: rows * heads * WIDTH passes 2**31 for long prompts
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ITEMS + tl.arange(0, ITEMS)
    column = tl.arange(0, WIDTH)
    mask = (head < heads)[:, None]
    at = head[:, None] * WIDTH + column[None, :]
    x = tl.load(x_ptr + row * heads * WIDTH + at, mask=mask, other=1.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    y = x * scale * tl.load(weight_ptr + column)[None, :] * (gate * tl.sigmoid(gate))
    if HALVES:
        at = head[:, None] * WIDTH + halved_column(column)[None, :]
    tl.store(y_ptr + row * heads * WIDTH + at, y.to(y_ptr.dtype.element_ty), mask=mask)
