"""Chosen experts and the shared one over quantised weights, for the many rows of a prompt."""

import torch
import triton
import triton.language as tl

from engine.ops.halved import halved
from engine.ops.launch import cdiv, plain_options
from engine.ops.quantized_experts import QuantizedExperts
from engine.ops.quantized_matmul import (
    MatmulShape,
    down_shape_of,
    in_order_of,
    launch_matmul,
    quantized_mlp_reference,
    quantized_mlp_triton,
    shape_of,
)

# places that a program looks at together
LISTED = 2048


def quantized_grouped_experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: QuantizedExperts,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[r] = sum_j weights[r, j] * down_e (silu(gate_e x[r]) * up_e x[r]) (+ residual),  e = chosen[r, j]

    The last j is the shared expert. Activations are not rounded to 8 bits, unlike in quantized_experts.

    x         [rows, hidden] bf16
    chosen    [rows, num_chosen] int32 or int64
    weights   [rows, num_chosen + 1] fp32
    residual  [rows, hidden]
    ordered   halved(x), where the caller has it
    return    [rows, hidden]  of dtype
    """
    if x.is_cuda:
        return quantized_grouped_experts_triton(x, chosen, weights, experts, dtype, residual, ordered)
    return quantized_grouped_experts_reference(x, chosen, weights, experts, dtype, residual)


def quantized_grouped_experts_reference(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: QuantizedExperts,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    shared = _expert_reference(x, experts.shared_gate_up, experts.shared_down, wide)
    y = shared * weights[:, -1:].to(wide)
    for e in chosen.unique().tolist():
        row, place = (chosen == e).nonzero(as_tuple=True)
        output = _expert_reference(x[row], experts.gate_up[e], experts.down[e], wide)
        y.index_add_(0, row, output * weights[row, place].to(wide).unsqueeze(1))
    return (y if residual is None else y + residual.to(wide)).to(dtype)


def _expert_reference(x: torch.Tensor, gate_up, down, wide: torch.dtype) -> torch.Tensor:
    return quantized_mlp_reference(x, gate_up, down, wide)


def quantized_grouped_experts_triton(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    experts: QuantizedExperts,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    ordered: torch.Tensor | None = None,
    shape: MatmulShape | None = None,
) -> torch.Tensor:
    assert weights.is_contiguous() and (residual is None or residual.is_contiguous())
    num_chosen, num_experts = chosen.shape[1], len(experts.gate_up.words)
    rows = chosen.numel() // num_experts
    down_shape = shape or down_shape_of(x.device, rows)
    shape = shape or shape_of(x.device, rows, is_paired=True)
    order, blocks, down_blocks = expert_blocks(chosen, num_experts, shape.block_m, down_shape.block_m)
    inner = torch.empty(chosen.numel(), experts.width, dtype=x.dtype, device=x.device)
    if ordered is None and 4 in (experts.gate_up.bits, experts.shared_gate_up.bits):
        ordered = halved(x)
    launch_matmul(
        in_order_of(experts.gate_up, x, ordered), experts.gate_up, inner, shape, is_swiglu=True, order=order,
        blocks=blocks, gathers=num_chosen, halves_output=experts.down.bits == 4,
    )  # fmt: skip
    outputs = torch.empty(chosen.numel(), experts.down.rows, dtype=x.dtype, device=x.device)
    launch_matmul(inner, experts.down, outputs, down_shape, order=order, blocks=down_blocks, scatters=True)
    shared = quantized_mlp_triton(x, experts.shared_gate_up, experts.shared_down, x.dtype, ordered=ordered)
    y = torch.empty(len(x), experts.down.rows, dtype=dtype, device=x.device)
    combine_experts_kernel[(len(x), cdiv(y.shape[1], 1024))](
        outputs, shared, weights, y if residual is None else residual, y, y.shape[1],
        CHOSEN=num_chosen, BLOCK=1024, HAS_RESIDUAL=residual is not None,
        **plain_options(4, is_fused=True),
    )  # fmt: skip
    return y


def expert_blocks(
    chosen: torch.Tensor, num_experts: int, block_rows: int, other_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places of `chosen` in the order of their experts, and how they are cut into blocks of one expert each.

    return  order [rows * num_chosen] int32; blocks [n, 3] int32: expert, first and end within that order; and the same
            cut into blocks of other_rows. n depends on shapes alone; blocks that are not needed are empty
    """
    count, device = chosen.numel(), chosen.device
    assert chosen.is_contiguous()
    order = torch.empty(count, dtype=torch.int32, device=device)
    blocks, others = (
        torch.empty(count // size + num_experts, 3, dtype=torch.int32, device=device)
        for size in (block_rows, other_rows)
    )
    expert_blocks_kernel[(num_experts,)](
        chosen, order, blocks, others, count, block_rows, other_rows, BLOCK=LISTED,
        **plain_options(8, is_fused=True),
    )  # fmt: skip
    return order, blocks, others


@triton.jit(do_not_specialize=["count", "block_rows", "other_rows"])
def expert_blocks_kernel(
    chosen_ptr, order_ptr, blocks_ptr, others_ptr, count, block_rows, other_rows, BLOCK: tl.constexpr
):
    """One expert. Those before it, with `first` places, need at most first // block_rows blocks and one more each: so
    no two experts' blocks meet, whatever the others chose."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        chosen = tl.load(chosen_ptr + start + lane, mask=start + lane < count, other=2147483647)
        before += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    first = tl.sum(before, axis=0)
    end = first + tl.sum(own, axis=0)
    place = first
    for start in range(0, count, BLOCK):
        chosen = tl.load(chosen_ptr + start + lane, mask=start + lane < count, other=2147483647)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(is_own, axis=0) - 1, start + lane, mask=is_own > 0)
        place += tl.sum(is_own, axis=0)
    list_blocks(blocks_ptr, expert, first, end, block_rows)
    list_blocks(others_ptr, expert, first, end, other_rows)


@triton.jit
def list_blocks(blocks_ptr, expert, first, end, block_rows):
    for block in range(first // block_rows, end // block_rows + 1):
        target = blocks_ptr + 3 * (block + expert)
        tl.store(target, expert)
        tl.store(target + 1, first + (block - first // block_rows) * block_rows)
        tl.store(target + 2, end)


@triton.jit
def combine_experts_kernel(
    outputs_ptr, shared_ptr, weights_ptr, residual_ptr, y_ptr, hidden,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    y = tl.load(shared_ptr + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    y *= tl.load(weights_ptr + row * (CHOSEN + 1) + CHOSEN)
    for j in tl.static_range(CHOSEN):
        output = tl.load(outputs_ptr + (row * CHOSEN + j) * hidden + column, mask=mask, other=0.0)
        y += output.to(tl.float32) * tl.load(weights_ptr + row * (CHOSEN + 1) + j)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * hidden + column, y.to(y_ptr.dtype.element_ty), mask=mask)
