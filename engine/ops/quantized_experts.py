"""Chosen experts and the shared one over quantised weights, for few rows."""

# ruff: noqa: RUF005 - kernels have no starred expressions

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.ops.launch import cdiv, has_dependent_launch, is_interpreted, launch_options
from engine.ops.quantize_rows import QuantizedRows, empty_rows, quantize_rows_reference, store_rounded
from engine.ops.quantized_dot import (
    activations_at,
    add_group,
    add_groups_reference,
    ahead,
    fold,
    fold_tiles,
    group_sums_reference,
    groups_of,
    load_activations,
    load_weights,
    num_iterations,
    num_segments,
    scales_at,
    words_at,
)
from engine.ops.quantized_linear import quantized_linear_reference
from engine.ops.quantized_weight import GROUP, QuantizedWeight, unpack
from engine.ops.route import choose, choose_at, chosen_at, route

_REFERENCE_ROWS = 32
# one program works on 128 rows of a matrix
_SWIGLU_WARPS = 16
_REGISTERS = 128


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
    logits: torch.Tensor,
    experts: QuantizedExperts,
    num_chosen: int,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[r] = sum_j weight_j * down_e q(silu(gate_e x[r]) * up_e x[r]) (+ residual),  e the experts that route chooses

    and, as the last j, the shared expert by the sigmoid of its logit; q rounds to 8 bits as quantize_rows does.

    logits    [rows, experts + 1] fp32, the last that of the shared expert
    residual  [rows, hidden]
    return    [rows, hidden]  of dtype; the bits of a row do not depend on the rows beside it
    bounds    num_chosen <= 8
    """
    if x.values.is_cuda:
        return quantized_experts_triton(x, logits, experts, num_chosen, dtype, residual)
    return quantized_experts_reference(x, logits, experts, num_chosen, dtype, residual)


def quantized_experts_reference(
    x: QuantizedRows,
    logits: torch.Tensor,
    experts: QuantizedExperts,
    num_chosen: int,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    chosen, weights = route(logits[:, :-1], num_chosen)
    weights = torch.cat([weights, torch.sigmoid(logits[:, -1:])], dim=-1)
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
        gate, up = quantized_linear_reference(_take(x, row), [gate_up], dtype).chunk(2, dim=-1)
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
    logits: torch.Tensor,
    experts: QuantizedExperts,
    num_chosen: int,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    assert num_chosen <= 8 and logits.is_contiguous() and (residual is None or residual.is_contiguous())
    inner = experts_swiglu_triton(x, logits, experts, num_chosen)
    rows, groups = len(logits), groups_of(experts.width)
    segments = num_segments(num_chosen * groups)
    y = torch.empty(rows, experts.down.rows, dtype=dtype, device=logits.device)
    experts_down_kernel[(experts.down.words.shape[-5], rows)](
        inner.values.view(torch.int32), inner.scales, logits,
        experts.down.words, experts.down.scales, experts.shared_down.words, experts.shared_down.scales,
        y if residual is None else residual, y, experts.down.rows, groups, logits.shape[1] - 1,
        CHOSEN=num_chosen, BITS=experts.down.bits, SHARED_BITS=experts.shared_down.bits, SEGMENTS=segments,
        ITERATIONS=num_iterations(num_chosen * groups, segments), SHARED_ITERATIONS=num_iterations(groups, segments),
        EVEN=num_chosen * groups % segments == 0, SHARED_EVEN=groups % segments == 0,
        HAS_RESIDUAL=residual is not None, **_choice_options(logits, segments // 2),
    )  # fmt: skip
    return y


def experts_swiglu_triton(
    x: QuantizedRows, logits: torch.Tensor, experts: QuantizedExperts, num_chosen: int
) -> QuantizedRows:
    """q(silu(gate x) * up x) of the experts of each row, the shared one last: rows * (num_chosen + 1) rows"""
    groups = groups_of(experts.gate_up.columns)
    segments = num_segments(groups)
    iterations = num_iterations(groups, segments)
    places = len(logits) * (num_chosen + 1)
    inner = empty_rows(places, experts.width, logits.device)
    experts_swiglu_kernel[(experts.width // GROUP, places)](
        x.values.view(torch.int32), x.scales, logits,
        experts.gate_up.words, experts.gate_up.scales, experts.shared_gate_up.words, experts.shared_gate_up.scales,
        inner.values, inner.scales, inner.sums, experts.width // GROUP, groups, logits.shape[1] - 1,
        CHOSEN=num_chosen, BITS=experts.gate_up.bits, SHARED_BITS=experts.shared_gate_up.bits, SEGMENTS=segments,
        ITERATIONS=iterations, AHEAD=ahead(iterations, 8 // experts.gate_up.bits),
        SHARED_AHEAD=ahead(iterations, 8 // experts.shared_gate_up.bits), EVEN=groups % segments == 0,
        **_choice_options(logits, _SWIGLU_WARPS),
    )  # fmt: skip
    return inner


def _choice_options(logits: torch.Tensor, num_warps: int) -> dict[str, object]:
    return {
        "BLOCK": 32 * cdiv(logits.shape[1] - 1, 32),
        "PDL": has_dependent_launch(logits.device),
        "INTERPRETED": is_interpreted(),
        **launch_options(logits.device, num_warps, _REGISTERS),
    }


@triton.jit
def experts_swiglu_kernel(
    x_ptr, x_scales_ptr, logits_ptr, words_ptr, scales_ptr, shared_words_ptr, shared_scales_ptr,
    values_ptr, value_scales_ptr, value_sums_ptr, width_groups, groups, experts,
    CHOSEN: tl.constexpr, BITS: tl.constexpr, SHARED_BITS: tl.constexpr, SEGMENTS: tl.constexpr,
    ITERATIONS: tl.constexpr, AHEAD: tl.constexpr, SHARED_AHEAD: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    place = tl.program_id(1)
    row = place // (CHOSEN + 1)
    slot = place % (CHOSEN + 1)
    x_ptr += row * groups * 16
    x_scales_ptr += row * groups
    if slot == CHOSEN:
        # these weights are read before the activations are there
        inner = swiglu_block(
            x_ptr, x_scales_ptr, shared_words_ptr, shared_scales_ptr, 0, block, width_groups, groups,
            SHARED_BITS, SEGMENTS, ITERATIONS, SHARED_AHEAD, EVEN, PDL, INTERPRETED,
        )  # fmt: skip
    else:
        if PDL:
            # after the wait: whoever starts then may read the logits
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert = choose_at(logits_ptr + row * (experts + 1), experts, slot, BLOCK)
        inner = swiglu_block(
            x_ptr, x_scales_ptr, words_ptr, scales_ptr, expert, block, width_groups, groups,
            BITS, SEGMENTS, ITERATIONS, AHEAD, EVEN, False, INTERPRETED,
        )  # fmt: skip
    store_rounded(inner[None, :], values_ptr, value_scales_ptr, value_sums_ptr, place, block, width_groups, 1)


@triton.jit
def swiglu_block(
    x_ptr, x_scales_ptr, words_ptr, scales_ptr, expert, block, width_groups, groups,
    BITS: tl.constexpr, SEGMENTS: tl.constexpr, ITERATIONS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
    WAIT: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of 64 rows, which are four tiles side by side: [64]"""
    lane = tl.arange(0, 4 * SEGMENTS)
    segment = lane % SEGMENTS
    gate_group = ((expert * 2 * width_groups + block) * 4 + lane // SEGMENTS) * groups + segment
    up_group = gate_group + 4 * width_groups * groups
    at = (
        words_at(words_ptr, gate_group, BITS), scales_at(scales_ptr, gate_group),
        words_at(words_ptr, up_group, BITS), scales_at(scales_ptr, up_group),
    )  # fmt: skip
    x_at = activations_at(x_ptr, segment)
    x_scales_at = x_scales_ptr + segment
    weights = load_pairs(at, segment, groups, BITS, SEGMENTS, AHEAD, EVEN)
    if WAIT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    words: tl.constexpr = AHEAD * SEGMENTS * 32 * BITS
    scales: tl.constexpr = AHEAD * SEGMENTS * 16
    gate = tl.zeros([4 * SEGMENTS, 16], tl.float32)
    up = tl.zeros([4 * SEGMENTS, 16], tl.float32)
    if ITERATIONS == AHEAD:
        gate, up = add_pairs(
            gate, up, weights, x_at, x_scales_at, segment, groups, BITS, SEGMENTS, AHEAD, EVEN, INTERPRETED
        )
    else:
        for start in tl.range(0, ITERATIONS, AHEAD, num_stages=1):
            left = groups - start * SEGMENTS
            gate, up = add_pairs(
                gate, up, weights, x_at, x_scales_at, segment, left, BITS, SEGMENTS, AHEAD,
                EVEN and ITERATIONS % AHEAD == 0, INTERPRETED,
            )  # fmt: skip
            at = (at[0] + words, at[1] + scales, at[2] + words, at[3] + scales)
            x_at += AHEAD * SEGMENTS * 16
            x_scales_at += AHEAD * SEGMENTS
            weights = load_pairs(at, segment, left - AHEAD * SEGMENTS, BITS, SEGMENTS, AHEAD, False)
    folded = fold_tiles(gate, 4, SEGMENTS)
    return folded * tl.sigmoid(folded) * fold_tiles(up, 4, SEGMENTS)


@triton.jit
def load_pairs(at, segment, left, BITS: tl.constexpr, SEGMENTS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr):
    """Weights of gate and up of the next AHEAD groups of every segment, of which `left` are there."""
    words: tl.constexpr = SEGMENTS * 32 * BITS
    scales: tl.constexpr = SEGMENTS * 16
    pairs = ()
    for i in tl.static_range(AHEAD):
        mask = segment + i * SEGMENTS < left
        gate = load_weights(at[0] + i * words, at[1] + i * scales, mask, BITS, EVEN)
        pairs = pairs + ((gate, load_weights(at[2] + i * words, at[3] + i * scales, mask, BITS, EVEN)),)
    return pairs


@triton.jit
def add_pairs(
    gate, up, pairs, x_at, x_scales_at, segment, left,
    BITS: tl.constexpr, SEGMENTS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    x = ()
    for i in tl.static_range(AHEAD):
        mask = segment + i * SEGMENTS < left
        x = x + (load_activations(x_at + i * (SEGMENTS * 16), x_scales_at + i * SEGMENTS, mask, EVEN),)
    for i in tl.static_range(AHEAD):
        gate = add_group(gate, pairs[i][0], x[i], 1.0, INTERPRETED, BITS)
        up = add_group(up, pairs[i][1], x[i], 1.0, INTERPRETED, BITS)
    return gate, up


@triton.jit
def experts_down_kernel(
    x_ptr, x_scales_ptr, logits_ptr, words_ptr, scales_ptr, shared_words_ptr,
    shared_scales_ptr, residual_ptr, y_ptr, outputs, groups, experts,
    CHOSEN: tl.constexpr, BITS: tl.constexpr, SHARED_BITS: tl.constexpr, SEGMENTS: tl.constexpr,
    ITERATIONS: tl.constexpr, SHARED_ITERATIONS: tl.constexpr, EVEN: tl.constexpr, SHARED_EVEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    if PDL:
        # only experts_swiglu_kernel stands before this one, and the logits were there before that began
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    row = tl.program_id(1)
    segment = tl.arange(0, SEGMENTS)
    tiles = tl.num_programs(0)
    shared = ()
    for i in tl.static_range(SHARED_ITERATIONS):
        group = segment + i * SEGMENTS
        words = words_at(shared_words_ptr, tile * groups + group, SHARED_BITS)
        scales = scales_at(shared_scales_ptr, tile * groups + group)
        shared = shared + (load_weights(words, scales, group < groups, SHARED_BITS, SHARED_EVEN),)
    logits_ptr += row * (experts + 1)
    chosen = choose(logits_ptr, experts, CHOSEN, BLOCK)
    # the groups of a row's experts stand one after the other, as if they were of one long row
    weights = ()
    for i in tl.static_range(ITERATIONS):
        at = segment + i * SEGMENTS
        expert = chosen_at(chosen, at // groups, CHOSEN)
        tile_group = (expert * tiles + tile) * groups + at % groups
        words = words_at(words_ptr, tile_group, BITS)
        mask = at < CHOSEN * groups
        weights = weights + (load_weights(words, scales_at(scales_ptr, tile_group), mask, BITS, EVEN),)
    top = tl.load(logits_ptr + chosen[0], cache_modifier=".cg")
    total = tl.exp(top - top)
    for j in tl.static_range(1, CHOSEN):
        total += tl.exp(tl.load(logits_ptr + chosen[j], cache_modifier=".cg") - top)
    shares = ()
    for i in tl.static_range(ITERATIONS):
        expert = chosen_at(chosen, (segment + i * SEGMENTS) // groups, CHOSEN)
        share = tl.exp(tl.load(logits_ptr + expert, cache_modifier=".cg") - top)
        shares = shares + (tl.div_rn(share, tl.zeros_like(share) + total),)
    shared_share = tl.sigmoid(tl.load(logits_ptr + experts, cache_modifier=".cg"))
    place = row * (CHOSEN + 1) * groups
    x_at = activations_at(x_ptr + place * 16, segment)
    x_scales_at = x_scales_ptr + place + segment
    column = tile * 16 + tl.arange(0, 16)
    y_at = row.to(tl.int64) * outputs + column
    if PDL:
        tl.extra.cuda.gdc_wait()
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + y_at, mask=column < outputs, other=0.0)
    x = ()
    for i in tl.static_range(ITERATIONS):
        mask = segment + i * SEGMENTS < CHOSEN * groups
        x = x + (load_activations(x_at + i * (SEGMENTS * 16), x_scales_at + i * SEGMENTS, mask, EVEN),)
    x_at += CHOSEN * groups * 16
    x_scales_at += CHOSEN * groups
    for i in tl.static_range(SHARED_ITERATIONS):
        mask = segment + i * SEGMENTS < groups
        x = x + (load_activations(x_at + i * (SEGMENTS * 16), x_scales_at + i * SEGMENTS, mask, SHARED_EVEN),)
    acc = tl.zeros([SEGMENTS, 16], tl.float32)
    for i in tl.static_range(ITERATIONS):
        acc = add_group(acc, weights[i], x[i], shares[i], INTERPRETED, BITS)
    for i in tl.static_range(SHARED_ITERATIONS):
        acc = add_group(acc, shared[i], x[ITERATIONS + i], shared_share, INTERPRETED, SHARED_BITS)
    y = fold(acc, SEGMENTS, 16)
    if HAS_RESIDUAL:
        y += residual.to(tl.float32)
    tl.store(y_ptr + y_at, y.to(y_ptr.dtype.element_ty), mask=column < outputs)
