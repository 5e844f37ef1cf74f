"""The gated delta rule over a prompt's rows on the matrix units, committed to the state at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
import triton
import triton.language as tl

from engine.ops.delta_state import DeltaWeights, Keep
from engine.ops.gated_delta_chunked import gated_delta_chunked_reference
from engine.ops.gated_delta_gates import gated_delta_gates_reference, log_decay
from engine.ops.launch import capability_of, cdiv, is_interpreted, next_power_of_2, plain_options

CHUNK = 64
# rows of a request between two launches: what they leave for each other stays in the L2 cache
SEGMENT = 1024
# one compilation for any number of requests up to this
REQUESTS = 64


def gated_delta_prefill(
    convolved: torch.Tensor,
    inverse_norms: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_rows: Sequence[int],
    keeps: Sequence[Keep] = (),
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gated delta rule, from the state of each request's slot.

    convolved      [rows, channels]  query|key|value
    inverse_norms  [rows, 2 * key_heads] fp32  what each query and key is multiplied by for unit length
    a, b           [rows, value_heads]  of the gates
    state          [slots, value_heads, dim, dim] fp32
    state_slots    [requests] int64, all different
    query_starts   [requests + 1] int32
    num_rows       of each request
    kept           [copies, value_heads, dim, dim] fp32, where there are keeps
    return         [rows, value_heads, dim] fp32, the same bits wherever a prompt is cut at a multiple of CHUNK rows
    writes         state of those slots, as it is after each request's last row; kept, as `keeps` say
    """
    parts = (convolved, inverse_norms, a, b, weights, state, state_slots, query_starts, num_rows, keeps, kept)
    # products of bf16 are exact on the matrix units, those of fp32 are not
    if convolved.is_cuda and convolved.dtype == torch.bfloat16:
        return gated_delta_prefill_triton(*parts)
    return gated_delta_prefill_reference(*parts)


