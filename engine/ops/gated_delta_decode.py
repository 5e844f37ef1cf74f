"""All of Gated DeltaNet between its two products for rows that may be taken back, in two launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from engine.ops.causal_conv import causal_conv_reference
from engine.ops.delta_state import DeltaState, DeltaWeights
from engine.ops.gated_delta_fold import (
    fold_rows,
    gated_delta_fold_reference,
    tile_offsets,
    write_row,
)
from engine.ops.gated_delta_gates import gated_delta_gates_reference, log_decay
from engine.ops.gated_delta_recurrent import gated_delta_recurrent_reference
from engine.ops.gated_rms_norm import gated_rms_norm_reference
from engine.ops.l2_norm import l2_norm_reference
from engine.ops.launch import has_dependent_launch, launch_options
from engine.ops.quantize_rows import QuantizedRows, empty_rows, quantize_rows_reference, store_rounded

# a head's state goes to several programs: small ones find room beside those of the product before them
PARTS = 4
STEP_WARPS, FINISH_WARPS = 4, 1
# channels of the convolution's inputs that one program moves on
MOVED = tl.constexpr(128)


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
    bounds        at most MAX_PENDING_ROWS rows per request; state_slots, query_starts and num_accepted have to be final
                  before the kernels of the pass begin to overlap: they and the memory are read while the one before
                  this ends
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
    device, value_heads = projected.device, weights.value_heads
    channels = len(weights.conv)
    scratch = Handover.empty(len(projected), weights, device)
    heads = {"KEY_HEADS": weights.key_heads, "GROUP": value_heads // weights.key_heads, "PENDING": pending}
    gated_delta_step_kernel[(value_heads * PARTS, len(num_rows))](
        projected, weights.conv, weights.decay, weights.dt_bias, memory.state, memory.inputs, memory.pending_key,
        memory.pending_u, memory.pending_alpha, state_slots, query_starts, num_accepted, *scratch.tensors(),
        projected.stride(0), PARTS=PARTS, PDL=has_dependent_launch(device), **heads,
        **launch_options(device, STEP_WARPS),
    )  # fmt: skip
    gated_delta_finish_kernel[(value_heads + channels // MOVED.value, len(num_rows), max(num_rows))](
        projected, weights.norm, memory.inputs, memory.pending_key, memory.pending_alpha, state_slots, query_starts,
        num_accepted, *scratch.tensors(), *outputs, projected.stride(0), weights.eps, IS_ROUNDED=is_rounded,
        PDL=has_dependent_launch(device), **heads, **launch_options(device, FINISH_WARPS),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Handover:
    """What the first launch leaves to the second.

    output  [rows, value_heads, dim] fp32
    key     [rows, key_heads, dim] fp32
    alpha   [rows, value_heads] fp32
    """

    output: torch.Tensor
    key: torch.Tensor
    alpha: torch.Tensor

    @classmethod
    def empty(cls, rows: int, weights: DeltaWeights, device: torch.device) -> Self:
        heads = weights.value_heads, weights.key_heads
        output, key = (torch.empty(rows, count, weights.dim, device=device) for count in heads)
        return cls(output, key, torch.empty(rows, weights.value_heads, device=device))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.output, self.key, self.alpha


@triton.jit
def load_taps(inputs_at, channels):
    """The three inputs before the pass, oldest first."""
    return tl.load(inputs_at), tl.load(inputs_at + channels), tl.load(inputs_at + 2 * channels)


@triton.jit
def load_conv(conv_ptr, channel):
    at = conv_ptr + channel * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def convolve(taps, x, conv, dtype: tl.constexpr):
    """silu of the convolution, rounded to the type of the rows"""
    y = taps[0] * conv[0]
    y += taps[1] * conv[1]
    y += taps[2] * conv[2]
    y += x * conv[3]
    return (y * tl.sigmoid(y)).to(dtype).to(tl.float32)


@triton.jit
def times_vector(tile, vector):
    """Sums over the key dimension: tile [rows, DIM / 32, 32] times vector [DIM / 32, 32] -> [rows]."""
    return tl.sum(tl.sum(tile * vector[None, :, :], axis=1), axis=1)


@triton.jit(do_not_specialize=["x_stride"])
def gated_delta_step_kernel(
    x_ptr, conv_ptr, decay_ptr, dt_bias_ptr, state_ptr, inputs_ptr, keys_ptr, u_ptr, alpha_ptr, slots_ptr, starts_ptr,
    accepted_ptr, made_ptr, made_key_ptr, made_alpha_ptr, x_stride,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PENDING: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A part of the value dimensions of one value head of one request, row by row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dim: tl.constexpr = 128
    width: tl.constexpr = dim // PARTS
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = (2 * KEY_HEADS + value_heads) * dim
    head, part, request = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    key_head = head // GROUP
    slot = tl.load(slots_ptr + request).to(tl.int64)
    count = tl.minimum(tl.maximum(tl.load(accepted_ptr + request), 0), PENDING)
    first_row = tl.load(starts_ptr + request).to(tl.int64)
    rows = tl.minimum((tl.load(starts_ptr + request + 1) - first_row).to(tl.int32), PENDING)
    lane, value_lane = tl.arange(0, dim), part * width + tl.arange(0, width)
    state_at = state_ptr + ((slot * value_heads + head) * dim + part * width) * dim + tile_offsets(dim, width)
    tile = tl.load(state_at)
    keys_ptr += slot * (PENDING * KEY_HEADS * dim) + key_head * dim
    u_ptr += slot * (PENDING * value_heads * dim) + head * dim + part * width
    alpha_ptr += slot * (PENDING * value_heads) + head
    query_at, key_at = key_head * dim + lane, (KEY_HEADS + key_head) * dim + lane
    value_at = (2 * KEY_HEADS + head) * dim + value_lane
    before = inputs_ptr + slot * ((3 + PENDING) * channels) + count * channels
    query_taps, key_taps = load_taps(before + query_at, channels), load_taps(before + key_at, channels)
    value_taps = load_taps(before + value_at, channels)
    query_conv, key_conv = load_conv(conv_ptr, query_at), load_conv(conv_ptr, key_at)
    value_conv = load_conv(conv_ptr, value_at)
    decay, dt_bias = tl.load(decay_ptr + head), tl.load(dt_bias_ptr + head)
    tile = fold_rows(tile, keys_ptr, u_ptr, alpha_ptr, count, KEY_HEADS, value_heads)
    if count > 0:
        tl.store(state_at, tile)
    # all threads have read the pending rows that are overwritten below
    tl.debug_barrier()

    if PDL:
        tl.extra.cuda.gdc_wait()
    x_ptr += first_row * x_stride
    gates_at = (channels + value_heads * dim) + head
    for i in range(rows):
        query_x = tl.load(x_ptr + query_at).to(tl.float32)
        key_x = tl.load(x_ptr + key_at).to(tl.float32)
        value_x = tl.load(x_ptr + value_at).to(tl.float32)
        a, b = tl.load(x_ptr + gates_at).to(tl.float32), tl.load(x_ptr + gates_at + value_heads).to(tl.float32)
        alpha, beta = tl.exp(log_decay(a, decay, dt_bias)), tl.sigmoid(b)
        query = convolve(query_taps, query_x, query_conv, x_ptr.dtype.element_ty)
        key = convolve(key_taps, key_x, key_conv, x_ptr.dtype.element_ty)
        value = convolve(value_taps, value_x, value_conv, x_ptr.dtype.element_ty)
        query *= tl.rsqrt(tl.sum(query * query, axis=0) + 1e-6) * 0.08838834764831845
        key *= tl.rsqrt(tl.sum(key * key, axis=0) + 1e-6)
        overlap = tl.sum(query * key, axis=0)
        folded_key = tl.reshape(key, [dim // 32, 32])
        # both products of a row in one reading of the state, before it decays
        u = beta * value - alpha * beta * times_vector(tile, folded_key)
        output = alpha * times_vector(tile, tl.reshape(query, [dim // 32, 32])) + u * overlap
        row = first_row + i
        tl.store(u_ptr + i * (value_heads * dim) + tl.arange(0, width), u)
        tl.store(made_ptr + (row * value_heads + head) * dim + value_lane, output)
        if part == 0:
            tl.store(made_alpha_ptr + row * value_heads + head, alpha)
            if head % GROUP == 0:
                tl.store(made_key_ptr + (row * KEY_HEADS + key_head) * dim + lane, key)
        if i + 1 < rows:
            tile = write_row(tile, alpha, u, folded_key)
            x_ptr += x_stride
            query_taps = query_taps[1], query_taps[2], query_x
            key_taps = key_taps[1], key_taps[2], key_x
            value_taps = value_taps[1], value_taps[2], value_x


@triton.jit(do_not_specialize=["x_stride"])
def gated_delta_finish_kernel(
    x_ptr, norm_ptr, inputs_ptr, keys_ptr, alpha_ptr, slots_ptr, starts_ptr, accepted_ptr,
    made_ptr, made_key_ptr, made_alpha_ptr, y_ptr, scales_ptr, sums_ptr, x_stride, eps,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PENDING: tl.constexpr, IS_ROUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One value head of one row: norm and gate, and what of it waits beside the state. Other programs move the
    convolution's inputs on, which nobody reads any more."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dim: tl.constexpr = 128
    value_heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = (2 * KEY_HEADS + value_heads) * dim
    head, request, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    first_row = tl.load(starts_ptr + request).to(tl.int64)
    rows = tl.minimum((tl.load(starts_ptr + request + 1) - first_row).to(tl.int32), PENDING)
    if head < value_heads:
        halves = tl.arange(0, dim // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        norm = tl.load(norm_ptr + halves)
        if PDL:
            tl.extra.cuda.gdc_wait()
        if i < rows:
            row = first_row + i
            output = tl.load(made_ptr + (row * value_heads + head) * dim + halves)
            z = tl.load(x_ptr + row * x_stride + channels + head * dim + halves).to(tl.float32)
            alpha = tl.load(made_alpha_ptr + row * value_heads + head)
            tl.store(alpha_ptr + (slot * PENDING + i) * value_heads + head, alpha)
            if head % GROUP == 0:
                key = tl.load(made_key_ptr + (row * KEY_HEADS + head // GROUP) * dim + halves)
                tl.store(keys_ptr + ((slot * PENDING + i) * KEY_HEADS + head // GROUP) * dim + halves, key)
            scale = tl.rsqrt(tl.sum(tl.sum(output * output, axis=1), axis=0) / dim + eps)
            y = (output * scale * norm * (z * tl.sigmoid(z))).to(x_ptr.dtype.element_ty)
            if IS_ROUNDED:
                groups: tl.constexpr = dim // 64
                store_rounded(
                    y.to(tl.float32), y_ptr, scales_ptr, sums_ptr, row, head * groups, value_heads * groups, groups
                )
            else:
                tl.store(y_ptr + (row * value_heads + head) * dim + halves, y)
    elif i == 0:
        count = tl.minimum(tl.maximum(tl.load(accepted_ptr + request), 0), PENDING)
        channel = (head - value_heads) * MOVED + tl.arange(0, MOVED)
        inputs_at = inputs_ptr + slot * ((3 + PENDING) * channels) + channel
        taps = load_taps(inputs_at + count * channels, channels)
        # each channel is one thread's throughout
        if PDL:
            tl.extra.cuda.gdc_wait()
        tl.store(inputs_at, taps[0])
        tl.store(inputs_at + channels, taps[1])
        tl.store(inputs_at + 2 * channels, taps[2])
        for j in range(rows):
            x = tl.load(x_ptr + (first_row + j) * x_stride + channel).to(tl.float32)
            tl.store(inputs_at + (3 + j) * channels, x)
