"""Rotary position embedding of the first dimensions of each head."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + pairs) of the first 2 * pairs dims; the other dims pass through.

    x         [rows, heads, head_dim]
    cos, sin  [rows, pairs]  fp32
    return    shape and dtype of x; rotated in at least fp32
    """
    return rope_reference(x, cos, sin)


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, cos.dtype)
    first, second = x[..., :pairs].to(dtype), x[..., pairs : 2 * pairs].to(dtype)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([part.to(x.dtype) for part in rotated] + [x[..., 2 * pairs :]], dim=-1)
