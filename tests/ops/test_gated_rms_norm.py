import math

import pytest
import torch

from engine.ops.gated_rms_norm import gated_rms_norm_reference, gated_rms_norm_triton
from engine.ops.halved import halved
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both

# no more than the last of a number's bits
LAST = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
BOTH = pytest.mark.parametrize("implementation", both(gated_rms_norm_reference, gated_rms_norm_triton))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, heads", [(1, 1), (7, 3)])
def test_matches_oracle(implementation, dtype, rows, heads, device):
    x = torch.randn(rows, heads, 128, device=device)
    # as it stands in a projection: between other columns
    gate = torch.randn(rows, heads * 128 + 64, dtype=dtype, device=device)[:, 32:-32].unflatten(1, (heads, 128))
    weight = torch.rand(128, device=device) + 0.5
    y = implementation(x, gate, weight, eps=1e-6)
    assert y.dtype == dtype
    oracle = gated_rms_norm_reference(x.double(), gate.double(), weight.double(), eps=1e-6)
    # the interpreter cuts numbers of 8 bits off
    assert ((y.double() - oracle).abs() <= LAST[dtype] * oracle.abs() + 1e-7).all()


@BOTH
def test_by_hand(implementation, device):
    x, gate = (torch.tensor([values], device=device) for values in ([3.0, 4.0], [0.0, 1.0]))
    y = implementation(x, gate, torch.tensor([1.0, 2.0], device=device), eps=0.0)
    silu_of_one = 1 / (1 + math.exp(-1))
    expected = torch.tensor([[0.0, 8 / 12.5**0.5 * silu_of_one]], dtype=torch.float64, device=device)
    assert_matches(y, expected)


@BOTH
def test_zero_row_stays_finite(implementation, device):
    zeros = torch.zeros(2, 128, device=device)
    assert (implementation(zeros, zeros + 1, zeros[0] + 1, eps=1e-6) == 0).all()


@BOTH
def test_halves_its_result(implementation, device):
    x, gate = (torch.randn(3, 2, 128, device=device) for _ in range(2))
    weight = torch.rand(128, device=device)
    assert torch.equal(implementation(x, gate, weight, 1e-6, True), halved(implementation(x, gate, weight, 1e-6)))
