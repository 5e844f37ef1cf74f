"""The elementwise gates: silu_mul, sigmoid_mul, gated_delta_gates."""

import math

import pytest
import torch

from engine.ops.gated_delta_gates import gated_delta_gates_reference
from engine.ops.sigmoid_mul import sigmoid_mul, sigmoid_mul_reference
from engine.ops.silu_mul import silu_mul, silu_mul_reference
from tests.ops.conftest import assert_matches

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@DTYPES
def test_silu_mul_matches_oracle(dtype, device):
    x = torch.randn(5, 2 * 33, dtype=dtype, device=device)
    assert_matches(silu_mul(x), silu_mul_reference(x.double()))


def test_silu_mul_by_hand(device):
    y = silu_mul(torch.tensor([[1.0, 0.0, 3.0, 5.0]], device=device))
    expected = [[3 / (1 + math.exp(-1)), 0.0]]
    assert_matches(y, torch.tensor(expected, dtype=torch.float64, device=device))


@DTYPES
@pytest.mark.parametrize("gate_width", [1, 40])
def test_sigmoid_mul_matches_oracle(dtype, gate_width, device):
    x = torch.randn(5, 40, dtype=dtype, device=device)
    gate = torch.randn(5, gate_width, dtype=dtype, device=device)
    assert_matches(sigmoid_mul(x, gate), sigmoid_mul_reference(x.double(), gate.double()))


def test_sigmoid_mul_by_hand(device):
    y = sigmoid_mul(torch.tensor([[6.0, 2.0]], device=device), torch.tensor([[math.log(2.0)]], device=device))
    assert_matches(y, torch.tensor([[4.0, 4 / 3]], dtype=torch.float64, device=device))


@DTYPES
def test_delta_gates_match_oracle(dtype, device):
    a, b = torch.randn(2, 7, 6, dtype=dtype, device=device)
    decay, dt_bias = -torch.rand(6, device=device) * 16, torch.randn(6, device=device)
    actual = gated_delta_gates_reference(a, b, decay, dt_bias)
    oracle = gated_delta_gates_reference(a.double(), b.double(), decay.double(), dt_bias.double())
    for got, expected in zip(actual, oracle, strict=True):
        assert_matches(got, expected)


def test_delta_gates_by_hand(device):
    a, b, decay, dt_bias = (torch.tensor(values, device=device) for values in ([[0.5]], [[0.0]], [-2.0], [-0.5]))
    log_alpha, beta = gated_delta_gates_reference(a, b, decay, dt_bias)  # softplus(0) = ln 2
    assert_matches(log_alpha.exp(), torch.tensor([[0.25]], dtype=torch.float64, device=device))
    assert_matches(beta, torch.tensor([[0.5]], dtype=torch.float64, device=device))
