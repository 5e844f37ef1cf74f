"""Cosines and sines of the rotary position embedding."""

import torch
import triton
import triton.language as tl

from engine.ops.launch import next_power_of_2, plain_options


def rope_angles(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """scale * cos(p * f), scale * sin(p * f)

    positions            [rows] int64
    inverse_frequencies  [pairs] fp32, radians per token
    return               two of [rows, pairs] fp32; the product is rounded to fp32 before its cosine is taken
    """
    if positions.is_cuda:
        return rope_angles_triton(positions, inverse_frequencies, scale)
    return rope_angles_reference(positions, inverse_frequencies, scale)


def rope_angles_reference(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions.float().unsqueeze(-1) * inverse_frequencies
    return (angles.cos(), angles.sin()) if scale == 1 else (angles.cos() * scale, angles.sin() * scale)


def rope_angles_triton(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, pairs = len(positions), len(inverse_frequencies)
    cos, sin = (torch.empty(rows, pairs, dtype=torch.float32, device=positions.device) for _ in range(2))
    block = next_power_of_2(pairs)
    rope_angles_kernel[(rows,)](
        positions, inverse_frequencies, cos, sin, scale, pairs, BLOCK=block, **plain_options(4, is_fused=True)
    )
    return cos, sin


@triton.jit
def rope_angles_kernel(positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, scale, pairs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    mask = pair < pairs
    position = tl.load(positions_ptr + row).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + pair, mask=mask, other=0.0)
    tl.store(cos_ptr + row * pairs + pair, tl.cos(angle) * scale, mask=mask)
    tl.store(sin_ptr + row * pairs + pair, tl.sin(angle) * scale, mask=mask)
