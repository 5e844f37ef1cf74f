"""The order of columns for matrices in 4 bits, and the operations that write in it."""

import pytest
import torch
import triton
import triton.language as tl

from engine.ops.halved import halved, halved_column
from engine.ops.rms_norm import rms_norm_reference
from engine.ops.rms_norm_halved import rms_norm_halved_reference, rms_norm_halved_triton
from engine.ops.sigmoid_mul import sigmoid_gate_reference, sigmoid_gate_triton
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both, needs_kernels

NORMS = pytest.mark.parametrize("implementation", both(rms_norm_halved_reference, rms_norm_halved_triton))
GATES = pytest.mark.parametrize("implementation", both(sigmoid_gate_reference, sigmoid_gate_triton))


def test_by_hand():
    order = halved(torch.arange(128)).tolist()
    assert order[:33] == [*range(16), *range(32, 48), 16]
    assert order[64:] == [64 + column for column in order[:64]]
    assert torch.equal(halved(halved(torch.arange(128))), torch.arange(128))


@triton.jit
def columns_kernel(y_ptr, COUNT: tl.constexpr):
    column = tl.arange(0, COUNT)
    tl.store(y_ptr + halved_column(column), column)


@needs_kernels
def test_the_device_puts_columns_where_the_host_does(device):
    found = torch.zeros(128, dtype=torch.int32, device=device)
    columns_kernel[(1,)](found, COUNT=128)
    assert torch.equal(found.cpu(), halved(torch.arange(128)).int())


@NORMS
@pytest.mark.parametrize("rows, width", [(1, 64), (5, 320)])
def test_norm_matches_its_oracle_in_both_orders(implementation, rows, width, device):
    x = torch.randn(rows, width + 64, device=device)[:, :width]
    weight = torch.rand(width, device=device) + 0.5
    y, ordered = implementation(x, weight, 1e-6)
    assert_matches(y, rms_norm_reference(x.double(), weight.double(), 1e-6))
    assert torch.equal(ordered, halved(y))


@GATES
@pytest.mark.parametrize("halves", [False, True])
def test_gate_matches_its_oracle(implementation, halves, device):
    x, gate = torch.randn(3, 128, device=device).half(), torch.randn(3, 192, device=device)[:, 64:]
    exact = x.double() * torch.sigmoid(gate.double())
    y = implementation(x, gate, halves)
    assert y.dtype == gate.dtype
    assert_matches(y, halved(exact) if halves else exact)


@GATES
def test_gate_by_hand(implementation, device):
    x, gate = torch.tensor([[3.0] * 64], device=device), torch.tensor([[0.0] * 64], device=device)
    assert (implementation(x, gate) == 1.5).all()
