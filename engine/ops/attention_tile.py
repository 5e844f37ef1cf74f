"""What the attention kernels share: a tile of query rows against a range of one request's keys and values.

A stored element holds FOLD dimensions of one token: 1 number, 4 int8 codes, 8 dimensions of an E8 point. All vectors
are cut into FOLD planes, plane j holding dimension FOLD * c + j at c, so that an element decodes in the registers of
the thread that loaded it and every plane goes to the tensor cores as it is.
"""

# Triton compiles tuple sums and plain branches, not unpacking
# ruff: noqa: RUF005, SIM108

import triton
import triton.language as tl

from engine.ops.kv_codec_e8 import e8_planes
from engine.ops.kv_codec_int8 import int8_planes, round_to_even
from engine.ops.prefetch import prefetch

# below every log2 weight and finite, so that a row that sees nothing yet has weights exp2(-inf) = 0 and not NaN
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def load_planes(
    ptr, scales_ptr, tokens, context, HEAD_DIM: tl.constexpr, FOLD: tl.constexpr,
    STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """Decoded planes [tokens, HEAD_DIM / FOLD] of one block; what lies beyond the context is zero."""
    width: tl.constexpr = HEAD_DIM // FOLD
    c = tl.arange(0, width)
    ptrs = ptr + tokens[:, None] * STRIDES[1] + c[None, :]
    held = (tokens < context)[:, None]
    if FOLD == 1:
        planes = (tl.load(ptrs, mask=held, other=0.0),)
    else:
        words = tl.load(ptrs)
        groups: tl.constexpr = HEAD_DIM // 64
        group = tl.arange(0, groups)
        # one load a scale, spread in registers: loaded once for each word, they would decide the layout of the words
        scale_ptrs = scales_ptr + tokens[:, None] * SCALE_STRIDES[1] + group[None, :] * SCALE_STRIDES[3]
        # any word is a finite code, but a stale scale may be NaN
        scales = tl.load(scale_ptrs, mask=held, other=0.0)
        spread = tl.broadcast_to(scales[:, :, None], [tokens.shape[0], groups, width // groups])
        scales = tl.reshape(spread, [tokens.shape[0], width])
        if FOLD == 4:
            planes = int8_planes(words, scales, not PORTABLE)
        else:
            planes = e8_planes(words, scales, not PORTABLE)
    return planes


@triton.jit
def multiply(a, b, acc, PORTABLE: tl.constexpr):
    # the interpreter multiplies bf16 wrongly
    if PORTABLE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def load_query(row_ptrs, live, scale, HEAD_DIM: tl.constexpr, FOLD: tl.constexpr, TYPE: tl.constexpr):
    """Query rows as the products take them, and by what a row's products are multiplied, [rows] fp32.

    FOLD planes [rows, HEAD_DIM / FOLD]; against int8 codes, what int8_query returns
    """
    factors = tl.zeros([live.shape[0]], tl.float32) + scale
    planes = ()
    if FOLD == 4:
        planes, largest = int8_query(row_ptrs, live, HEAD_DIM)
        factors *= largest
    else:
        c = FOLD * tl.arange(0, HEAD_DIM // FOLD)
        for j in tl.static_range(FOLD):
            plane = tl.load(row_ptrs[:, None] + (c + j)[None, :], mask=live[:, None], other=0.0)
            planes = planes + (plane.to(TYPE),)
    return planes, factors


@triton.jit
def int8_query(row_ptrs, live, HEAD_DIM: tl.constexpr):
    """x = (high + low / 254) * m / 127, m the largest magnitude of the row: sixteen bits in two int8 products.

    return  high [rows, 64] of each group, then low of each, int8; and m / 127 / 254, [rows] fp32
    """
    dim = tl.arange(0, 64)
    groups = ()
    largest = tl.zeros([live.shape[0]], tl.float32)
    for g in tl.static_range(HEAD_DIM // 64):
        x = tl.load(row_ptrs[:, None] + (64 * g + dim)[None, :], mask=live[:, None], other=0.0).to(tl.float32)
        groups = groups + (x,)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    inverse = tl.where(largest > 0, 127.0 / tl.where(largest > 0, largest, 1.0), 0.0)
    high = ()
    low = ()
    for g in tl.static_range(HEAD_DIM // 64):
        whole = groups[g] * inverse[:, None]
        rounded = round_to_even(whole)
        high = high + (rounded.to(tl.int8),)
        low = low + (round_to_even((whole - rounded) * 254.0).to(tl.int8),)
    return high + low, largest * (1.0 / (127 * 254))


@triton.jit
def load_packed_scales(ptr, tokens, context, HEAD_DIM: tl.constexpr, SCALE_STRIDES: tl.constexpr):
    """All four scales of each token in one number: [tokens] int64. Zero beyond the context, where they may be NaN."""
    tl.static_assert(HEAD_DIM == 256)
    ptrs = ptr.to(tl.pointer_type(tl.int64)) + tokens * (SCALE_STRIDES[1] // 4)
    return tl.load(ptrs, mask=tokens < context, other=0)


@triton.jit
def int8_scores(query, ptr, packed_scales, tokens, HEAD_DIM: tl.constexpr, STRIDES: tl.constexpr):
    """Products of int8_query with the int8 codes of one block, by their scales: [rows, tokens] fp32.

    Within a group they are exact, so that codes need not become numbers first.
    """
    groups: tl.constexpr = HEAD_DIM // 64
    code_ptrs = ptr.to(tl.pointer_type(tl.int8)) + tokens[:, None] * (4 * STRIDES[1]) + tl.arange(0, 64)[None, :]
    scores = tl.zeros([query[0].shape[0], tokens.shape[0]], tl.float32)
    for g in tl.static_range(groups):
        codes = tl.trans(tl.load(code_ptrs + 64 * g))
        high = tl.dot(query[g], codes, out_dtype=tl.int32)
        low = tl.dot(query[groups + g], codes, out_dtype=tl.int32)
        scale = (packed_scales >> (16 * g)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scores += (high * 254 + low).to(tl.float32) * scale[None, :]
    return scores


@triton.jit
def plane_scores(
    query, ptr, scales_ptr, tokens, context, HEAD_DIM: tl.constexpr, FOLD: tl.constexpr,
    STRIDES: tl.constexpr, SCALE_STRIDES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """Products of the query's planes with the decoded keys of one block: [rows, tokens] fp32."""
    keys = load_planes(ptr, scales_ptr, tokens, context, HEAD_DIM, FOLD, STRIDES, SCALE_STRIDES, PORTABLE)
    # sums of their own, so that no plane's product waits for another's
    nothing = tl.zeros([query[0].shape[0], tokens.shape[0]], tl.float32)
    scores = multiply(query[0], tl.trans(keys[0]), nothing, PORTABLE)
    for j in tl.static_range(1, FOLD):
        scores += multiply(query[j], tl.trans(keys[j]), nothing, PORTABLE)
    return scores


@triton.jit
def attend_narrow(
    query, factors, limits, first, last, context, kv_head, table_ptr,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_FOLD: tl.constexpr, VALUE_FOLD: tl.constexpr, KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    KEY_SCALE_STRIDES: tl.constexpr, VALUE_SCALE_STRIDES: tl.constexpr,
    NUM_STAGES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """The same of few rows over any storage and the positions first : last, from nothing seen on.

    query, factors  of load_query
    return          VALUE_FOLD planes [BLOCK_M, HEAD_DIM / VALUE_FOLD], the maximum of the log2 weights and their sum,
                    [BLOCK_M]
    """
    acc = ()
    for _ in tl.static_range(VALUE_FOLD):
        acc = acc + (tl.zeros([BLOCK_M, HEAD_DIM // VALUE_FOLD], tl.float32),)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M, 16], tl.float32)
    token = tl.arange(0, BLOCK_N)
    number: tl.constexpr = values_ptr.dtype.element_ty if VALUE_FOLD == 1 else tl.float16
    ones = tl.full([BLOCK_N, 16], 1.0, number)
    following = tl.load(table_ptr + first // BLOCK_SIZE)
    key_scales_ptr += kv_head * KEY_SCALE_STRIDES[2]
    if KEY_FOLD == 4:
        # likewise one tile ahead, past shared memory
        following_scales = load_packed_scales(
            key_scales_ptr + following.to(tl.int64) * KEY_SCALE_STRIDES[0], first % BLOCK_SIZE + token,
            context - first + first % BLOCK_SIZE, HEAD_DIM, KEY_SCALE_STRIDES,
        )  # fmt: skip
    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        block = following.to(tl.int64)
        next_start = tl.minimum(start + BLOCK_N, last - 1) // BLOCK_N * BLOCK_N
        following = tl.load(table_ptr + next_start // BLOCK_SIZE)
        offsets = start % BLOCK_SIZE + token
        end = context - start + start % BLOCK_SIZE
        key_base = keys_ptr + block * KEY_STRIDES[0] + kv_head * KEY_STRIDES[2]
        if KEY_FOLD == 4:
            scores = int8_scores(query, key_base, following_scales, offsets, HEAD_DIM, KEY_STRIDES)
            following_scales = load_packed_scales(
                key_scales_ptr + following.to(tl.int64) * KEY_SCALE_STRIDES[0], next_start % BLOCK_SIZE + token,
                context - next_start + next_start % BLOCK_SIZE, HEAD_DIM, KEY_SCALE_STRIDES,
            )  # fmt: skip
        else:
            scores = plane_scores(
                query, key_base, key_scales_ptr + block * KEY_SCALE_STRIDES[0], offsets, end,
                HEAD_DIM, KEY_FOLD, KEY_STRIDES, KEY_SCALE_STRIDES, PORTABLE,
            )  # fmt: skip
        scores = tl.where((start + token)[None, :] < limits[:, None], scores * factors[:, None], float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None]).to(number)
        shrink = tl.exp2(highest - higher)
        highest = higher
        total = multiply(weights, ones, total * shrink[:, None], PORTABLE)
        values = load_planes(
            values_ptr + block * VALUE_STRIDES[0] + kv_head * VALUE_STRIDES[2],
            value_scales_ptr + block * VALUE_SCALE_STRIDES[0] + kv_head * VALUE_SCALE_STRIDES[2],
            offsets, end, HEAD_DIM, VALUE_FOLD, VALUE_STRIDES, VALUE_SCALE_STRIDES, PORTABLE,
        )  # fmt: skip
        grown = ()
        for j in tl.static_range(VALUE_FOLD):
            grown = grown + (multiply(weights, values[j], acc[j] * shrink[:, None], PORTABLE),)
        acc = grown
    return acc, highest, tl.max(total, axis=1)


@triton.jit
def prefetch_block(
    ptr, block, kv_head, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, FOLD: tl.constexpr, STRIDES: tl.constexpr
):
    """Asks for a KV head's part of a block."""
    token_bytes: tl.constexpr = HEAD_DIM // FOLD * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    byte = 128 * tl.arange(0, BLOCK_SIZE * token_bytes // 128)
    elements = byte // token_bytes * STRIDES[1] + byte % token_bytes // (token_bytes * FOLD // HEAD_DIM)
    prefetch(ptr + block * STRIDES[0] + kv_head * STRIDES[2] + elements)
