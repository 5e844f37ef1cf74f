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


def is_interpreted() -> bool:
    """The interpreter has no inline assembly and rounds a fused multiply-add twice."""
    return triton.knobs.runtime.interpret


def launch_options(device: torch.device, num_warps: int) -> dict[str, object]:
    if is_interpreted():
        return {}
    return {"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": has_dependent_launch(device)}


def has_dependent_launch(device: torch.device) -> bool:
    """A kernel may start, and read its weights, while the one before it ends."""
    return not is_interpreted() and torch.cuda.get_device_capability(device) >= (9, 0)


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
def load_words(words_ptr, tile_groups, mask, BITS: tl.constexpr):
    """The 16 rows of a group for each of tile_groups [S, 1]: BITS / 2 tensors [S, 64]."""
    at = words_ptr + tile_groups.to(tl.int64) * (32 * BITS) + tl.arange(0, 64)[None, :]
    words = ()
    for plane in tl.static_range(BITS // 2):
        words = words + (tl.load(at + 64 * plane, mask=mask, other=0),)
    return words


@triton.jit
def load_scales(scales_ptr, tile_groups, mask):
    """[S, 16] fp32"""
    at = scales_ptr + tile_groups.to(tl.int64) * 16 + tl.arange(0, 16)[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def dot_words(words, x_ptr, groups, mask, INTERPRETED: tl.constexpr, BITS: tl.constexpr):
    """Sums over the bytes of a group, times the activations of groups [S, 1]: [S, 16] int32.

    x_ptr  one row of int8 activations, as int32 words. 4-bit codes count eight too much each
    """
    at = x_ptr + groups * 16 + (tl.arange(0, 64) % 4)[None, :]
    acc = tl.zeros_like(words[0])
    for plane in tl.static_range(BITS // 2):
        w = words[plane]
        if BITS == 4:
            low = tl.load(at + 8 * plane, mask=mask, other=0)
            high = tl.load(at + (8 * plane + 4), mask=mask, other=0)
            acc = dot_bytes(w & 0x0F0F0F0F, low, acc, INTERPRETED)
            acc = dot_bytes((w >> 4) & 0x0F0F0F0F, high, acc, INTERPRETED)
        else:
            acc = dot_bytes(w, tl.load(at + 4 * plane, mask=mask, other=0), acc, INTERPRETED)
    return tl.sum(tl.reshape(acc, [acc.shape[0], 16, 4]), axis=2)


@triton.jit
def add_group(
    acc, words, scales, x_ptr, x_scales_ptr, x_sums_ptr, group, mask, factor,
    INTERPRETED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """acc [S, 16] plus the product of one group [S] of every segment.

    x_ptr, x_scales_ptr, x_sums_ptr  of one row of activations, the first as int32 words
    factor                           [S] that its scales are multiplied by
    """
    sums = dot_words(words, x_ptr, group[:, None], mask[:, None], INTERPRETED, BITS)
    if BITS == 4:
        sums -= 8 * tl.load(x_sums_ptr + group, mask=mask, other=0)[:, None]
    x_scales = tl.load(x_scales_ptr + group, mask=mask, other=0.0) * factor
    return multiply_add(sums.to(tl.float32), scales * x_scales[:, None], acc, INTERPRETED)


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
