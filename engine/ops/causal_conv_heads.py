"""Causal convolution of a prompt's rows, committed at once, with the lengths of its heads."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from engine.ops.causal_conv import causal_conv_reference
from engine.ops.delta_state import Keep
from engine.ops.launch import cdiv, plain_options

EPS = 1e-6
BLOCK_ROWS = 32


def causal_conv_heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_rows: Sequence[int],
    unit_heads: int,
    dim: int,
    keeps: Sequence[Keep] = (),
    taps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """causal_conv of rows that commit, and 1 / sqrt(sum(y**2) + 1e-6) of each of its first heads.

    x             [rows, channels]  channels a multiple of dim
    weight        [channels, 4]
    inputs        [slots, 3 + MAX_PENDING_ROWS, channels] fp32
    state_slots   [requests] int64, all different
    query_starts  [requests + 1] int32
    num_rows      of each request
    taps          [copies, 3, channels] fp32, where there are keeps
    return        y [rows, channels] dtype of x; [rows, unit_heads] in at least fp32, of y as it was rounded
    writes        the committed inputs of those slots; taps, as `keeps` say
    """
    for keep in keeps:
        for first, index in zip(accumulate(num_rows, initial=keep.num_rows), keep.indices, strict=False):
            if index >= 0:
                taps[index] = x[first - 3 : first]
    parts = (x, weight, inputs, state_slots, query_starts, num_rows, unit_heads, dim)
    if x.is_cuda:
        return causal_conv_heads_triton(*parts)
    return causal_conv_heads_reference(*parts)


def causal_conv_heads_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_rows: Sequence[int],
    unit_heads: int,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = causal_conv_reference(x, weight, inputs, state_slots, num_rows, commits=True)
    heads = y[:, : unit_heads * dim].unflatten(-1, (unit_heads, dim))
    heads = heads.to(torch.promote_types(heads.dtype, torch.float32))
    return y, torch.rsqrt(heads.square().sum(-1) + EPS)


def causal_conv_heads_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    state_slots: torch.Tensor,
    query_starts: torch.Tensor,
    num_rows: Sequence[int],
    unit_heads: int,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    channels = x.shape[1]
    assert x.stride(1) == 1 and weight.shape == (channels, 4) and channels % dim == 0
    assert inputs.is_contiguous() and weight.is_contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inverse_norms = torch.empty(len(x), unit_heads, device=x.device)
    options = plain_options(4)
    causal_conv_heads_kernel[(cdiv(max(num_rows), BLOCK_ROWS), channels // dim, len(num_rows))](
        x, weight, inputs, state_slots, query_starts, y, inverse_norms, x.stride(0), channels, inputs.stride(0),
        unit_heads, EPS, DIM=dim, BLOCK=BLOCK_ROWS, **options,
    )  # fmt: skip
    return y, inverse_norms


@triton.jit
def weighted_rows(x_at, inputs_at, weight_at, row, live, x_stride, channels, IS_FIRST: tl.constexpr):
    """The sum of every row's last four inputs times their weights."""
    acc = rows_before(x_at, inputs_at, row, live, 3, x_stride, channels, IS_FIRST) * tl.load(weight_at)[None, :]
    acc += rows_before(x_at, inputs_at, row, live, 2, x_stride, channels, IS_FIRST) * tl.load(weight_at + 1)[None, :]
    acc += rows_before(x_at, inputs_at, row, live, 1, x_stride, channels, IS_FIRST) * tl.load(weight_at + 2)[None, :]
    acc += rows_before(x_at, inputs_at, row, live, 0, x_stride, channels, IS_FIRST) * tl.load(weight_at + 3)[None, :]
    return acc


@triton.jit
def rows_before(x_at, inputs_at, row, live, BACK: tl.constexpr, x_stride, channels, IS_FIRST: tl.constexpr):
    """The inputs BACK rows before the rows: of the request itself or, before its first one, those kept of its past.

    IS_FIRST  the request's first row may be among the rows
    """
    source = row - BACK
    held = live & (source >= 0) if IS_FIRST else live
    own = tl.load(x_at + source.to(tl.int64)[:, None] * x_stride, mask=held[:, None], other=0.0).to(tl.float32)
    if IS_FIRST:
        own += tl.load(inputs_at + (source + 3)[:, None] * channels, mask=(live & (source < 0))[:, None], other=0.0)
    return own


@triton.jit(do_not_specialize=["x_stride", "inputs_stride"])
def causal_conv_heads_kernel(
    x_ptr, weight_ptr, inputs_ptr, slots_ptr, starts_ptr, y_ptr, norms_ptr, x_stride, channels, inputs_stride,
    unit_heads, eps, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of one head. The program of a request's first rows alone reads what was kept, and writes it anew."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(starts_ptr + request).to(tl.int64)
    rows = (tl.load(starts_ptr + request + 1) - first_row).to(tl.int32)
    if block * BLOCK < rows:
        channel = head * DIM + tl.arange(0, DIM)
        row = block * BLOCK + tl.arange(0, BLOCK)
        live = row < rows
        x_ptr += first_row * x_stride
        x_at = x_ptr + channel[None, :]
        inputs_ptr += tl.load(slots_ptr + request).to(tl.int64) * inputs_stride
        inputs_at = inputs_ptr + channel[None, :]
        weight_at = weight_ptr + channel * 4
        if block == 0:
            acc = weighted_rows(x_at, inputs_at, weight_at, row, live, x_stride, channels, True)
        else:
            acc = weighted_rows(x_at, inputs_at, weight_at, row, live, x_stride, channels, False)
        y = (acc * tl.sigmoid(acc)).to(y_ptr.dtype.element_ty)
        place = first_row + row
        tl.store(y_ptr + place[:, None] * channels + channel[None, :], y, mask=live[:, None])
        if head < unit_heads:
            wide = y.to(tl.float32)
            tl.store(norms_ptr + place * unit_heads + head, tl.rsqrt(tl.sum(wide * wide, axis=1) + eps), mask=live)
        if block == 0:
            commit_inputs(x_ptr, inputs_ptr, channel, rows, x_stride, channels)


@triton.jit
def commit_inputs(x_ptr, inputs_ptr, channel, rows, x_stride, channels):
    """The last three inputs of past and rows together."""
    tap = tl.arange(0, 4)
    source = rows - 3 + tap
    is_tap = tap < 3
    own = tl.load(
        x_ptr + source.to(tl.int64)[:, None] * x_stride + channel[None, :],
        mask=(is_tap & (source >= 0))[:, None], other=0.0,
    )  # fmt: skip
    past = tl.load(
        inputs_ptr + (source + 3)[:, None] * channels + channel[None, :],
        mask=(is_tap & (source < 0))[:, None], other=0.0,
    )  # fmt: skip
    # what is read may be what is overwritten
    tl.debug_barrier()
    tl.store(inputs_ptr + tap[:, None] * channels + channel[None, :], own.to(tl.float32) + past, mask=is_tap[:, None])
