"""Orthonormal Walsh-Hadamard transform of every group of 64 dimensions."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, plain_options

GROUP = 64


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """y = x H in every group of 64, H[i, j] = (-1) ** popcount(i & j) / 8; H is its own inverse.

    x       [..., dims]  dims a multiple of 64
    return  shape and dtype of x; summed in at least fp32
    """
    return hadamard_triton(x) if x.is_cuda else hadamard_reference(x)


def hadamard_reference(x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    for width in (1, 2, 4, 8, 16, 32):
        low, high = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
    return (y / 8).to(x.dtype)


def hadamard_triton(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    assert x.is_contiguous() and x.shape[-1] % GROUP == 0
    # a program in one warp, so that no sum passes from warp to warp
    hadamard_kernel[(cdiv(x.numel(), 4 * GROUP),)](x, y, x.numel(), **plain_options(1, is_fused=True))
    return y


@triton.jit(do_not_specialize=["size"])
def hadamard_kernel(x_ptr, y_ptr, size):
    octets = tl.program_id(0).to(tl.int64) * 256 + 64 * tl.arange(0, 4)[:, None] + 8 * tl.arange(0, 8)[None, :]
    at = octets[:, :, None] + tl.arange(0, 8)[None, None, :]
    y = rotate_groups(tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32))
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < size)


@triton.jit
def rotate_groups(x):
    """x [groups, 8, 8] fp32, dimension 8 a + b at [a, b]"""
    i = tl.arange(0, 8)
    signs = hadamard_signs(i[:, None], i[None, :])
    inner = tl.sum(x[:, :, :, None] * signs[None, None, :, :], axis=2)
    return tl.sum(inner[:, :, None, :] * signs[None, :, :, None], axis=1) * 0.125


@triton.jit
def hadamard_signs(i, j):
    """(-1) ** popcount(i & j), i and j below 64"""
    both = i & j
    # bit b of 0x96 is the parity of the three bits of b
    return 1.0 - 2.0 * ((0x96 >> ((both ^ (both >> 3)) & 7)) & 1).to(tl.float32)
