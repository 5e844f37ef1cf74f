"""quantize_rows and what it is fused with."""

import pytest
import torch

from engine.ops import quantize_rows as op
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both

PLAIN = both(op.quantize_rows_reference, op.quantize_rows_triton)
SILU = both(op.quantize_silu_mul_reference, op.quantize_silu_mul_triton)
NORM = both(op.quantize_rms_norm_reference, op.quantize_rms_norm_triton)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def numbers(rows):
    return rows.values.double().unflatten(-1, (-1, 64)) * rows.scales.double().unsqueeze(-1)


def assert_rounds(rows, exact):
    """Every number within half a step of what it stands for, sums and types right."""
    groups = exact.double().unflatten(-1, (-1, 64))
    assert rows.values.dtype == torch.int8 and rows.sums.dtype == torch.int32 and rows.scales.dtype == torch.float32
    assert_matches(rows.scales, groups.abs().amax(-1) / 127)
    assert ((numbers(rows) - groups).abs() <= rows.scales.double().unsqueeze(-1) * 0.5001).all()
    assert torch.equal(rows.sums, rows.values.unflatten(-1, (-1, 64)).sum(-1, dtype=torch.int32))


@pytest.mark.parametrize("implementation", PLAIN)
@DTYPES
@pytest.mark.parametrize("rows, columns", [(1, 64), (3, 704)])
def test_plain(implementation, dtype, rows, columns, device):
    x = torch.randn(rows, columns, dtype=dtype, device=device)
    assert_rounds(implementation(x), x)


@pytest.mark.parametrize("implementation", PLAIN)
def test_by_hand(implementation, device):
    x = torch.zeros(1, 128, device=device)
    # 254 / 127 = 2 a step; 1, 3, 5 lie half way: to even
    x[0, :5] = torch.tensor([254.0, 1.0, 3.0, -5.0, 7.1])
    rows = implementation(x)
    assert rows.values[0, :6].tolist() == [127, 0, 2, -2, 4, 0]
    assert rows.scales.tolist() == [[2.0, 0.0]] and rows.sums.tolist() == [[131, 0]]


@pytest.mark.parametrize("implementation", SILU)
@DTYPES
def test_silu_mul(implementation, dtype, device):
    x = torch.randn(2, 384, dtype=dtype, device=device)
    gate, up = x.double().chunk(2, dim=-1)
    assert_rounds(implementation(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("implementation", NORM)
@DTYPES
@pytest.mark.parametrize("rows, columns, size", [(1, 64, 1.0), (3, 192, 1e-4), (2, 704, 1e4)])
def test_rms_norm(implementation, dtype, rows, columns, size, device):
    x = (torch.randn(rows, columns, device=device) * size).to(dtype)
    weight = torch.rand(columns, device=device) + 0.5
    wide = x.double()
    assert_rounds(
        implementation(x, weight, 1e-6),
        wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(),
    )


@pytest.mark.parametrize("implementation", NORM)
def test_rms_norm_of_zeros_and_by_hand(implementation, device):
    x = torch.zeros(2, 64, device=device)
    x[1, :2] = torch.tensor([3.0, -4.0])
    rows = implementation(x, torch.ones(64, device=device), 25 / 64 * 3)
    # the mean of squares is 25 / 64: the root is twice that of it alone, 5 / 4
    assert rows.scales[0].item() == 0 and not rows.values[0].any()
    assert rows.values[1, :3].tolist() == [95, -127, 0]
    assert abs(rows.scales[1].item() * 127 - 4 / 1.25) < 1e-6


@pytest.mark.parametrize("implementation", NORM)
def test_rms_norm_of_a_row_does_not_depend_on_others(implementation, device):
    x = torch.randn(4, 192, device=device)
    x[1] = 1e4
    weight = torch.rand(192, device=device)
    whole, last = implementation(x, weight, 1e-6), implementation(x[3:], weight, 1e-6)
    assert torch.equal(whole.values[3:], last.values) and torch.equal(whole.scales[3:], last.scales)


@pytest.mark.parametrize("implementation", PLAIN)
def test_bits_do_not_depend_on_other_rows(implementation, device):
    x = torch.randn(4, 192, device=device)
    whole, last = implementation(x), implementation(x[3:])
    assert torch.equal(whole.values[3:], last.values) and torch.equal(whole.scales[3:], last.scales)
