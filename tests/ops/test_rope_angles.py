import math

import pytest
import torch

from engine.ops.rope_angles import rope_angles_kernel, rope_angles_reference, rope_angles_triton
from tests.ops.kernels import IS_INTERPRETED, both
from tests.ops.targets import SHARED_MEMORY, compiled

ANGLES = both(rope_angles_reference, rope_angles_triton)


@pytest.mark.parametrize("rope_angles", ANGLES)
def test_quarter_turns(rope_angles, device):
    positions = torch.tensor([0, 1, 2], device=device)
    cos, sin = rope_angles(positions, torch.tensor([math.pi / 2, math.pi], device=device), 2.0)
    expected = torch.tensor([[2.0, 2.0], [0.0, -2.0], [-2.0, 2.0]], device=device)
    assert (cos - expected).abs().max() < 1e-5
    assert (sin - torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]], device=device)).abs().max() < 1e-5


@pytest.mark.parametrize("rope_angles", ANGLES)
@pytest.mark.parametrize("scale", [1.0, 1.1386])
def test_far_positions_are_exact_turns_of_the_rounded_angle(rope_angles, scale, device):
    """A million radians and more: whoever reduces them carelessly is off by far."""
    positions = torch.tensor([3, 4095, 262_143, 1_009_999], device=device)
    frequencies = 1e7 ** (-torch.arange(24, device=device) / 24)
    angles = (positions.float()[:, None] * frequencies).double()
    for actual, expected in zip(rope_angles(positions, frequencies, scale), (angles.cos(), angles.sin()), strict=True):
        assert (actual.double() - scale * expected).abs().max() < 1e-6


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles(capability):
    pointers = {name: "*fp32" for name in ("frequencies_ptr", "cos_ptr", "sin_ptr")}
    types = pointers | {"positions_ptr": "*i64", "scale": "fp32", "pairs": "i32"}
    compiled(rope_angles_kernel, capability, types, {"BLOCK": 32}, 4)
