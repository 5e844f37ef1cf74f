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
    return   [rows, hidden]  dtype of x; summed in at least fp32, in the order of j
    """
    return moe_reference(x, experts, weights, gate_up, down)


def moe_reference(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    rows, chosen = experts.shape
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
    # one product per expert over the rows that chose it
    groups = x[order // chosen].split(counts)
    outputs = [
        F.linear(silu_mul_reference(F.linear(group, gate_up[e])), down[e])
        for e, group in enumerate(groups)
        if len(group)
    ]
    dtype = torch.promote_types(x.dtype, torch.float32)
    scattered = x.new_empty(rows * chosen, x.shape[1], dtype=dtype)
    scattered[order] = torch.cat(outputs).to(dtype)
    return torch.einsum("rch,rc->rh", scattered.view(rows, chosen, -1), weights.to(dtype)).to(x.dtype)
