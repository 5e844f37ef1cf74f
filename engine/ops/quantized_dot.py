"""What the kernels over quantised weights share: exact sums per group, and one order in which groups are added.

The order. Group g belongs to segment g % S. A segment adds its groups one after the other, in fp32, rounding once per
group (a fused multiply-add); then segments are added in pairs, s with s + S / 2, until one is left. S depends on the
matrix alone. So a row of activations gives the same bits on every path and whatever rows stand beside it.
"""

# ruff: noqa: RUF005 - kernels have no starred expressions

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.quantized_weight import GROUP


def num_segments(num_groups: int) -> int:
    return 16 if num_groups >= 64 else 8


def num_iterations(num_groups: int, segments: int) -> int:
    return -(-num_groups // segments)


def ahead(iterations: int, most: int) -> int:
    """How many iterations' weights a loop holds in registers: at most `most`, with few idle ones at its end."""
    return -(-iterations // -(-iterations // most))


def group_sums_reference(activations: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Exact sums of 64 products of integers, as fp32: each partial sum is an integer below 2**24.

    activations [rows, groups, 64] int8, codes [outputs, groups, 64] int8  ->  [groups, rows, outputs]
    """
    return torch.einsum("rgk,ngk->grn", activations.float(), codes.float())


def multiply_add_reference(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c rounded once to the type of c; a * b is exact in fp64 for a sum of a group and an fp32 factor."""
    return (a.double() * b.double() + c.double()).to(c.dtype)


def fold_reference(segments: torch.Tensor) -> torch.Tensor:
    """[segments, ...] -> [...]"""
    while len(segments) > 1:
        half = len(segments) // 2
        segments = segments[:half] + segments[half:]
    return segments[0]


def add_groups_reference(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], segments: int) -> torch.Tensor:
    """The sum over groups of sums * factors, each [groups, ...], in the order above and in the type of factors.

    parts  (sums, factors), one after the other; each begins with the first segment
    """
    first_sums, first_factors = parts[0]
    acc = first_factors.new_zeros(segments, *first_sums.shape[1:])
    for sums, factors in parts:
        for start in range(0, len(sums), segments):
            part = slice(start, min(start + segments, len(sums)))
            taken = slice(part.stop - start)
            acc[taken] = multiply_add_reference(sums[part], factors[part], acc[taken])
    return fold_reference(acc)


def groups_of(columns: int) -> int:
    assert columns % GROUP == 0
    return columns // GROUP


@triton.jit
def multiply_add(a, b, c, INTERPRETED: tl.constexpr):
    """a * b + c, rounded once."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def dot_bytes(a, b, c, INTERPRETED: tl.constexpr):
    """c + sum of the products of the four signed bytes of a and of b."""
    if INTERPRETED:
        shift = (tl.arange(0, 4) * 8)[None, None, :]
        return c + tl.sum(((a[:, :, None] << shift) >> 24) * ((b[:, :, None] << shift) >> 24), axis=2)
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def words_at(words_ptr, tile_groups, BITS: tl.constexpr):
    """Where the 16 rows of the groups tile_groups [S] of a tiled matrix begin: [S, 64]"""
    return words_ptr + tile_groups.to(tl.int64)[:, None] * (32 * BITS) + tl.arange(0, 64)[None, :]


@triton.jit
def scales_at(scales_ptr, tile_groups):
    """[S, 16]"""
    return scales_ptr + tile_groups.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]


@triton.jit
def activations_at(x_ptr, groups):
    """Of the groups [S] of a row of int8, as int32 words, what each of the 64 words of load_words meets: [S, 64]"""
    return x_ptr + (groups * 16)[:, None] + (tl.arange(0, 64) % 4)[None, :]


@triton.jit
def load_where(at, mask, EVEN: tl.constexpr):
    """EVEN: mask is true throughout"""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0)


@triton.jit
def load_weights(words_at, scales_at, mask, BITS: tl.constexpr, EVEN: tl.constexpr):
    """The 16 rows of a group for each [S] of mask: fp16 scales [S, 16] and BITS / 2 tensors of words [S, 64]."""
    weights = (load_where(scales_at, mask[:, None], EVEN),)
    for plane in tl.static_range(BITS // 2):
        weights = weights + (load_where(words_at + 64 * plane, mask[:, None], EVEN),)
    return weights


@triton.jit
def load_activations(x_at, x_scales_at, mask, EVEN: tl.constexpr):
    """A group of a row for each [S] of mask: scales [S] and four tensors of words [S, 64], alike for every output."""
    x = (load_where(x_scales_at, mask, EVEN),)
    for part in tl.static_range(4):
        x = x + (load_where(x_at + 4 * part, mask[:, None], EVEN),)
    return x


@triton.jit
def signed_high(words, INTERPRETED: tl.constexpr):
    """Of every byte 16 times the code in its high half, which is stored plus 8."""
    if INTERPRETED:
        return (words & -252645136) ^ -2139062144
    else:
        # as one instruction: the compiler would make two
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def dot_words(weights, x, INTERPRETED: tl.constexpr, BITS: tl.constexpr):
    """Sums over a group: [S, 16] int32"""
    acc = tl.zeros_like(weights[1])
    for plane in tl.static_range(BITS // 2):
        words = weights[1 + plane]
        if BITS == 4:
            acc = dot_bytes(signed_high(words << 4, INTERPRETED), x[1 + 2 * plane], acc, INTERPRETED)
            acc = dot_bytes(signed_high(words, INTERPRETED), x[2 + 2 * plane], acc, INTERPRETED)
        else:
            acc = dot_bytes(words, x[1 + plane], acc, INTERPRETED)
    sums = tl.sum(tl.reshape(acc, [acc.shape[0], 16, 4]), axis=2)
    # exact: every term was 16 times what it stands for
    return sums >> 4 if BITS == 4 else sums


@triton.jit
def add_group(acc, weights, x, factor, INTERPRETED: tl.constexpr, BITS: tl.constexpr):
    """acc [S, 16] plus the product of one group of every segment.

    weights, x  of load_weights and load_activations
    factor      [S] or a number that the scales of x are multiplied by
    """
    sums = dot_words(weights, x, INTERPRETED, BITS)
    x_scales = x[0] * factor
    return multiply_add(sums.to(tl.float32), weights[0].to(tl.float32) * x_scales[:, None], acc, INTERPRETED)


@triton.jit
def halve(acc, HALF: tl.constexpr, WIDTH: tl.constexpr):
    first, second = tl.split(tl.permute(tl.reshape(acc, [2, HALF, WIDTH]), [1, 2, 0]))
    return first + second


@triton.jit
def fold(acc, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr):
    """[SEGMENTS, WIDTH] -> [WIDTH]"""
    if SEGMENTS >= 16:
        acc = halve(acc, 8, WIDTH)
    acc = halve(acc, 4, WIDTH)
    acc = halve(acc, 2, WIDTH)
    return tl.reshape(halve(acc, 1, WIDTH), [WIDTH])


@triton.jit
def fold_tiles(acc, TILES: tl.constexpr, SEGMENTS: tl.constexpr):
    """[TILES * SEGMENTS, 16], the segments of a tile beside each other  ->  [TILES * 16]"""
    apart = tl.permute(tl.reshape(acc, [TILES, SEGMENTS, 16]), [1, 0, 2])
    return fold(tl.reshape(apart, [SEGMENTS, TILES * 16]), SEGMENTS, TILES * 16)
