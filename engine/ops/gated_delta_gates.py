"""Decay and write strength of the gated delta rule."""

import torch
import torch.nn.functional as F


def gated_delta_gates(
    a: torch.Tensor, b: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_alpha = -decay_rate * softplus(a + dt_bias);  beta = sigmoid(b)

    a, b                 [rows, heads]
    decay_rate, dt_bias  [heads]
    return               log_alpha <= 0 and beta, [rows, heads], in at least fp32
    """
    return gated_delta_gates_reference(a, b, decay_rate, dt_bias)


def gated_delta_gates_reference(
    a: torch.Tensor, b: torch.Tensor, decay_rate: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.promote_types(a.dtype, torch.float32)
    return -decay_rate.to(dtype) * F.softplus(a.to(dtype) + dt_bias.to(dtype)), torch.sigmoid(b).to(dtype)
