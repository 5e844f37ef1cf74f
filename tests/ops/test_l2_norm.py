import pytest
import torch

from engine.ops.l2_norm import l2_norm, l2_norm_reference
from tests.ops.conftest import assert_matches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matches_oracle(dtype, device):
    x = torch.randn(7, 3, 128, dtype=dtype, device=device)
    assert_matches(l2_norm(x), l2_norm_reference(x.double()))


def test_by_hand(device):
    y = l2_norm(torch.tensor([[3.0, 4.0]], device=device), eps=0.0)
    assert_matches(y, torch.tensor([[0.6, 0.8]], dtype=torch.float64, device=device))


def test_zero_vector_stays_zero(device):
    assert (l2_norm(torch.zeros(1, 128, device=device)) == 0).all()