def gated_delta_prefill_reference(
    convolved: torch.Tensor,
    inverse_norms: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_rows: Sequence[int],
    keeps: Sequence[Keep] = (),
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    query, key, value = (x.to(inverse_norms.dtype) for x in weights.heads(convolved))
    query_factors, key_factors = inverse_norms.unsqueeze(-1).chunk(2, dim=1)
    gates = gated_delta_gates_reference(a, b, weights.decay, weights.dt_bias)
    rows = (query * query_factors, key * key_factors, value, *gates)
    parts = list(zip(*(x.split(num_rows) for x in rows), strict=True))
    outputs = [[] for _ in num_rows]
    for start, end, keep in pieces_of(num_rows, keeps):
        for request, part in enumerate(parts):
            piece = [x[start:end] for x in part]
            if count := len(piece[0]):
                slot = state_slots[request : request + 1]
                outputs[request].append(gated_delta_chunked_reference(*piece, state, slot, [count]))
        for request, index in enumerate(keep.indices if keep else ()):
            if index >= 0:
                kept[index] = state[state_slots[request]]
    return torch.cat(list(chain.from_iterable(outputs)))


def pieces_of(
    num_rows: Sequence[int], keeps: Sequence[Keep], segment: int | None = None
) -> Iterator[tuple[int, int, Keep | None]]:
    """Rows of each request, from one up to another, that are run before the state is kept as it is then.

    segment  a piece has no more rows
    """
    longest = max(num_rows)
    by_end = {keep.num_rows: keep for keep in keeps}
    edges = {*by_end, *range(0, longest, segment or longest), longest}
    for start, end in pairwise(sorted(edges)):
        yield start, end, by_end.get(end)


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """How the scan is cut: value dimensions a program, warps of each kernel, and tiles in flight."""

    values: int
    chunk_warps: int
    scan_warps: int
    num_stages: int


def prefill_shape_for(capability: tuple[int, int]) -> PrefillShape:
    """Cards with 100 KB of shared memory per multiprocessor keep one chunk of tiles at a time."""
    is_large = capability in ((8, 0), (9, 0), (10, 0))
    return PrefillShape(values=64, chunk_warps=4, scan_warps=4, num_stages=2 if is_large else 1)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What the chunks of a segment leave for the scan over them; bf16 in two parts, the second what the first lacks.

    stale    [2, chunks, value_heads, CHUNK, dim] bf16   u = fresh - stale S
    within   [2, chunks, value_heads, CHUNK, CHUNK] bf16  what u of earlier rows of the chunk adds to a row's output
    fresh    [chunks, value_heads, dim, CHUNK] fp32
    factors  [chunks, value_heads, 3, CHUNK] fp32  of what a query reads from S, of a key that is written, of S itself
    """

    stale: torch.Tensor
    within: torch.Tensor
    fresh: torch.Tensor
    factors: torch.Tensor

    @classmethod
    def empty(cls, chunks: int, heads: int, dim: int, device: torch.device) -> "Chunks":
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            stale=empty(2, chunks, heads, CHUNK, dim, dtype=torch.bfloat16),
            within=empty(2, chunks, heads, CHUNK, CHUNK, dtype=torch.bfloat16),
            fresh=empty(chunks, heads, dim, CHUNK),
            factors=empty(chunks, heads, 3, CHUNK),
        )


def gated_delta_prefill_triton(
    convolved: torch.Tensor,
    inverse_norms: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    weights: DeltaWeights,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_rows: Sequence[int],
    keeps: Sequence[Keep] = (),
    kept: torch.Tensor | None = None,
    shape: PrefillShape | None = None,
    segment: int = SEGMENT,
) -> torch.Tensor:
    heads, dim, device = weights.value_heads, weights.dim, convolved.device
    assert dim == 128 and convolved.is_contiguous() and inverse_norms.is_contiguous() and state.is_contiguous()
    assert a.stride() == b.stride() and a.stride(1) == 1
    assert not keeps or kept[0].is_contiguous()
    shape = shape or prefill_shape_for(capability_of(device) if convolved.is_cuda else (8, 6))
    chunks = Chunks.empty(sum(-(-min(rows, segment) // CHUNK) for rows in num_rows), heads, dim, device)
    output = torch.empty(len(convolved), heads, dim, device=device)
    common = {
        "KEY_HEADS": weights.key_heads,
        "GROUP": heads // weights.key_heads,
        "REQUESTS": max(REQUESTS, next_power_of_2(len(num_rows))),
        "PORTABLE": is_interpreted(),
    }
    for start, end, keep in pieces_of(num_rows, keeps, segment):
        delta_chunks_kernel[(cdiv(end - start, CHUNK), heads, len(num_rows))](
            convolved, inverse_norms, a, b, weights.decay, weights.dt_bias, query_starts, chunks.stale, chunks.within,
            chunks.fresh, chunks.factors, start, end - start, a.stride(0), chunks.stale.stride(0),
            chunks.within.stride(0), len(num_rows), **common, **plain_options(shape.chunk_warps),
        )  # fmt: skip
        # where nothing is kept these are not looked at, but of the same types: a kernel is compiled for them
        copies, indices = (kept, keep.on_device) if keep else (state, state_slots)
        delta_scan_kernel[(dim // shape.values, heads, len(num_rows))](
            convolved, state, state_slots, query_starts, chunks.stale, chunks.within, chunks.fresh, chunks.factors,
            output, copies, indices, start, end - start, chunks.stale.stride(0), chunks.within.stride(0),
            copies.stride(0), int(keep is not None), len(num_rows), VALUES=shape.values, NUM_STAGES=shape.num_stages,
            **common, **plain_options(shape.scan_warps),
        )  # fmt: skip
    return output


@triton.jit
def to_bf16(x, PORTABLE: tl.constexpr):
    """Rounded to nearest, where the interpreter cuts off."""
    if PORTABLE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def in_two_parts(x, PORTABLE: tl.constexpr):
    """bf16 high and low: together 16 bits of x."""
    high = to_bf16(x, PORTABLE)
    return high, to_bf16(x - high.to(tl.float32), PORTABLE)


@triton.jit
def multiply(a, b, acc, PORTABLE: tl.constexpr):
    """acc + a b of bf16 tiles, in fp32."""
    if PORTABLE:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def rows_of_piece(starts_ptr, requests, start, size, REQUESTS: tl.constexpr):
    """Of the program's request: first row, rows from there on, and its first chunk among those of all requests."""
    number = tl.arange(0, REQUESTS)
    is_one = number < requests
    begins = tl.load(starts_ptr + number, mask=is_one, other=0)
    rows = tl.load(starts_ptr + number + 1, mask=is_one, other=0) - begins
    rows = tl.minimum(tl.maximum(rows - start, 0), size)
    request = tl.program_id(2)
    first_chunk = tl.sum(tl.where(number < request, (rows + 63) // 64, 0), axis=0)
    mine = number == request
    first_row = tl.sum(tl.where(mine, begins, 0), axis=0) + start
    return first_row, tl.sum(tl.where(mine, rows, 0), axis=0), first_chunk


@triton.jit
def inverse_of_blocks(lower):
    """Of I + lower [64, 64], lower strictly below the diagonal, the inverses of its diagonal blocks of 16 rows."""
    block, row = tl.arange(0, 4), tl.arange(0, 16)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = -tl.sum(tl.where(on_diagonal, tl.reshape(lower, [4, 16, 4, 16]), 0.0), axis=2)
    inverse = blocks
    for i in range(2, 16):
        is_row = (row == i)[None, :, None]
        taken = tl.sum(tl.where(is_row, blocks, 0.0), axis=1)
        solved = taken + tl.sum(taken[:, :, None] * inverse, axis=1)
        inverse = tl.where(is_row, solved[:, None, :], inverse)
    inverse += tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
    return tl.reshape(tl.where(on_diagonal, inverse[:, :, None, :], 0.0), [64, 64])


@triton.jit
def join_blocks(inverse, lower):
    """[[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']]: `lower` holds C, `inverse` A' and B'."""
    right = tl.dot(lower, inverse, input_precision="tf32x3")
    return inverse - tl.dot(inverse, right, input_precision="tf32x3")


@triton.jit
def inverse_of_unit_lower(lower):
    """(I + lower)' [64, 64], lower strictly below the diagonal."""
    row = tl.arange(0, 64)
    same_16 = (row // 16)[:, None] == (row // 16)[None, :]
    same_32 = (row // 32)[:, None] == (row // 32)[None, :]
    inverse = inverse_of_blocks(lower)
    inverse = join_blocks(inverse, tl.where(same_32 & (same_16 == 0), lower, 0.0))
    return join_blocks(inverse, tl.where(same_32, 0.0, lower))


@triton.jit(do_not_specialize=["start", "size", "gates_stride", "stale_stride", "within_stride", "requests"])
def delta_chunks_kernel(
    x_ptr, norms_ptr, a_ptr, b_ptr, decay_ptr, dt_bias_ptr, starts_ptr, stale_ptr, within_ptr, fresh_ptr, factors_ptr,
    start, size, gates_stride, stale_stride, within_stride, requests,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, REQUESTS: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """Everything of one chunk and value head that does not need the state.

    u solves (I + A) u = beta v - beta exp(d) S k with A[i, j] = beta_i exp(d_i - d_j) k_i . k_j below the diagonal,
    where d are the sums of log alpha from the chunk's start."""
    dim: tl.constexpr = 128
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = (2 * KEY_HEADS + value_heads) * dim
    chunk, head = tl.program_id(0), tl.program_id(1)
    first_row, rows, first_chunk = rows_of_piece(starts_ptr, requests, start, size, REQUESTS)
    if chunk * 64 < rows:
        key_head = head // GROUP
        lane, column = tl.arange(0, 64), tl.arange(0, dim)
        row = (first_row + chunk * 64 + lane).to(tl.int64)
        live = chunk * 64 + lane < rows
        at = x_ptr + row[:, None] * channels + column[None, :]
        query = tl.load(at + key_head * dim, mask=live[:, None], other=0.0)
        key = tl.load(at + (KEY_HEADS + key_head) * dim, mask=live[:, None], other=0.0)
        value = tl.load(at + (2 * KEY_HEADS + head) * dim, mask=live[:, None], other=0.0)
        norms_at = norms_ptr + row * (2 * KEY_HEADS) + key_head
        query_norm = tl.load(norms_at, mask=live, other=0.0) * 0.08838834764831845
        key_norm = tl.load(norms_at + KEY_HEADS, mask=live, other=0.0)
        a = tl.load(a_ptr + row * gates_stride + head, mask=live, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * gates_stride + head, mask=live, other=0.0).to(tl.float32)
        log_alpha = log_decay(a, tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head))
        beta = tl.where(live, tl.sigmoid(b), 0.0)
        decay = tl.cumsum(tl.where(live, log_alpha, 0.0), axis=0)
        is_causal = lane[:, None] >= lane[None, :]
        between = tl.exp(tl.where(is_causal, decay[:, None] - decay[None, :], float("-inf"))) * key_norm[None, :]
        zeros = tl.zeros([64, 64], tl.float32)
        lower = multiply(key, tl.trans(key), zeros, PORTABLE) * between * (beta * key_norm)[:, None]
        lower = tl.where(lane[:, None] > lane[None, :], lower, 0.0)
        inverse = inverse_of_unit_lower(lower) * beta[None, :]

        slot = (first_chunk + chunk).to(tl.int64) * value_heads + head
        square = lane[:, None] * 64 + lane[None, :]
        within = multiply(query, tl.trans(key), zeros, PORTABLE) * between * query_norm[:, None]
        high, low = in_two_parts(within, PORTABLE)
        tl.store(within_ptr + slot * (64 * 64) + square, high)
        tl.store(within_ptr + within_stride + slot * (64 * 64) + square, low)
        high, low = in_two_parts(tl.trans(inverse), PORTABLE)
        fresh = multiply(tl.trans(value), high, tl.zeros([dim, 64], tl.float32), PORTABLE)
        fresh = multiply(tl.trans(value), low, fresh, PORTABLE)
        tl.store(fresh_ptr + slot * (dim * 64) + column[:, None] * 64 + lane[None, :], fresh)
        high, low = in_two_parts(inverse * (tl.exp(decay) * key_norm)[None, :], PORTABLE)
        stale = multiply(high, key, tl.zeros([64, dim], tl.float32), PORTABLE)
        stale = multiply(low, key, stale, PORTABLE)
        high, low = in_two_parts(stale, PORTABLE)
        wide = slot * (64 * dim) + lane[:, None] * dim + column[None, :]
        tl.store(stale_ptr + wide, high)
        tl.store(stale_ptr + stale_stride + wide, low)
        last = tl.sum(tl.where(lane == 63, decay, 0.0), axis=0)
        factors_at = factors_ptr + slot * (3 * 64) + lane
        tl.store(factors_at, tl.exp(decay) * query_norm)
        tl.store(factors_at + 64, tl.exp(last - decay) * key_norm)
        tl.store(factors_at + 128, tl.exp(last + tl.zeros_like(decay)))


@triton.jit(
    do_not_specialize=["start", "size", "stale_stride", "within_stride", "copies_stride", "has_copies", "requests"]
)
def delta_scan_kernel(
    x_ptr, state_ptr, slots_ptr, starts_ptr, stale_ptr, within_ptr, fresh_ptr, factors_ptr, y_ptr, copies_ptr,
    indices_ptr, start, size, stale_stride, within_stride, copies_stride, has_copies, requests,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, REQUESTS: tl.constexpr, PORTABLE: tl.constexpr,
    VALUES: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Chunk after chunk, some value dimensions of one head: everything is transposed, [values, ...], so that state and
    u go from one product into the next without leaving their registers."""
    dim: tl.constexpr = 128
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = (2 * KEY_HEADS + value_heads) * dim
    part, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, rows, first_chunk = rows_of_piece(starts_ptr, requests, start, size, REQUESTS)
    if rows > 0:
        key_head = head // GROUP
        lane, column = tl.arange(0, 64), tl.arange(0, dim)
        values = part * VALUES + tl.arange(0, VALUES)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        tile = head * (dim * dim) + values[:, None] * dim + column[None, :]
        state_at = state_ptr + slot * (value_heads * dim * dim) + tile
        state = tl.load(state_at)
        x_at = x_ptr + first_row.to(tl.int64) * channels + key_head * dim + lane[:, None] * channels + column[None, :]
        y_at = y_ptr + (first_row.to(tl.int64) * value_heads + head) * dim
        first_slot = first_chunk.to(tl.int64) * value_heads + head
        wide = lane[:, None] * dim + column[None, :]
        square = lane[:, None] * 64 + lane[None, :]
        for chunk in tl.range(0, (rows + 63) // 64, num_stages=NUM_STAGES):
            live = (chunk * 64 + lane < rows)[:, None]
            here = first_slot + chunk * value_heads
            row_at = x_at + chunk * (64 * channels)
            query = tl.load(row_at, mask=live, other=0.0)
            key = tl.load(row_at + KEY_HEADS * dim, mask=live, other=0.0)
            stale = tl.load(stale_ptr + here * (64 * dim) + wide)
            stale_low = tl.load(stale_ptr + stale_stride + here * (64 * dim) + wide)
            within = tl.load(within_ptr + here * (64 * 64) + square)
            within_low = tl.load(within_ptr + within_stride + here * (64 * 64) + square)
            fresh = tl.load(fresh_ptr + here * (dim * 64) + values[:, None] * 64 + lane[None, :])
            # before the products, behind which nobody would wait for them
            factors_at = factors_ptr + here * (3 * 64)
            query_factors, key_factors = tl.load(factors_at + lane), tl.load(factors_at + 64 + lane)
            kept = tl.load(factors_at + 128)
            high, low = in_two_parts(state, PORTABLE)
            taken = multiply(high, tl.trans(stale), tl.zeros([VALUES, 64], tl.float32), PORTABLE)
            taken = multiply(high, tl.trans(stale_low), taken, PORTABLE)
            taken = multiply(low, tl.trans(stale), taken, PORTABLE)
            output = multiply(high, tl.trans(query), tl.zeros([VALUES, 64], tl.float32), PORTABLE)
            output = multiply(low, tl.trans(query), output, PORTABLE)
            output = output * query_factors[None, :]
            u = fresh - taken
            high, low = in_two_parts(u, PORTABLE)
            output = multiply(high, tl.trans(within), output, PORTABLE)
            output = multiply(high, tl.trans(within_low), output, PORTABLE)
            output = multiply(low, tl.trans(within), output, PORTABLE)
            target = y_at + (chunk * 64 + lane)[None, :] * (value_heads * dim) + values[:, None]
            tl.store(target, output, mask=(chunk * 64 + lane < rows)[None, :])
            high, low = in_two_parts(u * key_factors[None, :], PORTABLE)
            state = state * kept
            state = multiply(high, key, state, PORTABLE)
            state = multiply(low, key, state, PORTABLE)
        tl.store(state_at, state)
        if has_copies > 0:
            index = tl.load(indices_ptr + request).to(tl.int64)
            if index >= 0:
                tl.store(copies_ptr + index * copies_stride + tile, state)
