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
    scratch = torch.empty(len(num_rows), weights.value_heads, pending, 5, weights.dim, device=device)
    gated_delta_decode_kernel[(weights.value_heads, len(num_rows))](
        projected, weights.conv, weights.decay, weights.dt_bias, weights.norm, *memory.tensors(), state_slots,
        query_starts, num_accepted, scratch, *outputs, projected.stride(0), weights.eps, KEY_HEADS=weights.key_heads,
        GROUP=weights.value_heads // weights.key_heads, PENDING=pending, IS_ROUNDED=is_rounded,
        PDL=has_dependent_launch(device), **launch_options(device, NUM_WARPS),
    )  # fmt: skip


@triton.jit
def load_past(inputs_at, t, BACK: tl.constexpr, channels):
    """The input BACK rows before row t [PENDING, DIM], where that is one from before the pass."""
    source = t - BACK
    return tl.load(inputs_at + (source + 3) * channels, mask=source < 0, other=0.0)


@triton.jit
def load_all_past(inputs_at, t, channels):
    third = load_past(inputs_at, t, 3, channels)
    return third, load_past(inputs_at, t, 2, channels), load_past(inputs_at, t, 1, channels)


@triton.jit
def load_row(x_at, t, rows, BACK: tl.constexpr, x_stride):
    """The input BACK rows before row t, where it is one of the pass."""
    source = t - BACK
    return tl.load(x_at + source * x_stride, mask=(source >= 0) & (t < rows), other=0.0).to(tl.float32)


@triton.jit
def convolve(x_at, conv_at, past, t, rows, x_stride):
    """silu of the convolution, and the rows themselves."""
    x = load_row(x_at, t, rows, 0, x_stride)
    y = (load_row(x_at, t, rows, 3, x_stride) + past[0]) * tl.load(conv_at)
    y += (load_row(x_at, t, rows, 2, x_stride) + past[1]) * tl.load(conv_at + 1)
    y += (load_row(x_at, t, rows, 1, x_stride) + past[2]) * tl.load(conv_at + 2)
    y += x * tl.load(conv_at + 3)
    return (y * tl.sigmoid(y)).to(x_at.dtype.element_ty).to(tl.float32), x


@triton.jit
def times_vector(tile, vector):
    """Sums over the key dimension: tile [DIM, DIM / 32, 32] times vector [DIM / 32, 32] -> [DIM]."""
    return tl.sum(tl.sum(tile * vector[None, :, :], axis=1), axis=1)


