"""Log-probabilities of the chosen token and the most likely ones."""

import math

import pytest
import torch

from engine.ops import logprobs as op
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both


def small_blocks(logits, token_ids, num_top):
    return op.logprobs_triton(logits, token_ids, num_top, block=64)


IMPLEMENTATIONS = pytest.mark.parametrize("logprobs", both(op.logprobs_reference, small_blocks))


@IMPLEMENTATIONS
@pytest.mark.parametrize("num_top", [20, 3, 0])
def test_against_the_oracle(logprobs, num_top, device):
    logits = torch.randn(3, 300, device=device) * 4
    logits[:, 290:] = -torch.inf
    token_ids = torch.tensor([0, 289, 17], device=device)
    chosen, ids, values = logprobs(logits, token_ids, num_top)
    oracle = logits.double().log_softmax(-1)
    assert_matches(chosen, oracle.gather(-1, token_ids[:, None])[:, 0])
    assert torch.equal(ids, oracle.topk(num_top).indices)
    if num_top:
        assert_matches(values, oracle.topk(num_top).values)


@IMPLEMENTATIONS
def test_by_hand(logprobs, device):
    logits = torch.tensor([[math.log(x) for x in (1, 4, 1, 2)]], device=device)
    chosen, ids, values = logprobs(logits, torch.tensor([3], device=device), 4)
    assert ids.tolist() == [[1, 3, 0, 2]], "of equal ones the lower id first"
    expected = [math.log(x / 8) for x in (4, 2, 1, 1)]
    assert values[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert chosen.tolist() == pytest.approx([math.log(0.25)], abs=1e-6)


@IMPLEMENTATIONS
def test_a_part_without_possible_ids(logprobs, device):
    logits = torch.full((1, 200), -torch.inf, device=device)
    logits[0, [3, 150]] = torch.tensor([1.0, 2.0], device=device)
    chosen, ids, values = logprobs(logits, torch.tensor([150], device=device), 2)
    assert ids.tolist() == [[150, 3]]
    assert values[0].tolist() == pytest.approx([-math.log1p(math.exp(-1)), -1 - math.log1p(math.exp(-1))], abs=1e-6)
    assert chosen.item() == pytest.approx(values[0, 0].item())
