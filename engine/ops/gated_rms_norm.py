"""Root-mean-square normalisation whose output is gated by SiLU."""

import torch
import torch.nn.functional as F


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x**2) + eps) * weight * gate * sigmoid(gate)

    x       [..., width]
    gate    [..., width]
    weight  [width]
    return  shape of x, dtype of gate; computed in at least fp32
    """
    return gated_rms_norm_reference(x, gate, weight, eps)


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(dtype) * F.silu(gate.to(dtype))).to(gate.dtype)
