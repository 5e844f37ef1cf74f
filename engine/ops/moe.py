"""Sparse mixture of SwiGLU experts."""

import torch
import torch.nn.functional as F

from engine.ops.silu_mul import silu_mul_reference


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
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
    rows = order // experts.shape[1]
    # rows sorted by expert: one product per expert over the rows that chose it
    hidden = silu_mul_reference(_per_expert(x.index_select(0, rows), counts, gate_up))
    dtype = torch.promote_types(x.dtype, torch.float32)
    outputs = _per_expert(hidden, counts, down).to(dtype) * weights.flatten()[order].to(dtype).unsqueeze(-1)
    return torch.zeros_like(x, dtype=dtype).index_add_(0, rows, outputs).to(x.dtype)


def _per_expert(x: torch.Tensor, counts: list[int], matrices: torch.Tensor) -> torch.Tensor:
    groups = zip(x.split(counts), matrices, strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in groups if len(rows)])
