"""Weights, memory and rows of a small Gated DeltaNet layer."""

import torch

from engine.ops.delta_state import DeltaState, DeltaWeights

DIM, PENDING = 128, 8
EPS = 1e-6


def delta_weights(key_heads, group, device):
    heads = key_heads * group
    channels = (2 * key_heads + heads) * DIM
    return DeltaWeights(
        conv=torch.randn(channels, 4, device=device) / 2,
        # half lives from a fraction of a row to thousands of rows
        decay=-torch.logspace(-3, 1.2, heads, device=device),
        dt_bias=torch.randn(heads, device=device),
        norm=torch.rand(DIM, device=device) + 0.5,
        eps=EPS,
        key_heads=key_heads,
        value_heads=heads,
        dim=DIM,
    )


def delta_memory(slots, weights, device):
    """States of sane size; what is pending is not a number until a pass has left it."""
    heads, key_heads, channels = weights.value_heads, weights.key_heads, len(weights.conv)

    def nan(*shape):
        return torch.full((slots, PENDING, *shape), float("nan"), device=device)

    inputs = torch.cat([torch.randn(slots, 3, channels, device=device), nan(channels)], dim=1)
    return DeltaState(
        state=torch.randn(slots, heads, DIM, DIM, device=device) / 8,
        inputs=inputs,
        pending_key=nan(key_heads, DIM),
        pending_u=nan(heads, DIM),
        pending_alpha=nan(heads),
    )


def copied(memory, dtype=None):
    return DeltaState(*(tensor.to(dtype or tensor.dtype, copy=True) for tensor in memory.tensors()))


def doubled(weights):
    """The same weights for an fp64 oracle."""
    tensors = (x.double() for x in (weights.conv, weights.decay, weights.dt_bias, weights.norm))
    return DeltaWeights(*tensors, weights.eps, weights.key_heads, weights.value_heads, weights.dim)


def delta_rows(rows, weights, device, dtype=torch.bfloat16):
    """What a projection gives."""
    width = len(weights.conv) + weights.value_heads * (DIM + 2)
    return torch.randn(rows, width, device=device).to(dtype)
