"""Root-mean-square normalisation over the last dimension."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """y = x / sqrt(mean(x**2) + eps) * weight

    x       [..., width]
    weight  [width], or one row per head: [heads, width] for x [rows, heads, width]
    return  shape and dtype of x; the mean is taken in at least fp32
    """
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.to(dtype)).to(x.dtype)
