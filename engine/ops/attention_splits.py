"""Where a context is cut for attention: by position alone, so that no row's arithmetic depends on another's."""

from itertools import pairwise

import triton
import triton.language as tl

# splits of 64 tokens, from 8,192 on of 512, from 65,536 on of 1,024: enough programs for a short context,
# few partial results for a long one
NEAR_END, MIDDLE_END = tl.constexpr(8192), tl.constexpr(65536)
NEAR_SIZE, MIDDLE_SIZE, FAR_SIZE = tl.constexpr(64), tl.constexpr(512), tl.constexpr(1024)
NEAR_COUNT, MIDDLE_COUNT = tl.constexpr(128), tl.constexpr(112)


def split_starts(context: int) -> list[int]:
    """First positions of the splits that hold a context of that many tokens."""
    cuts = (0, NEAR_END.value, MIDDLE_END.value, max(context, MIDDLE_END.value))
    sizes = (NEAR_SIZE.value, MIDDLE_SIZE.value, FAR_SIZE.value)
    starts = (s for (low, high), size in zip(pairwise(cuts), sizes, strict=True) for s in range(low, high, size))
    return [s for s in starts if s < context]


def num_splits(context: int) -> int:
    near = -(-min(context, NEAR_END.value) // NEAR_SIZE.value)
    middle = -(-(min(context, MIDDLE_END.value) - NEAR_END.value) // MIDDLE_SIZE.value)
    far = -(-(context - MIDDLE_END.value) // FAR_SIZE.value)
    return near + max(middle, 0) + max(far, 0)


@triton.jit
def split_count(context):
    """num_splits on the device."""
    near = tl.cdiv(tl.minimum(context, NEAR_END), NEAR_SIZE)
    middle = tl.cdiv(tl.maximum(tl.minimum(context, MIDDLE_END) - NEAR_END, 0), MIDDLE_SIZE)
    far = tl.cdiv(tl.maximum(context - MIDDLE_END, 0), FAR_SIZE)
    return near + middle + far


@triton.jit
def split_start(split):
    """The first position of a split; that of the next is its end."""
    middle = split - NEAR_COUNT
    far = middle - MIDDLE_COUNT
    beyond = tl.where(far < 0, NEAR_END + middle * MIDDLE_SIZE, MIDDLE_END + far * FAR_SIZE)
    return tl.where(middle < 0, split * NEAR_SIZE, beyond)
