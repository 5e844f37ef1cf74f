"""All of Gated DeltaNet between its two products for rows that may be taken back, in one launch."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine.ops.causal_conv import causal_conv_reference
from engine.ops.delta_state import DeltaState, DeltaWeights
from engine.ops.gated_delta_fold import (
    fold_rows,
    gated_delta_fold_reference,
    key_offsets,
    tile_offsets,
    write_row,
)
from engine.ops.gated_delta_gates import gated_delta_gates_reference, log_decay
from engine.ops.gated_delta_recurrent import gated_delta_recurrent_reference
from engine.ops.gated_rms_norm import gated_rms_norm_reference
from engine.ops.l2_norm import l2_norm_reference
from engine.ops.quantize_rows import QuantizedRows, empty_rows, quantize_rows_reference, store_rounded
from engine.ops.quantized_dot import has_dependent_launch, launch_options

NUM_WARPS = 8


def gated_delta_decode(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
) -> torch.Tensor:
    """gated_rms_norm(o, z) of the gated delta rule over the convolved and normalised parts of the rows.

    projected     [rows, channels + value_heads * dim + 2 * value_heads]  query|key|value, z, a, b
    state_slots   [requests] int64, all different
    query_starts  [requests + 1] int32
    num_accepted  [requests] int32  pending rows of the pass before that are committed first
    return        [rows, value_heads * dim]  dtype of projected
    writes        of those slots: the accepted rows into the state, the inputs moved on by as many; the new rows pending
    bounds        at most MAX_PENDING_ROWS rows per request; state_slots and num_accepted have to be final before the
                  kernels of the pass begin to overlap: they and the memory are read while the one before this ends
    """
    parts = (projected, weights, memory, state_slots, query_starts, num_accepted, num_rows)
    if projected.is_cuda:
        return gated_delta_decode_triton(*parts)
    return gated_delta_decode_reference(*parts)


def gated_delta_decode_rounded(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
) -> QuantizedRows:
    """The same, rounded by quantize_rows."""
    parts = (projected, weights, memory, state_slots, query_starts, num_accepted, num_rows)
    if projected.is_cuda:
        return gated_delta_decode_rounded_triton(*parts)
    return gated_delta_decode_rounded_reference(*parts)


def gated_delta_decode_reference(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
) -> torch.Tensor:
    gated_delta_fold_reference(memory, state_slots, num_accepted)
    mixed, z, a, b = weights.split(projected)
    convolved = causal_conv_reference(mixed, weights.conv, memory.inputs, state_slots, num_rows, commits=False)
    query, key, value = weights.heads(convolved)
    gates = gated_delta_gates_reference(a, b, weights.decay, weights.dt_bias)
    unit = (l2_norm_reference(x) for x in (query, key))
    attended = gated_delta_recurrent_reference(*unit, value.to(gates[0].dtype), *gates, memory, state_slots, num_rows)
    z = z.unflatten(-1, (weights.value_heads, -1))
    return gated_rms_norm_reference(attended, z, weights.norm, weights.eps).flatten(1)


def gated_delta_decode_rounded_reference(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
) -> QuantizedRows:
    return quantize_rows_reference(
        gated_delta_decode_reference(projected, weights, memory, state_slots, query_starts, num_accepted, num_rows)
    )


def gated_delta_decode_triton(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
) -> torch.Tensor:
    y = projected.new_empty(len(projected), weights.value_heads * weights.dim)
    _launch(projected, weights, memory, state_slots, query_starts, num_accepted, num_rows, (y, y, y), False)
    return y


def gated_delta_decode_rounded_triton(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
) -> QuantizedRows:
    y = empty_rows(len(projected), weights.value_heads * weights.dim, projected.device)
    outputs = (y.values, y.scales, y.sums)
    _launch(projected, weights, memory, state_slots, query_starts, num_accepted, num_rows, outputs, True)
    return y


def _launch(
    projected: torch.Tensor,
    weights: DeltaWeights,
    memory: DeltaState,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_accepted: torch.Tensor,
    num_rows: Sequence[int],
    outputs: tuple[torch.Tensor, ...],
    is_rounded: bool,
) -> None:
    pending = memory.pending_key.shape[1]
    assert weights.dim == 128 and weights.conv.shape[1] == 4 and max(num_rows) <= pending
    assert projected.stride(1) == 1 and weights.conv.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in memory.tensors())
    device = projected.device
    gated_delta_decode_kernel[(weights.value_heads, len(num_rows))](
        projected, weights.conv, weights.decay, weights.dt_bias, weights.norm, *memory.tensors(), state_slots,
        query_starts, num_accepted, *outputs, projected.stride(0), weights.eps, KEY_HEADS=weights.key_heads,
        GROUP=weights.value_heads // weights.key_heads, PENDING=pending, IS_ROUNDED=is_rounded,
        PDL=has_dependent_launch(device), **launch_options(device, NUM_WARPS),
    )  # fmt: skip


@triton.jit
def pick(pair, is_it, AXIS: tl.constexpr):
    """One of two along an axis; adding zeros changes nothing."""
    return tl.sum(tl.where(is_it, pair, 0.0), axis=AXIS)


@triton.jit
def load_taps(at, stride, mask):
    """The three inputs of the convolution from a row on."""
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + stride, mask=mask, other=0.0)
    return first, second, tl.load(at + 2 * stride, mask=mask, other=0.0)


@triton.jit
def store_taps(at, stride, first, second, third, mask):
    tl.store(at, first, mask=mask)
    tl.store(at + stride, second, mask=mask)
    tl.store(at + 2 * stride, third, mask=mask)


@triton.jit
def load_factors(at, mask):
    """Of the convolution; where it is masked, those that change nothing."""
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + 1, mask=mask, other=0.0)
    third = tl.load(at + 2, mask=mask, other=0.0)
    return first, second, third, tl.load(at + 3, mask=mask, other=1.0)


@triton.jit
def convolve(first, second, third, x, factors):
    y = first * factors[0] + second * factors[1] + third * factors[2] + x * factors[3]
    return y * tl.sigmoid(y)


@triton.jit
def times_vector(tile, vector):
    """Sums over the key dimension: tile [DIM, DIM / 32, 32] times vector [DIM / 32, 32] -> [DIM]."""
    return tl.sum(tl.sum(tile * vector[None, :, :], axis=1), axis=1)


@triton.jit(do_not_specialize=["x_stride"])
def gated_delta_decode_kernel(
    x_ptr, conv_ptr, decay_ptr, dt_bias_ptr, norm_ptr, state_ptr, inputs_ptr, keys_ptr, u_ptr, alpha_ptr, arrivals_ptr,
    slots_ptr, starts_ptr, accepted_ptr, y_ptr, scales_ptr, sums_ptr, x_stride, eps,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PENDING: tl.constexpr, IS_ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One value head of one request. What its key head's value heads share is written by the last of them to have
    read it: which one that is depends on arrival, what it writes does not."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dim: tl.constexpr = 128
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = (2 * KEY_HEADS + value_heads) * dim
    head, request = tl.program_id(0), tl.program_id(1)
    key_head = head // GROUP
    slot = tl.load(slots_ptr + request).to(tl.int64)
    count = tl.minimum(tl.maximum(tl.load(accepted_ptr + request), 0), PENDING)
    keys_ptr += slot * (PENDING * KEY_HEADS * dim) + key_head * dim
    u_ptr += slot * (PENDING * value_heads * dim) + head * dim
    alpha_ptr += slot * (PENDING * value_heads) + head
    arrivals_ptr += slot * KEY_HEADS + key_head
    inputs_ptr += slot * ((3 + PENDING) * channels)
    lane, lanes = tl.arange(0, dim), key_offsets(dim)
    half, half_own = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[:, None]
    # query and key [dim / 32, 2, 32]; value and z [2, dim], where z passes the convolution for its silu alone
    shared = (half * KEY_HEADS + key_head) * dim + lanes[:, None, :]
    own = ((2 + half_own * GROUP) * KEY_HEADS + head) * dim + lane[None, :]
    is_shared, is_mixed = shared >= 0, own < channels
    before = inputs_ptr + count * channels
    first, second, third = load_taps(before + shared, channels, is_shared)
    first_own, second_own, third_own = load_taps(before + own, channels, is_mixed)

    state_at = state_ptr + (slot * value_heads + head) * (dim * dim) + tile_offsets(dim)
    tile = fold_rows(tl.load(state_at), keys_ptr, u_ptr, alpha_ptr, count, KEY_HEADS, value_heads)
    if count > 0:
        tl.store(state_at, tile)
    factors, factors_own = load_factors(conv_ptr + shared * 4, is_shared), load_factors(conv_ptr + own * 4, is_mixed)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    weight = tl.load(norm_ptr + lane)
    # all threads have read what is overwritten below
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr, 1) == GROUP - 1
    if is_last:
        tl.store(arrivals_ptr, 0)
        store_taps(inputs_ptr + shared, channels, first, second, third, is_shared)
    store_taps(inputs_ptr + own, channels, first_own, second_own, third_own, is_mixed)

    if PDL:
        tl.extra.cuda.gdc_wait()
    first_row = tl.load(starts_ptr + request).to(tl.int64)
    rows = tl.minimum((tl.load(starts_ptr + request + 1) - first_row).to(tl.int32), PENDING)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    for t in range(rows):
        row = first_row + t
        x_row = x_ptr + row * x_stride
        x, x_own = tl.load(x_row + shared).to(tl.float32), tl.load(x_row + own).to(tl.float32)
        a = tl.load(x_row + (channels + value_heads * dim) + head).to(tl.float32)
        b = tl.load(x_row + (channels + value_heads * (dim + 1)) + head).to(tl.float32)
        alpha, beta = tl.exp(log_decay(a, decay, dt_bias)), tl.sigmoid(b)
        convolved = convolve(first, second, third, x, factors).to(kind).to(tl.float32)
        length = tl.rsqrt(tl.sum(tl.sum(convolved * convolved, axis=2), axis=0) + 1e-6)
        unit = convolved * (length[None, :, None] * tl.where(half == 0, 0.08838834764831845, 1.0))
        query, key = pick(unit, half == 0, 1), pick(unit, half == 1, 1)
        convolved = convolve(first_own, second_own, third_own, x_own, factors_own)
        value, gate = pick(convolved, half_own == 0, 0).to(kind).to(tl.float32), pick(convolved, half_own == 1, 0)
        # both products of a row in one reading of the state, before it decays
        u = beta * value - alpha * beta * times_vector(tile, key)
        output = alpha * times_vector(tile, query) + u * tl.sum(tl.sum(query * key, axis=1), axis=0)
        if t + 1 < rows:
            tile = write_row(tile, alpha, u, key)
        scale = tl.rsqrt(tl.sum(output * output, axis=0) / dim + eps)
        y = (output * scale * weight * gate).to(kind)
        if IS_ROUNDED:
            wide = tl.reshape(y.to(tl.float32), [dim // 64, 64])
            groups: tl.constexpr = value_heads * (dim // 64)
            store_rounded(wide, y_ptr, scales_ptr, sums_ptr, row, head * (dim // 64), groups, dim // 64)
        else:
            tl.store(y_ptr + row * (value_heads * dim) + head * dim + lane, y)
        tl.store(u_ptr + t * (value_heads * dim) + lane, u)
        tl.store(alpha_ptr + t * value_heads, alpha)
        new = inputs_ptr + (3 + t) * channels
        tl.store(new + own, x_own, mask=is_mixed)
        if is_last:
            tl.store(keys_ptr + t * (KEY_HEADS * dim) + lanes, key)
            tl.store(new + shared, x)
        first, second, third = second, third, x
        first_own, second_own, third_own = second_own, third_own, x_own
