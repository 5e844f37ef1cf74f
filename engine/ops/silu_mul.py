"""The gate of a SwiGLU feed-forward."""

import torch
import torch.nn.functional as F


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """y = silu(gate) * up, where x = [gate | up] along the last dimension

    x       [..., 2 * width]
    return  [..., width]  dtype of x; computed in at least fp32
    """
    return silu_mul_reference(x)


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
