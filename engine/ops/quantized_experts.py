"""Chosen experts and the shared one over quantised weights, for few rows."""

# ruff: noqa: RUF005 - kernels have no starred expressions

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.quantize_rows import QuantizedRows, quantize_rows_reference, quantize_rows_triton
from engine.ops.quantized_dot import (
    add_group,
    add_groups_reference,
    fold,
    group_sums_reference,
    groups_of,
    has_dependent_launch,
    is_interpreted,
    launch_options,
    load_scales,
    load_words,
    num_iterations,
    num_segments,
)
from engine.ops.quantized_linear import quantized_linear_reference
from engine.ops.quantized_weight import TILE_ROWS, QuantizedWeight, unpack

_REFERENCE_ROWS = 32


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """gate_up [experts, 2 * width, hidden], gate above up; down [experts, hidden, width]; shared ones without stack."""

    gate_up: QuantizedWeight
    down: QuantizedWeight
    shared_gate_up: QuantizedWeight
    shared_down: QuantizedWeight

    @property
    def width(self) -> int:
        return self.down.columns


def quantized_experts(
    x: QuantizedRows,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: QuantizedExperts,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[r] = sum_j weights[r, j] * down_e q(silu(gate_e x[r]) * up_e x[r]) (+ residual),  e = chosen[r, j]

    The last j is the shared expert; q rounds to 8 bits as quantize_rows does.

    chosen    [rows, num_chosen] int64
    weights   [rows, num_chosen + 1] fp32
    residual  [rows, hidden]
    return    [rows, hidden]  of dtype; the bits of a row do not depend on the rows beside it
    """
    if x.values.is_cuda:
        return quantized_experts_triton(x, chosen, weights, experts, dtype, residual)
    return quantized_experts_reference(x, chosen, weights, experts, dtype, residual)


def quantized_experts_reference(
    x: QuantizedRows,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: QuantizedExperts,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    parts = []
    for start in range(0, len(chosen), _REFERENCE_ROWS):
        part = slice(start, start + _REFERENCE_ROWS)
        rows = QuantizedRows(x.values[part], x.scales[part], x.sums[part])
        parts.append(_few_rows_reference(rows, chosen[part], weights[part], experts))
    y = torch.cat(parts)
    return (y if residual is None else y + residual.to(y.dtype)).to(dtype)


def _few_rows_reference(
    x: QuantizedRows, chosen: torch.Tensor, weights: torch.Tensor, experts: QuantizedExperts
) -> torch.Tensor:
    rows, num_chosen = chosen.shape
    hidden, groups, dtype = experts.down.rows, groups_of(experts.width), x.scales.dtype
    sums = torch.zeros(num_chosen + 1, groups, rows, hidden)
    factors = torch.zeros(num_chosen + 1, groups, rows, hidden, dtype=dtype)
    for expert in [*chosen.unique().tolist(), None]:
        gate_up = experts.shared_gate_up if expert is None else experts.gate_up[expert]
        down = experts.shared_down if expert is None else experts.down[expert]
        row, slot = _places(chosen, expert)
        gate, up = quantized_linear_reference(_take(x, row), gate_up, dtype).chunk(2, dim=-1)
        inner = quantize_rows_reference(F.silu(gate) * up)
        codes, scales = unpack(down)
        sums[slot, :, row] = group_sums_reference(inner.values.view(len(row), groups, -1), codes).movedim(0, 1)
        weighted = inner.scales * weights[row, slot].to(dtype).unsqueeze(1)
        factors[slot, :, row] = scales.to(dtype).T * weighted.unsqueeze(2)
    routed = sums[:-1].flatten(0, 1), factors[:-1].flatten(0, 1)
    return add_groups_reference([routed, (sums[-1], factors[-1])], num_segments(num_chosen * groups))


def _places(chosen: torch.Tensor, expert: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that an expert, or the shared one, works for, and its place among those of the row."""
    rows, num_chosen = chosen.shape
    if expert is None:
        return torch.arange(rows), torch.full((rows,), num_chosen)
    return (chosen == expert).nonzero(as_tuple=True)


def _take(x: QuantizedRows, row: torch.Tensor) -> QuantizedRows:
    return QuantizedRows(x.values[row], x.scales[row], x.sums[row])


def quantized_experts_triton(
    x: QuantizedRows,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: QuantizedExperts,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    is_early: bool = False,
) -> torch.Tensor:
    """is_early  reads the down matrices while the gates still run; only with dependent launch"""
    assert chosen.is_contiguous() and weights.is_contiguous() and (residual is None or residual.is_contiguous())
    inner = quantize_rows_triton(_swiglu(x, chosen, experts))
    rows, num_chosen = chosen.shape
    groups = groups_of(experts.width)
    segments = num_segments(num_chosen * groups)
    y = torch.empty(rows, experts.down.rows, dtype=dtype, device=x.values.device)
    pdl = has_dependent_launch(y.device)
    experts_down_kernel[(experts.down.words.shape[-5], rows)](
        inner.values.view(torch.int32), inner.scales, inner.sums, chosen, weights,
        experts.down.words, experts.down.scales, experts.shared_down.words, experts.shared_down.scales,
        y if residual is None else residual, y, experts.down.rows, groups,
        CHOSEN=num_chosen, BITS=experts.down.bits, SHARED_BITS=experts.shared_down.bits, SEGMENTS=segments,
        ITERATIONS=num_iterations(num_chosen * groups, segments), SHARED_ITERATIONS=num_iterations(groups, segments),
        HAS_RESIDUAL=residual is not None, PDL=pdl, EARLY=pdl and is_early, INTERPRETED=is_interpreted(),
        **launch_options(y.device, segments // 2),
    )  # fmt: skip
    return y


def _swiglu(x: QuantizedRows, chosen: torch.Tensor, experts: QuantizedExperts) -> torch.Tensor:
    """[rows * (num_chosen + 1), width] fp32"""
    rows, num_chosen = chosen.shape
    assert experts.width % TILE_ROWS == 0
    groups = groups_of(experts.gate_up.columns)
    segments = num_segments(groups)
    inner = torch.empty(rows * (num_chosen + 1), experts.width, dtype=torch.float32, device=x.values.device)
    experts_swiglu_kernel[(experts.width // TILE_ROWS, len(inner))](
        x.values.view(torch.int32), x.scales, x.sums, chosen,
        experts.gate_up.words, experts.gate_up.scales, experts.shared_gate_up.words, experts.shared_gate_up.scales,
        inner, experts.width // TILE_ROWS, groups,
        CHOSEN=num_chosen, BITS=experts.gate_up.bits, SHARED_BITS=experts.shared_gate_up.bits, SEGMENTS=segments,
        ITERATIONS=num_iterations(groups, segments), PDL=has_dependent_launch(inner.device),
        INTERPRETED=is_interpreted(), **launch_options(inner.device, segments // 2),
    )  # fmt: skip
    return inner


@triton.jit
def experts_swiglu_kernel(
    x_ptr, x_scales_ptr, x_sums_ptr, chosen_ptr, words_ptr, scales_ptr, shared_words_ptr, shared_scales_ptr, inner_ptr,
    width_tiles, groups, CHOSEN: tl.constexpr, BITS: tl.constexpr, SHARED_BITS: tl.constexpr,
    SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        # after the wait: whoever starts then may read what the router wrote
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    place = tl.program_id(1)
    row = place // (CHOSEN + 1)
    slot = place % (CHOSEN + 1)
    x_ptr += row * groups * 16
    x_scales_ptr += row * groups
    x_sums_ptr += row * groups
    if slot == CHOSEN:
        inner = swiglu_tile(
            x_ptr, x_scales_ptr, x_sums_ptr, shared_words_ptr, shared_scales_ptr, tile, width_tiles, groups,
            SHARED_BITS, SEGMENTS, ITERATIONS, INTERPRETED,
        )  # fmt: skip
    else:
        expert = tl.load(chosen_ptr + row * CHOSEN + slot).to(tl.int32)
        inner = swiglu_tile(
            x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, expert * (2 * width_tiles) + tile, width_tiles,
            groups, BITS, SEGMENTS, ITERATIONS, INTERPRETED,
        )  # fmt: skip
    tl.store(inner_ptr + (place * width_tiles + tile).to(tl.int64) * 16 + tl.arange(0, 16), inner)


@triton.jit
def swiglu_tile(
    x_ptr, x_scales_ptr, x_sums_ptr, words_ptr, scales_ptr, tile, width_tiles, groups,
    BITS: tl.constexpr, SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of the 16 rows of a tile, whose up stands width_tiles below its gate."""
    segment = tl.arange(0, SEGMENTS)
    words = ()
    scales = ()
    for i in tl.static_range(ITERATIONS):
        group = (segment + i * SEGMENTS)[:, None]
        for half in tl.static_range(2):
            at = (tile + half * width_tiles) * groups + group
            words = words + (load_words(words_ptr, at, group < groups, BITS),)
            scales = scales + (load_scales(scales_ptr, at, group < groups),)
    gate = tl.zeros([SEGMENTS, 16], tl.float32)
    up = tl.zeros([SEGMENTS, 16], tl.float32)
    for i in tl.static_range(ITERATIONS):
        group = segment + i * SEGMENTS
        mask = group < groups
        gate = add_group(
            gate, words[2 * i], scales[2 * i], x_ptr, x_scales_ptr, x_sums_ptr, group, mask, 1.0, INTERPRETED, BITS
        )
        up = add_group(
            up, words[2 * i + 1], scales[2 * i + 1], x_ptr, x_scales_ptr, x_sums_ptr, group, mask, 1.0,
            INTERPRETED, BITS,
        )  # fmt: skip
    folded = fold(gate, SEGMENTS, 16)
    return folded * tl.sigmoid(folded) * fold(up, SEGMENTS, 16)


@triton.jit
def experts_down_kernel(
    x_ptr, x_scales_ptr, x_sums_ptr, chosen_ptr, weights_ptr, words_ptr, scales_ptr, shared_words_ptr,
    shared_scales_ptr, residual_ptr, y_ptr, outputs, groups,
    CHOSEN: tl.constexpr, BITS: tl.constexpr, SHARED_BITS: tl.constexpr, SEGMENTS: tl.constexpr,
    ITERATIONS: tl.constexpr, SHARED_ITERATIONS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    row = tl.program_id(1)
    segment = tl.arange(0, SEGMENTS)
    tiles = tl.num_programs(0)
    # the groups of a row's experts stand one after the other, as if they were of one long row
    words = ()
    scales = ()
    for i in tl.static_range(ITERATIONS):
        at = segment + i * SEGMENTS
        mask = at < CHOSEN * groups
        # past the first cache, which may hold what stood there for another layer
        expert = tl.load(chosen_ptr + row * CHOSEN + at // groups, mask=mask, other=0, cache_modifier=".cg")
        tile_group = (expert.to(tl.int32) * tiles + tile) * groups + at % groups
        words = words + (load_words(words_ptr, tile_group[:, None], mask[:, None], BITS),)
        scales = scales + (load_scales(scales_ptr, tile_group[:, None], mask[:, None]),)
    for i in tl.static_range(SHARED_ITERATIONS):
        group = (segment + i * SEGMENTS)[:, None]
        words = words + (load_words(shared_words_ptr, tile * groups + group, group < groups, SHARED_BITS),)
        scales = scales + (load_scales(shared_scales_ptr, tile * groups + group, group < groups),)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    first = row * (CHOSEN + 1) * groups
    x_ptr += first * 16
    x_scales_ptr += first
    x_sums_ptr += first
    weights_ptr += row * (CHOSEN + 1)
    acc = tl.zeros([SEGMENTS, 16], tl.float32)
    for i in tl.static_range(ITERATIONS):
        at = segment + i * SEGMENTS
        mask = at < CHOSEN * groups
        weight = tl.load(weights_ptr + at // groups, mask=mask, other=0.0)
        acc = add_group(acc, words[i], scales[i], x_ptr, x_scales_ptr, x_sums_ptr, at, mask, weight, INTERPRETED, BITS)
    for i in tl.static_range(SHARED_ITERATIONS):
        group = segment + i * SEGMENTS
        weight = tl.load(weights_ptr + CHOSEN)
        acc = add_group(
            acc, words[ITERATIONS + i], scales[ITERATIONS + i], x_ptr, x_scales_ptr, x_sums_ptr,
            CHOSEN * groups + group, group < groups, weight, INTERPRETED, SHARED_BITS,
        )  # fmt: skip
    y = fold(acc, SEGMENTS, 16)
    column = tile * 16 + tl.arange(0, 16)
    at = row.to(tl.int64) * outputs + column
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=column < outputs, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=column < outputs)
