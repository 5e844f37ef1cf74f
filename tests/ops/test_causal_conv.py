import pytest
import torch
import torch.nn.functional as F

from engine.ops.causal_conv import causal_conv_reference
from tests.ops.conftest import assert_matches

KEPT = 3
PENDING = 8


def memory(slots, channels, device):
    return torch.randn(slots, KEPT + PENDING, channels, device=device)


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [[1], [8], [2, 2], [1, 5, 3]])
def test_matches_oracle(commits, dtype, num_rows, device):
    x = torch.randn(sum(num_rows), 40, dtype=dtype, device=device)
    weight, inputs = torch.randn(40, 4, device=device), memory(5, 40, device)
    slots = torch.tensor([4, 1, 2], device=device)[: len(num_rows)]
    oracle = causal_conv_reference(x.double(), weight.double(), inputs.double(), slots, num_rows, commits)
    assert_matches(causal_conv_reference(x, weight, inputs, slots, num_rows, commits), oracle)


@pytest.mark.parametrize("num_rows", [[1], [7], [2, 30, 1]])
def test_equals_torch_convolution_of_the_whole_sequence(num_rows, device):
    x = torch.randn(sum(num_rows), 40, device=device)
    weight, inputs = torch.randn(40, 4, device=device), memory(3, 40, device)
    before = inputs.clone()
    actual = causal_conv_reference(x, weight, inputs, torch.arange(len(num_rows)), num_rows, commits=True)
    expected = []
    for slot, rows in enumerate(x.split(num_rows)):
        sequence = torch.cat([before[slot, :KEPT], rows]).double()
        expected.append(F.silu(F.conv1d(sequence.T[None], weight.double()[:, None], groups=40))[0].T)
        assert torch.equal(inputs[slot, :KEPT], sequence[-KEPT:].float())
        assert torch.equal(inputs[slot, KEPT:], before[slot, KEPT:])
    assert_matches(actual, torch.cat(expected))


def test_by_hand(device):
    inputs = torch.zeros(1, KEPT + PENDING, 1, device=device)
    inputs[0, :KEPT, 0] = torch.tensor([1.0, 2.0, 3.0])
    weight = torch.tensor([[1.0, 10.0, 100.0, 1000.0]], device=device)
    x = torch.tensor([[4.0], [5.0]], device=device)
    y = causal_conv_reference(x, weight, inputs, torch.tensor([0]), [2], commits=True)
    assert_matches(y, torch.tensor([[4321.0], [5432.0]], dtype=torch.float64, device=device))
    assert inputs[0, :KEPT, 0].tolist() == [3.0, 4.0, 5.0]


def test_pending_rows_leave_the_committed_inputs_alone(device):
    inputs = memory(3, 8, device)
    before, x = inputs.clone(), torch.randn(5, 8, device=device)
    slots = torch.tensor([2, 0], device=device)
    causal_conv_reference(x, torch.randn(8, 4, device=device), inputs, slots, [3, 2], commits=False)
    assert torch.equal(inputs[:, :KEPT], before[:, :KEPT])
    assert torch.equal(inputs[2, KEPT : KEPT + 3], x[:3])
    assert torch.equal(inputs[0, KEPT : KEPT + 2], x[3:])
    assert torch.equal(inputs[1], before[1])
