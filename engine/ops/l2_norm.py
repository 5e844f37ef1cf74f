"""Scaling of vectors to unit length."""

import torch


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """y = x / sqrt(sum(x**2) + eps)

    x       [..., width]
    return  shape of x, in at least fp32
    """
    return l2_norm_reference(x, eps)


def l2_norm_reference(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + eps)
