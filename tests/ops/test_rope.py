import math

import pytest
import torch

from engine.ops.rope import rope, rope_reference
from tests.ops.conftest import assert_matches


def angles(rows, device):
    turned = torch.arange(rows, device=device).float()[:, None] * torch.rand(32, device=device)
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matches_oracle(dtype, device):
    x = torch.randn(7, 3, 256, dtype=dtype, device=device)
    cos, sin = angles(7, device)
    assert_matches(rope(x, cos, sin), rope_reference(x.double(), cos.double(), sin.double()))


def test_by_hand(device):
    """A quarter turn of the pair (0, 2) of four rotated dims; pair (1, 3) stays, and so do the dims after them."""
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0]]], device=device)
    cos, sin = (torch.tensor([values], device=device) for values in ([0.0, 1.0], [1.0, 0.0]))
    expected = torch.tensor([[[-3.0, 2.0, 1.0, 4.0, 5.0]]], dtype=torch.float64, device=device)
    assert_matches(rope(x, cos, sin), expected)


def test_product_depends_on_distance_only(device):
    q, k = torch.randn(2, 1, 1, 64, dtype=torch.float64, device=device)

    def at(x, position):
        turned = torch.tensor([[position * math.pi / (i + 3) for i in range(32)]], dtype=torch.float64, device=device)
        return rope(x, turned.cos(), turned.sin())

    near, far = ((at(q, p + 5) * at(k, p)).sum() for p in (0, 1000))
    assert torch.isclose(near, far, rtol=1e-9)
