"""quantized_weight: rounding, and where each byte lies."""

import pytest
import torch

from engine.ops.quantized_weight import QuantizedWeight, dequantize_weight, pack, quantize_weight, stack_rows, unpack


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 64), (40, 192), (3, 17, 128)])
def test_what_is_packed_is_unpacked(bits, shape):
    *stack, rows, columns = shape
    tiles = -(-rows // 16)
    largest = 8 if bits == 4 else 127
    codes = torch.randint(-largest, 8 if bits == 4 else 128, (*stack, tiles * 16, columns // 64, 64), dtype=torch.int8)
    scales = torch.rand(*stack, tiles, columns // 64, 16).half()
    weight = QuantizedWeight(pack(codes, bits), scales, rows, bits)
    read, read_scales = unpack(weight)
    assert torch.equal(read, codes[..., :rows, :, :])
    for row in (0, rows - 1):
        assert torch.equal(read_scales[..., row, :], scales[..., row // 16, :, row % 16])
    assert weight.columns == columns
    assert weight.words.nbytes * 8 == bits * codes.numel()


def test_bytes_by_hand():
    """Row 18, column 64 + 32 + 16 + 5: tile 1, group 1, plane 1, row 2, the high nibble of byte 5."""
    codes = torch.full((32, 2, 64), -8, dtype=torch.int8)
    codes[18, 1, 53] = 3
    words = pack(codes, 4)
    assert words.shape == (2, 2, 2, 16, 4)
    nonzero = words.view(torch.uint8).nonzero().tolist()
    assert nonzero == [[1, 1, 1, 2, 5]]
    assert words[1, 1, 1, 2, 1].item() == (3 + 8) << 12
    eight = torch.zeros(32, 2, 64, dtype=torch.int8)
    eight[18, 1, 53] = -1
    words = pack(eight, 8)
    assert words.shape == (2, 2, 4, 16, 4)
    assert words.view(torch.int8)[1, 1, 3, 2, 5] == -1 and words.count_nonzero() == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_on_the_grid_are_kept(bits):
    largest = 8 if bits == 4 else 127
    codes = torch.randint(1 - largest, largest, (16, 2, 64))
    codes[:, :, 0] = -largest
    weight = (codes * 2.0**-6).flatten(1)
    stored, squares = quantize_weight(weight, bits)
    assert torch.equal(dequantize_weight(stored), weight)
    assert squares[0, 0] == 0


@pytest.mark.parametrize("bits, expected", [(4, 0.0083), (8, 3.5e-5)])
def test_error_is_below_that_of_max_abs(bits, expected):
    weight = torch.randn(2, 64, 512) * 0.02
    stored, squares = quantize_weight(weight, bits)
    error = (dequantize_weight(stored) - weight).double().square().sum()
    assert error / weight.double().square().sum() < expected
    assert torch.allclose(squares[0, 0], error, rtol=1e-5) and squares[0, 0] < 0.97 * squares[1, 0]
    assert torch.allclose(squares[:, 1], weight.double().square().sum())
    largest = weight.abs().unflatten(-1, (-1, 64)).amax(-1, keepdim=True) / (7 if bits == 4 else 127)
    plain = (weight.unflatten(-1, (-1, 64)) / largest.half().float()).round().clamp(-127, 127) * largest.half().float()
    assert torch.allclose(squares[1, 0], (plain.flatten(-2) - weight).double().square().sum(), rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_and_rows_of_padding_are_zero(bits):
    weight = torch.zeros(20, 128)
    weight[3, 70] = 1.0 if bits == 4 else 127 / 128
    stored, _ = quantize_weight(weight, bits)
    assert torch.equal(dequantize_weight(stored), weight)
    assert stored.scales.shape == (2, 2, 16) and (stored.scales[1, :, 4:] == 0).all()


def test_no_group_is_worse_than_max_abs():
    weight = torch.distributions.StudentT(3.0).sample((16, 512)) * 0.01
    for bits in (4, 8):
        for row in weight.split(1):
            _, squares = quantize_weight(row[:, :64], bits)
            assert squares[0, 0] <= squares[1, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_cannot_be_stored_is_refused(value):
    weight = torch.ones(16, 64)
    weight[2, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize_weight(weight, 4)
    with pytest.raises(ValueError, match="multiple of 64"):
        quantize_weight(torch.ones(16, 65), 8)


def test_stacked_rows():
    numbers = [torch.randn(rows, 128) for rows in (32, 20, 16, 16)]
    parts = [quantize_weight(number, bits)[0] for number, bits in zip(numbers, (8, 8, 8, 4), strict=True)]
    stacked = stack_rows(parts)
    # 20 rows fill no whole tile, and 8 bits do not go with 4
    assert [(weight.rows, weight.bits) for weight in stacked] == [(52, 8), (16, 8), (16, 4)]
    together = torch.cat([dequantize_weight(weight) for weight in stacked])
    assert torch.equal(together, torch.cat([dequantize_weight(weight) for weight in parts]))
