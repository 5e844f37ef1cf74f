"""4-bit codes of keys and values: points of the E8 lattice, eight dimensions a word, with one fp16 scale per 64."""

# Triton compiles tuple sums and plain branches, not unpacking
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl

from engine.ops.hadamard import GROUP
from engine.ops.kv_codec_int8 import round_to_even

# a scale stays so small that the largest decoded value is a finite fp16 number
LARGEST_SCALE = 8188.0


def e8_encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest point z + h of E8 to x / scale, z in [-8, 7]**8 of even sum, h = 0 or 1/2 for all eight dimensions.

    Nibble i of a word is z[i] + 8. The lowest bit of nibble 0 is implied by the other seven and holds 2 h instead.

    x       [..., dims]       dims a multiple of 64; rotated (hadamard), or outliers cost precision
    return  [..., dims / 8]   int32 words
            [..., dims / 64]  fp16 scales, 0.9 max|x| / 7.5 of the group
    """
    groups = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) * (0.9 / 7.5)).clamp(max=LARGEST_SCALE).half()
    wide = scales.to(groups.dtype).unsqueeze(-1)
    points = torch.where(wide > 0, groups / wide, 0).flatten(-2).unflatten(-1, (-1, 8))
    integers, halves = nearest_e8(points)
    return _pack(integers + 8, halves), scales


def e8_decode(words: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x = (z + h) * scale, undoing e8_encode

    words   [..., dims / 8] int32
    scales  [..., dims / 64] fp16
    return  [..., dims] dtype
    """
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4, device=words.device)) & 15
    half = nibbles[..., :1] & 1
    implied = nibbles[..., 1:].sum(-1, keepdim=True) & 1
    nibbles[..., :1] += implied - half
    points = (nibbles - 8).to(dtype) + half.to(dtype) / 2
    return (points.flatten(-2).unflatten(-1, (-1, GROUP)) * scales.to(dtype).unsqueeze(-1)).flatten(-2)


def nearest_e8(points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The closer of the nearest points of both cosets.

    points  [..., 8]
    return  [..., 8] int64 z, and [...] bool: whether 1/2 is added to it
    """
    integers, distance = _nearest_even(points)
    integers_of_half, distance_of_half = _nearest_even(points - 0.5)
    halves = distance_of_half < distance
    return torch.where(halves.unsqueeze(-1), integers_of_half, integers), halves


def _nearest_even(points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rounded = points.round().clamp(-8, 7)
    error = points - rounded
    step = torch.where((rounded < 7) & ((error >= 0) | (rounded == -8)), 1.0, -1.0).to(points.dtype)
    cost = 1 - 2 * error * step
    cheapest = torch.zeros_like(step).scatter_(-1, cost.argmin(-1, keepdim=True), 1.0)
    odd = rounded.sum(-1, keepdim=True) % 2
    integers = rounded + odd * cheapest * step
    return integers.long(), (points - integers).square().sum(-1)


def _pack(nibbles: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, device=nibbles.device)
    words = (nibbles << shifts).sum(-1)
    return ((words & ~1) | halves.long()).to(torch.int32)


@triton.jit
def nearest_even_sum(points):
    """points [groups, 8, 8] fp32 -> z [groups, 8, 8] int32 of even sum over the last axis, squared distance"""
    rounded = tl.minimum(tl.maximum(round_to_even(points), -8.0), 7.0)
    error = points - rounded
    step = tl.where((rounded < 7) & ((error >= 0) | (rounded == -8)), 1.0, -1.0)
    cheapest = tl.argmin(1 - 2 * error * step, axis=2)
    odd = tl.xor_sum(rounded.to(tl.int32) & 1, axis=2)
    is_moved = (tl.arange(0, 8)[None, None, :] == cheapest[:, :, None]) & (odd != 0)[:, :, None]
    integers = tl.where(is_moved, rounded + step, rounded)
    error = points - integers
    return integers.to(tl.int32), tl.sum(error * error, axis=2)


@triton.jit
def encode_e8_groups(x):
    """x [groups, 8, 8] fp32 -> words [groups, 8] int32, scales [groups] fp16"""
    scales = tl.minimum(tl.max(tl.max(tl.abs(x), axis=2), axis=1) * 0.12, 8188.0).to(tl.float16)
    wide = scales.to(tl.float32)[:, None, None]
    quotient = tl.div_rn(x, tl.broadcast_to(tl.where(wide > 0, wide, 1.0), x.shape))
    points = tl.where(wide > 0, quotient, 0.0)
    integers, distance = nearest_even_sum(points)
    integers_of_half, distance_of_half = nearest_even_sum(points - 0.5)
    halves = distance_of_half < distance
    nibbles = tl.where(halves[:, :, None], integers_of_half, integers) + 8
    shifts = 4 * tl.arange(0, 8)
    words = tl.xor_sum(nibbles << shifts[None, None, :], axis=2)
    return (words & -2) | halves.to(tl.int32), scales


EIGHT_HALVES = tl.constexpr((tl.float16,) * 8)
# Eight planes of fp16 pairs out of two words. The parity of a word's eight low bits, xored into bit 0, gives the
# implied bit; a nibble and the half bit below it stand in the mantissa of 64, so that 72 is to be subtracted.
E8_PLANES_ASM = tl.constexpr("""
{
.reg .b32 low, high, bits, parity, magic, offset;
mov.b32 offset, 0x54805480;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;
xor.b32 parity, low, high;
shr.u32 bits, parity, 8;
xor.b32 parity, parity, bits;
shr.u32 bits, parity, 4;
xor.b32 parity, parity, bits;
shl.b32 bits, low, 3;
lop3.b32 magic, bits, 0x00080008, 0x54005400, 0xEA;
lop3.b32 low, low, parity, 0x00010001, 0x78;
shl.b32 bits, low, 4;
lop3.b32 bits, bits, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $0, bits, $10;
lop3.b32 bits, low, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $1, bits, $10;
shr.u32 bits, low, 4;
lop3.b32 bits, bits, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $2, bits, $10;
shr.u32 bits, low, 8;
lop3.b32 bits, bits, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $3, bits, $10;
shl.b32 bits, high, 4;
lop3.b32 bits, bits, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $4, bits, $10;
lop3.b32 bits, high, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $5, bits, $10;
shr.u32 bits, high, 4;
lop3.b32 bits, bits, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $6, bits, $10;
shr.u32 bits, high, 8;
lop3.b32 bits, bits, 0x00F000F0, magic, 0xEA;
sub.rn.f16x2 bits, bits, offset;
mul.rn.f16x2 $7, bits, $10;
}
""")


@triton.jit
def e8_planes(words, scales, ASM: tl.constexpr):
    """words [tokens, words] int32, scales the same shape fp16 -> 8 planes fp16; plane j holds dimension 8 c + j

    ASM  converts two words at a time by bit patterns; without it the same values come from plain integer operations
    """
    if ASM:
        return tl.inline_asm_elementwise(
            E8_PLANES_ASM,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [words, scales],
            dtype=EIGHT_HALVES,
            is_pure=True,
            pack=2,
        )
    parity = words & 0x11111111
    parity = parity ^ (parity >> 16)
    parity = parity ^ (parity >> 8)
    parity = (parity ^ (parity >> 4)) & 1
    half_bit = words & 1
    words = words ^ parity
    planes = ()
    for j in tl.static_range(8):
        doubled = 2 * ((words >> (4 * j)) & 15) + half_bit - 16
        planes = planes + (doubled.to(tl.float16) * 0.5 * scales,)
    return planes
