"""Decay and write strength of the gated delta rule."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def gated_delta_gates_reference(
    a: torch.Tensor, b: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log_alpha = decay * softplus(a + dt_bias);  beta = sigmoid(b)

    a, b            [rows, heads]
    decay, dt_bias  [heads]  decay is negative
    return          log_alpha <= 0 and beta, [rows, heads], in at least fp32
    """
    dtype = torch.promote_types(a.dtype, torch.float32)
    return decay.to(dtype) * F.softplus(a.to(dtype) + dt_bias.to(dtype)), torch.sigmoid(b.to(dtype))


@triton.jit
def log_decay(a, decay, dt_bias):
    """decay * softplus(a + dt_bias), with a softplus that is right to its last bits however small it is."""
    x = a + dt_bias
    e = tl.exp(-tl.abs(x))
    # log(1 + e) = 2 artanh(s), s <= 1/3
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 / 15.0
    series = series * t + 1.0 / 13.0
    series = series * t + 1.0 / 11.0
    series = series * t + 1.0 / 9.0
    series = series * t + 1.0 / 7.0
    series = series * t + 1.0 / 5.0
    series = series * t + 1.0 / 3.0
    series = series * t + 1.0
    return decay * (tl.maximum(x, 0.0) + 2.0 * s * series)
