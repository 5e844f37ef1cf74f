"""argmax with torch's rule for equal numbers."""

import pytest
import torch

from engine.ops import sample_argmax as op
from tests.ops.kernels import both


def small_blocks(logits):
    return op.argmax_triton(logits, block=64)


IMPLEMENTATIONS = pytest.mark.parametrize("argmax", both(op.argmax_reference, small_blocks))


@IMPLEMENTATIONS
@pytest.mark.parametrize("rows, vocab", [(1, 64), (3, 300), (2, 5)])
def test_few_different_numbers(argmax, rows, vocab, device):
    logits = torch.randn(rows, vocab, device=device).mul(2).round()
    assert argmax(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]


@IMPLEMENTATIONS
def test_numbers_that_order_strangely(argmax, device):
    inf, nan = float("inf"), float("nan")
    rows = [
        [-0.0, 0.0, -1.0],
        [-inf, -inf, -inf],
        [-inf, -2.0, -1.0],
        [1.0, inf, inf],
        [1.0, -nan, nan],
        [-3e38, -1e-40, -1e-38],
    ]
    assert argmax(torch.tensor(rows, device=device)).tolist() == [0, 0, 2, 1, 1, 1]


@IMPLEMENTATIONS
def test_rows_of_a_wider_tensor(argmax, device):
    logits = torch.randn(2, 200, device=device)
    assert argmax(logits[:, :130]).tolist() == logits[:, :130].contiguous().argmax(-1).tolist()
