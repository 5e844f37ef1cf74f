import math

import pytest
import torch

from engine.ops.gated_rms_norm import gated_rms_norm, gated_rms_norm_reference
from tests.ops.conftest import assert_matches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, heads", [(1, 1), (7, 3)])
def test_matches_oracle(dtype, rows, heads, device):
    x = torch.randn(rows, heads, 128, device=device)
    gate = torch.randn(rows, heads, 128, dtype=dtype, device=device)
    weight = torch.rand(128, device=device) + 0.5
    y = gated_rms_norm(x, gate, weight, eps=1e-6)
    assert y.dtype == dtype
    assert_matches(y, gated_rms_norm_reference(x.double(), gate.double(), weight.double(), eps=1e-6))


def test_by_hand(device):
    x, gate = (torch.tensor([values], device=device) for values in ([3.0, 4.0], [0.0, 1.0]))
    y = gated_rms_norm(x, gate, torch.tensor([1.0, 2.0], device=device), eps=0.0)
    silu_of_one = 1 / (1 + math.exp(-1))
    expected = torch.tensor([[0.0, 8 / 12.5**0.5 * silu_of_one]], dtype=torch.float64, device=device)
    assert_matches(y, expected)


def test_zero_row_stays_finite(device):
    zeros = torch.zeros(2, 128, device=device)
    assert (gated_rms_norm(zeros, zeros + 1, zeros[0] + 1, eps=1e-6) == 0).all()
