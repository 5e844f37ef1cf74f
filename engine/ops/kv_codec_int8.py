"""8-bit codes of keys and values: int8 with one fp16 scale per 64 dimensions."""

# Triton compiles tuple sums and plain branches, not unpacking
# ruff: noqa: RUF005

import torch
import triton
import triton.language as tl

from engine.ops.hadamard import GROUP

# a scale stays so small that the largest decoded value is a finite fp16 number
LARGEST_SCALE = 515.5


def int8_encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scale = fp16(max|x| / 127) of the group, code = round(x / scale) within [-127, 127]

    x       [..., dims]       dims a multiple of 64
    return  [..., dims / 4]   int32; byte i of word c is the code of dimension 4 c + i
            [..., dims / 64]  fp16 scales
    """
    groups = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, GROUP))
    scales = (groups.abs().amax(-1) / 127).clamp(max=LARGEST_SCALE).half()
    wide = scales.to(groups.dtype).unsqueeze(-1)
    codes = torch.where(wide > 0, groups / wide, 0).round().clamp(-127, 127)
    return codes.to(torch.int8).flatten(-2).view(torch.int32), scales


def int8_decode(words: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x = code * scale

    words   [..., dims / 4] int32
    scales  [..., dims / 64] fp16
    return  [..., dims] dtype
    """
    codes = words.contiguous().view(torch.int8).unflatten(-1, (-1, GROUP))
    return (codes.to(dtype) * scales.to(dtype).unsqueeze(-1)).flatten(-2)


@triton.jit
def round_to_even(x):
    # adding 1.5 * 2**23 leaves no bit below one; the hardware rounds half to even
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_int8_groups(x):
    """x [groups, 16, 4] fp32 -> words [groups, 16] int32, scales [groups] fp16"""
    scales = tl.minimum(tl.max(tl.max(tl.abs(x), axis=2), axis=1) / 127.0, 515.5).to(tl.float16)
    wide = scales.to(tl.float32)[:, None, None]
    quotient = tl.div_rn(x, tl.broadcast_to(tl.where(wide > 0, wide, 1.0), x.shape))
    codes = tl.minimum(tl.maximum(round_to_even(tl.where(wide > 0, quotient, 0.0)), -127.0), 127.0).to(tl.int32)
    shifts = 8 * tl.arange(0, 4)
    return tl.xor_sum((codes & 255) << shifts[None, None, :], axis=2), scales


# four planes of fp16 pairs out of two words: a byte b of a signed code becomes 1024 + (b ^ 128), then minus 1152
INT8_PLANES_ASM = tl.constexpr("""
{
.reg .b32 bytes, offset;
mov.b32 offset, 0x64806480;
prmt.b32 bytes, $4, $5, 0x0400;
lop3.b32 bytes, bytes, 0x00FF00FF, offset, 0x6A;
sub.rn.f16x2 bytes, bytes, offset;
mul.rn.f16x2 $0, bytes, $6;
prmt.b32 bytes, $4, $5, 0x0501;
lop3.b32 bytes, bytes, 0x00FF00FF, offset, 0x6A;
sub.rn.f16x2 bytes, bytes, offset;
mul.rn.f16x2 $1, bytes, $6;
prmt.b32 bytes, $4, $5, 0x0602;
lop3.b32 bytes, bytes, 0x00FF00FF, offset, 0x6A;
sub.rn.f16x2 bytes, bytes, offset;
mul.rn.f16x2 $2, bytes, $6;
prmt.b32 bytes, $4, $5, 0x0703;
lop3.b32 bytes, bytes, 0x00FF00FF, offset, 0x6A;
sub.rn.f16x2 bytes, bytes, offset;
mul.rn.f16x2 $3, bytes, $6;
}
""")


@triton.jit
def int8_planes(words, scales, ASM: tl.constexpr):
    """words [tokens, words] int32, scales the same shape fp16 -> 4 planes fp16; plane j holds dimension 4 c + j

    ASM  converts by bit patterns in pairs: the hardware's own integer conversions run at a quarter of the rate
    """
    if ASM:
        return tl.inline_asm_elementwise(
            INT8_PLANES_ASM,
            "=&r,=&r,=&r,=&r,r,r,r",
            [words, scales],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    planes = ()
    for j in tl.static_range(4):
        code = (words << (24 - 8 * j)) >> 24
        planes = planes + (code.to(tl.float16) * scales,)
    return planes
