"""quantized_embedding."""

import pytest
import torch

from engine.ops.quantized_embedding import quantized_embedding_reference, quantized_embedding_triton
from engine.ops.quantized_weight import dequantize_weight, quantize_weight
from tests.ops.kernels import IS_INTERPRETED, both

IMPLEMENTATIONS = both(quantized_embedding_reference, quantized_embedding_triton)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_those_of_the_matrix(implementation, bits, device):
    weight, _ = quantize_weight(torch.randn(50, 192, device=device), bits)
    token_ids = torch.tensor([0, 49, 17, 17, 31], device=device)
    expected = dequantize_weight(weight)[token_ids]
    assert torch.equal(implementation(token_ids, weight, torch.float32), expected)
    narrow = implementation(token_ids, weight, torch.bfloat16).float()
    # the interpreter truncates: one unit in the last place
    assert ((narrow - expected).abs() <= expected.abs() * 2.0 ** (-7 if IS_INTERPRETED else -8)).all()
