"""Orthonormal Walsh-Hadamard transform of every group of 64 dimensions."""

# Triton compiles tuple sums and plain branches, not unpacking
# ruff: noqa: RUF005, SIM108

import torch
import triton
import triton.language as tl

GROUP = 64


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """y = x H in every group of 64, H[i, j] = (-1) ** popcount(i & j) / 8; H is its own inverse.

    x       [..., dims]  dims a multiple of 64
    return  shape and dtype of x; summed in at least fp32
    """
    return hadamard_reference(x)


def hadamard_reference(x: torch.Tensor) -> torch.Tensor:
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    for width in (1, 2, 4, 8, 16, 32):
        low, high = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack([low + high, low - high], dim=-2).flatten(-3)
    return (y / 8).to(x.dtype)


@triton.jit
def signs_of_8():
    """[8, 8], (-1) ** popcount(i & j)"""
    i = tl.arange(0, 8)
    both = i[:, None] & i[None, :]
    # bit b of 0x96 is the parity of the three bits of b
    return 1.0 - 2.0 * ((0x96 >> both) & 1).to(tl.float32)


@triton.jit
def rotate_groups(x):
    """x [groups, 8, 8] fp32, dimension 8 a + b at [a, b]"""
    signs = signs_of_8()
    inner = tl.sum(x[:, :, :, None] * signs[None, None, :, :], axis=2)
    return tl.sum(inner[:, :, None, :] * signs[None, :, :, None], axis=1) * 0.125


@triton.jit
def rotate_planes(planes, WORDS: tl.constexpr, FOLD: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr):
    """The transform of vectors cut into planes: planes[j][row, c] is dimension FOLD * c + j; fp32 in and out.

    TERMS  1 when bf16 holds the input exactly; 2 keeps 16 bits of it
    """
    span: tl.constexpr = 64 // FOLD
    c = tl.arange(0, WORDS)
    both = (c[:, None] & c[None, :]) % span
    # the parity of up to six bits, through that of three
    odd = (0x96 >> ((both ^ (both >> 3)) & 7)) & 1
    same = (c[:, None] // span) == (c[None, :] // span)
    signs = tl.where(same, 1.0 - 2.0 * odd.to(tl.float32), 0.0).to(tl.bfloat16)
    mixed = ()
    for j in tl.static_range(FOLD):
        mixed = mixed + (_times_signs(planes[j], signs, TERMS, WIDE),)
    if FOLD == 4:
        mixed = _butterfly(mixed, 1, 4)
        mixed = _butterfly(mixed, 2, 4)
    elif FOLD == 8:
        mixed = _butterfly(mixed, 1, 8)
        mixed = _butterfly(mixed, 2, 8)
        mixed = _butterfly(mixed, 4, 8)
    return mixed


@triton.jit
def _times_signs(x, signs, TERMS: tl.constexpr, WIDE: tl.constexpr):
    high = x.to(tl.bfloat16)
    if WIDE:
        y = tl.dot(x * 0.125, signs.to(tl.float32), input_precision="ieee")
    else:
        y = tl.dot(high, signs)
        if TERMS == 2:
            y = tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), signs, y)
        y = y * 0.125
    return y


@triton.jit
def _butterfly(planes, STEP: tl.constexpr, COUNT: tl.constexpr):
    out = ()
    for j in tl.static_range(COUNT):
        if j & STEP:
            out = out + (planes[j - STEP] - planes[j],)
        else:
            out = out + (planes[j] + planes[j + STEP],)
    return out
