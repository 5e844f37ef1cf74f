"""Decay and write strength of the gated delta rule."""

import torch
import torch.nn.functional as F


def gated_delta_gates(
    a: torch.Tensor, b: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_alpha = decay * softplus(a + dt_bias);  beta = sigmoid(b)

    a, b            [rows, heads]
    decay, dt_bias  [heads]  decay is negative
    return          log_alpha <= 0 and beta, [rows, heads], in at least fp32
    """
    return gated_delta_gates_reference(a, b, decay, dt_bias)


def gated_delta_gates_reference(
    a: torch.Tensor, b: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(a.dtype, torch.float32)
    return decay.to(dtype) * F.softplus(a.to(dtype) + dt_bias.to(dtype)), torch.sigmoid(b.to(dtype))
