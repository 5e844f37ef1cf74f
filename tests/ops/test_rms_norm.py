import pytest
import torch

from engine.ops.rms_norm import rms_norm, rms_norm_reference, rms_norm_triton
from tests.ops.conftest import assert_matches
from tests.ops.kernels import IS_INTERPRETED, both

IMPLEMENTATIONS = both(rms_norm_reference, rms_norm_triton)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, hidden", [(1, 128), (7, 129), (3, 5120)])
def test_matches_oracle(implementation, dtype, tokens, hidden, device):
    if IS_INTERPRETED and dtype == torch.bfloat16 and implementation is rms_norm_triton:
        pytest.skip("the interpreter truncates to bf16")
    x = torch.randn(tokens, hidden, dtype=dtype, device=device)
    weight = torch.rand(hidden, device=device) + 0.5
    oracle = rms_norm_reference(x.double(), weight.double(), eps=1e-6)
    assert_matches(implementation(x, weight, eps=1e-6), oracle)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads_of_a_wider_row(implementation, device):
    wide = torch.randn(4, 3 * 64 + 32, device=device)
    x = wide[:, : 3 * 64].unflatten(-1, (3, 64))
    weight = torch.rand(3, 64, device=device)
    oracle = rms_norm_reference(x.double(), weight.double(), eps=1e-6)
    assert_matches(implementation(x, weight, eps=1e-6), oracle)


def test_by_hand(device):
    x = torch.tensor([[3.0, 4.0]], device=device)  # mean square 12.5
    y = rms_norm(x, torch.tensor([1.0, 2.0], device=device), eps=0.0)
    assert_matches(y, torch.tensor([[3.0, 8.0]], device=device, dtype=torch.float64) / 12.5**0.5)


def test_each_head_has_its_own_weight(device):
    x = torch.randn(5, 3, 64, device=device)
    weight = torch.randn(3, 64, device=device)
    y = rms_norm(x, weight, eps=1e-6)
    for head in range(3):
        assert torch.equal(y[:, head], rms_norm(x[:, head], weight[head], eps=1e-6))


def test_zero_row_stays_finite(device):
    y = rms_norm(torch.zeros(1, 64, device=device), torch.ones(64, device=device), eps=1e-6)
    assert (y == 0).all()
