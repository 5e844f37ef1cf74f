"""quantized_linear: against its oracle, and one arithmetic whatever the number of rows."""

import pytest
import torch

from engine.ops.quantize_rows import QuantizedRows, quantize_rows_reference
from engine.ops.quantized_linear import quantized_linear_reference, quantized_linear_triton
from engine.ops.quantized_weight import QuantizedWeight, dequantize_weight, pack, quantize_weight
from tests.ops.conftest import assert_matches
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels

IMPLEMENTATIONS = both(quantized_linear_reference, quantized_linear_triton)
BITS = pytest.mark.parametrize("bits", [4, 8])


def example(rows, outputs, columns, bits, device):
    weight, _ = quantize_weight(torch.randn(outputs, columns, device=device) * columns**-0.5, bits)
    return quantize_rows_reference(torch.randn(rows, columns, device=device)), weight


def oracle(x, *weights):
    """The product of the numbers that codes and scales stand for."""
    groups = x.values.double().unflatten(-1, (-1, 64)) * x.scales.double().unsqueeze(-1)
    return groups.flatten(-2) @ torch.cat([dequantize_weight(weight) for weight in weights]).double().T


def first(x, count):
    return QuantizedRows(x.values[:count], x.scales[:count], x.sums[:count])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@BITS
@pytest.mark.parametrize("rows, outputs, columns", [(1, 16, 64), (3, 20, 192), (9, 40, 576)])
def test_matches_oracle(implementation, bits, rows, outputs, columns, device):
    x, weight = example(rows, outputs, columns, bits, device)
    residual = torch.randn(rows, outputs, dtype=torch.bfloat16, device=device)
    exact = oracle(x, weight)
    assert_matches(implementation(x, [weight], torch.float32), exact)
    assert_matches(implementation(x, [weight], torch.float32, residual), exact + residual.double())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@BITS
@pytest.mark.parametrize("rows", [1, 9])
def test_two_matrices_stand_one_above_the_other(implementation, bits, rows, device):
    x, first_weight = example(rows, 32, 192, bits, device)
    last_weight, _ = quantize_weight(torch.randn(20, 192, device=device), 12 - bits)
    residual = torch.randn(rows, 52, device=device)
    exact = oracle(x, first_weight, last_weight)
    assert_matches(implementation(x, [first_weight, last_weight], torch.float32), exact)
    assert_matches(implementation(x, [first_weight, last_weight], torch.float32, residual), exact + residual.double())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bf16_is_the_rounded_fp32(implementation, device):
    x, weight = example(2, 32, 64, 4, device)
    wide, narrow = (implementation(x, [weight], dtype) for dtype in (torch.float32, torch.bfloat16))
    # the interpreter truncates: one unit in the last place
    assert ((narrow.float() - wide).abs() <= wide.abs() * 2.0 ** (-7 if IS_INTERPRETED else -8)).all()


def test_oracle_is_the_reference_in_fp64(device):
    x, weight = example(2, 32, 576, 4, device)
    wide = QuantizedRows(x.values, x.scales.double(), x.sums)
    assert torch.allclose(quantized_linear_reference(wide, [weight], torch.float64), oracle(x, weight), rtol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@BITS
def test_by_hand(implementation, bits, device):
    codes = torch.zeros(16, 1, 64, dtype=torch.int8, device=device)
    codes[5, 0, 0], codes[5, 0, 40], codes[5, 0, 63] = -8, 7, 3
    weight = QuantizedWeight(pack(codes, bits), torch.full((1, 1, 16), 0.5, device=device).half(), 16, bits)
    values = torch.zeros(1, 64, dtype=torch.int8, device=device)
    values[0, 0], values[0, 40], values[0, 63] = 1, -127, 10
    sums = torch.tensor([[-116]], dtype=torch.int32, device=device)
    y = implementation(QuantizedRows(values, torch.tensor([[2.0]], device=device), sums), [weight], torch.float32)
    assert y[0, 5].item() == -8 - 889 + 30
    assert y.count_nonzero() == 1


@needs_kernels
@pytest.mark.parametrize("bits, columns", [(4, 576), (8, 576), (4, 4160)])
def test_every_path_has_the_bits_of_the_reference(bits, columns, device):
    """Rows one by one, in pairs, and through matrix instructions."""
    x, weight = example(3 if IS_INTERPRETED else 32, 16, columns, bits, device)
    expected = quantized_linear_reference(x, [weight], torch.float32)
    for rows in (1, 2, 3) if IS_INTERPRETED else range(1, 33):
        assert torch.equal(quantized_linear_triton(first(x, rows), [weight], torch.float32), expected[:rows])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_rows_than_one_launch_takes(implementation, device):
    rows = 5 if IS_INTERPRETED else 35
    x, weight = example(rows, 16, 64, 4, device)
    residual = torch.randn(rows, 16, device=device)
    assert_matches(implementation(x, [weight], torch.float32, residual), oracle(x, weight) + residual.double())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@BITS
def test_largest_numbers_stay_exact(implementation, bits, device):
    """All codes and activations at their extremes: the largest sum that a group can have."""
    codes = torch.full((16, 9, 64), -8 if bits == 4 else -127, dtype=torch.int8, device=device)
    weight = QuantizedWeight(pack(codes, bits), torch.ones(1, 9, 16, device=device).half(), 16, bits)
    values = torch.full((1, 576), -127, dtype=torch.int8, device=device)
    sums = torch.full((1, 9), -127 * 64, dtype=torch.int32, device=device)
    y = implementation(QuantizedRows(values, torch.ones(1, 9, device=device), sums), [weight], torch.float32)
    assert (y == 576 * 127 * (8 if bits == 4 else 127)).all()
