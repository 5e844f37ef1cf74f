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
from engine.ops.kv_codec_int8 import int8_planes

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
def attend_wide(
    query, acc, highest, total, limits, last, context, scale, kv_head, table_ptr, keys_ptr, values_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, NUM_STAGES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """Online softmax of many rows over the positions below last of plain numbers, continued.

    Positions count from the first block of the table. Row i sees those below limits[i]. A tile of which a row sees
    nothing leaves that row's results as they were, bit for bit: the weights are zero and the maximum stays.

    query                [BLOCK_M, HEAD_DIM]
    acc, highest, total  [BLOCK_M, HEAD_DIM], the maximum of the log2 weights and their sum, [BLOCK_M]; 0, LOWEST and 0
                         before anything is seen
    return               the same with these positions
    """
    token = tl.arange(0, BLOCK_N)
    number: tl.constexpr = values_ptr.dtype.element_ty
    # a product with ones, so that the order of the sum is that of the tensor cores
    ones = tl.full([BLOCK_N, 16], 1.0, number)
    total = tl.broadcast_to(total[:, None], [BLOCK_M, 16])
    # one tile ahead: a table entry read where it is used would take a stage of the pipeline from the tiles
    following = tl.load(table_ptr)
    for start in tl.range(0, last, BLOCK_N, num_stages=NUM_STAGES):
        block = following.to(tl.int64)
        following = tl.load(table_ptr + tl.minimum(start + BLOCK_N, last - 1) // BLOCK_SIZE)
        offsets = start % BLOCK_SIZE + token
        # positions within the block at which the context ends
        end = context - start + start % BLOCK_SIZE
        key_base = keys_ptr + block * KEY_STRIDES[0] + kv_head * KEY_STRIDES[2]
        keys = load_planes(key_base, key_base, offsets, end, HEAD_DIM, 1, KEY_STRIDES, KEY_STRIDES, PORTABLE)
        scores = multiply(query, tl.trans(keys[0]), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PORTABLE)
        scores = tl.where((start + token)[None, :] < limits[:, None], scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None]).to(number)
        shrink = tl.exp2(highest - higher)
        highest = higher
        total = multiply(weights, ones, total * shrink[:, None], PORTABLE)
        value_base = values_ptr + block * VALUE_STRIDES[0] + kv_head * VALUE_STRIDES[2]
        values = load_planes(value_base, value_base, offsets, end, HEAD_DIM, 1, VALUE_STRIDES, VALUE_STRIDES, PORTABLE)
        acc = multiply(weights, values[0], acc * shrink[:, None], PORTABLE)
    # all columns are the same sum
    return acc, highest, tl.max(total, axis=1)


@triton.jit
def load_query(row_ptrs, live, HEAD_DIM: tl.constexpr, FOLD: tl.constexpr, TYPE: tl.constexpr):
    """FOLD planes [rows, HEAD_DIM / FOLD] of the query, in the type of the products."""
    c = FOLD * tl.arange(0, HEAD_DIM // FOLD)
    planes = ()
    for j in tl.static_range(FOLD):
        plane = tl.load(row_ptrs[:, None] + (c + j)[None, :], mask=live[:, None], other=0.0)
        planes = planes + (plane.to(TYPE),)
    return planes


@triton.jit
def attend_narrow(
    query, limits, first, last, context, scale, kv_head, table_ptr,
    keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_FOLD: tl.constexpr, VALUE_FOLD: tl.constexpr, KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    KEY_SCALE_STRIDES: tl.constexpr, VALUE_SCALE_STRIDES: tl.constexpr,
    NUM_STAGES: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """The same of few rows over any storage and the positions first : last, from nothing seen on.

    query   KEY_FOLD planes [BLOCK_M, HEAD_DIM / KEY_FOLD]
    return  VALUE_FOLD planes [BLOCK_M, HEAD_DIM / VALUE_FOLD], the maximum of the log2 weights and their sum, [BLOCK_M]
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
    for start in tl.range(first, last, BLOCK_N, num_stages=NUM_STAGES):
        block = following.to(tl.int64)
        following = tl.load(table_ptr + tl.minimum(start + BLOCK_N, last - 1) // BLOCK_SIZE)
        offsets = start % BLOCK_SIZE + token
        end = context - start + start % BLOCK_SIZE
        keys = load_planes(
            keys_ptr + block * KEY_STRIDES[0] + kv_head * KEY_STRIDES[2],
            key_scales_ptr + block * KEY_SCALE_STRIDES[0] + kv_head * KEY_SCALE_STRIDES[2],
            offsets, end, HEAD_DIM, KEY_FOLD, KEY_STRIDES, KEY_SCALE_STRIDES, PORTABLE,
        )  # fmt: skip
        # sums of their own, so that no plane's product waits for another's
        nothing = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = multiply(query[0], tl.trans(keys[0]), nothing, PORTABLE)
        for j in tl.static_range(1, KEY_FOLD):
            scores += multiply(query[j], tl.trans(keys[j]), nothing, PORTABLE)
        scores = tl.where((start + token)[None, :] < limits[:, None], scores * scale, float("-inf"))
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