@triton.jit(do_not_specialize=["x_stride"])
def gated_delta_decode_kernel(
    x_ptr, conv_ptr, decay_ptr, dt_bias_ptr, norm_ptr, state_ptr, inputs_ptr, keys_ptr, u_ptr, alpha_ptr, arrivals_ptr,
    slots_ptr, starts_ptr, accepted_ptr, scratch_ptr, y_ptr, scales_ptr, sums_ptr, x_stride, eps,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PENDING: tl.constexpr, IS_ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One value head of one request. Only the recurrence goes row by row; what comes before it and after it is done
    for all rows there may be at once, one row a warp, and handed over through memory of the program's own.

    What its key head's value heads share is written by the last of them to have read it: which one that is depends on
    arrival, what it writes does not."""
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
    scratch_ptr += (request * value_heads + head) * (PENDING * (5 * dim))
    lane, t = tl.arange(0, dim), tl.arange(0, PENDING)
    row_lane, every = lane[None, :], t[:, None]
    query_at, key_at = key_head * dim + row_lane, (KEY_HEADS + key_head) * dim + row_lane
    value_at = (2 * KEY_HEADS + head) * dim + row_lane

    before = inputs_ptr + count * channels
    query_past = load_all_past(before + query_at, every, channels)
    key_past = load_all_past(before + key_at, every, channels)
    value_past = load_all_past(before + value_at, every, channels)
    is_tap = every < 3
    tap_at = every * channels
    query_taps = tl.load(before + tap_at + query_at, mask=is_tap, other=0.0)
    key_taps = tl.load(before + tap_at + key_at, mask=is_tap, other=0.0)
    value_taps = tl.load(before + tap_at + value_at, mask=is_tap, other=0.0)
    state_at = state_ptr + (slot * value_heads + head) * (dim * dim) + tile_offsets(dim)
    tile = fold_rows(tl.load(state_at), keys_ptr, u_ptr, alpha_ptr, count, KEY_HEADS, value_heads)
    if count > 0:
        tl.store(state_at, tile)
    # all threads have read what is overwritten below
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr, 1) == GROUP - 1
    if is_last:
        tl.store(arrivals_ptr, 0)
        tl.store(inputs_ptr + tap_at + query_at, query_taps, mask=is_tap)
        tl.store(inputs_ptr + tap_at + key_at, key_taps, mask=is_tap)
    tl.store(inputs_ptr + tap_at + value_at, value_taps, mask=is_tap)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)

    if PDL:
        tl.extra.cuda.gdc_wait()
    first_row = tl.load(starts_ptr + request).to(tl.int64)
    rows = tl.minimum((tl.load(starts_ptr + request + 1) - first_row).to(tl.int32), PENDING)
    x_ptr += first_row * x_stride
    live = every < rows
    query, query_x = convolve(x_ptr + query_at, conv_ptr + query_at * 4, query_past, every, rows, x_stride)
    key, key_x = convolve(x_ptr + key_at, conv_ptr + key_at * 4, key_past, every, rows, x_stride)
    value, value_x = convolve(x_ptr + value_at, conv_ptr + value_at * 4, value_past, every, rows, x_stride)
    z = tl.load(x_ptr + every * x_stride + channels + head * dim + row_lane, mask=live, other=0.0).to(tl.float32)
    gates_at = x_ptr + t * x_stride + (channels + value_heads * dim) + head
    a = tl.load(gates_at, mask=t < rows, other=0.0).to(tl.float32)
    b = tl.load(gates_at + value_heads, mask=t < rows, other=0.0).to(tl.float32)
    alpha, beta = tl.exp(log_decay(a, decay, dt_bias)), tl.sigmoid(b)
    query *= tl.rsqrt(tl.sum(query * query, axis=1) + 1e-6)[:, None] * 0.08838834764831845
    key *= tl.rsqrt(tl.sum(key * key, axis=1) + 1e-6)[:, None]
    own = scratch_ptr + every * (5 * dim) + row_lane
    tl.store(own, query)
    tl.store(own + dim, key)
    tl.store(own + 2 * dim, value)
    numbers = scratch_ptr + t * (5 * dim) + 3 * dim
    tl.store(numbers, alpha)
    tl.store(numbers + 1, beta)
    tl.store(numbers + 2, tl.sum(query * key, axis=1))
    pending = inputs_ptr + (3 + every) * channels
    tl.store(pending + value_at, value_x, mask=live)
    tl.store(alpha_ptr + t * value_heads, alpha, mask=t < rows)
    if is_last:
        tl.store(pending + query_at, query_x, mask=live)
        tl.store(pending + key_at, key_x, mask=live)
        tl.store(keys_ptr + every * (KEY_HEADS * dim) + row_lane, key, mask=live)
    tl.debug_barrier()
    for i in range(rows):
        here = scratch_ptr + i * (5 * dim)
        query_i, key_i = tl.load(here + key_offsets(dim)), tl.load(here + dim + key_offsets(dim))
        value_i = tl.load(here + 2 * dim + lane)
        alpha_i, beta_i, overlap = tl.load(here + 3 * dim), tl.load(here + 3 * dim + 1), tl.load(here + 3 * dim + 2)
        # both products of a row in one reading of the state, before it decays
        u = beta_i * value_i - alpha_i * beta_i * times_vector(tile, key_i)
        output = alpha_i * times_vector(tile, query_i) + u * overlap
        if i + 1 < rows:
            tile = write_row(tile, alpha_i, u, key_i)
        tl.store(u_ptr + i * (value_heads * dim) + lane, u)
        tl.store(here + 4 * dim + lane, output)
    tl.debug_barrier()
    output = tl.load(own + 4 * dim, mask=live, other=0.0)
    scale = tl.rsqrt(tl.sum(output * output, axis=1) / dim + eps)[:, None]
    y = (output * scale * tl.load(norm_ptr + lane)[None, :] * (z * tl.sigmoid(z))).to(x_ptr.dtype.element_ty)
    if IS_ROUNDED:
        halves: tl.constexpr = PENDING * (dim // 64)
        groups: tl.constexpr = value_heads * (dim // 64)
        half = tl.arange(0, halves)
        row = half // (dim // 64)
        group = tl.where(row < rows, head * (dim // 64) + half % (dim // 64), groups)
        wide = tl.reshape(y.to(tl.float32), [halves, 64])
        # groups past a row's last are not stored
        store_rounded(wide, y_ptr, scales_ptr, sums_ptr, first_row + row, group - half, groups, halves)
    else:
        tl.store(y_ptr + (first_row + every) * (value_heads * dim) + head * dim + row_lane, y, mask=live)
