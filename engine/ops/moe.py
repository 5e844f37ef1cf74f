"""Sparse mixture of SwiGLU experts."""

import torch
import torch.nn.functional as F

from engine.ops.silu_mul import silu_mul_reference

FEW_ROWS = 16


def moe(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """y[r] = sum_j weights[r, j] * down[e] (silu(gate[e] x[r]) * up[e] x[r]),  e = experts[r, j]

    x        [rows, hidden]
    experts  [rows, chosen] int64
    weights  [rows, chosen]
    gate_up  [num_experts, 2 * width, hidden]  gate above up
    down     [num_experts, hidden, width]
    return   [rows, hidden]  dtype of x; summed in at least fp32
    """
    return moe_reference(x, experts, weights, gate_up, down)


def moe_reference(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows, chosen = experts.shape
    if rows <= FEW_ROWS and rows * chosen >= len(gate_up):
        return _all_experts(x, experts, weights, gate_up, down)
    return _chosen_experts(x, experts, weights, gate_up, down)


def _all_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Few rows that chose nearly every expert: reading all of them costs less than sorting."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    shares = torch.zeros(len(x), len(gate_up), dtype=dtype, device=x.device).scatter_(1, experts, weights.to(dtype))
    outputs = torch.matmul(silu_mul_reference(torch.matmul(x, gate_up.mT)), down.mT).to(dtype)
    return (outputs * shares.t().unsqueeze(-1)).sum(0).to(x.dtype)


def _chosen_experts(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Rows sorted by expert: one product per expert over the rows that chose it."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(gate_up)).tolist()
    rows = order // experts.shape[1]
    hidden = silu_mul_reference(_per_expert(x.index_select(0, rows), counts, gate_up))
    dtype = torch.promote_types(x.dtype, torch.float32)
    shares = weights.flatten().index_select(0, order).to(dtype).unsqueeze(-1)
    outputs = _per_expert(hidden, counts, down).to(dtype) * shares
    return torch.zeros_like(x, dtype=dtype).index_add_(0, rows, outputs).to(x.dtype)


def _per_expert(x: torch.Tensor, counts: list[int], matrices: torch.Tensor) -> torch.Tensor:
    used = [e for e, count in enumerate(counts) if count]
    groups = x.split([counts[e] for e in used])
    return torch.cat([F.linear(rows, matrices[e]) for rows, e in zip(groups, used, strict=True)])
