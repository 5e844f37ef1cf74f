"""choose and choose_at: the choice of experts inside kernels is that of route."""

import pytest
import torch
import triton
import triton.language as tl

from engine.ops.route import choose, choose_at, chosen_at, route
from tests.ops.kernels import needs_kernels

COUNT = 8


@triton.jit
def choose_kernel(logits_ptr, together_ptr, each_ptr, experts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.arange(0, COUNT)
    chosen = choose(logits_ptr, experts, COUNT, BLOCK)
    tl.store(together_ptr + slot, chosen_at(chosen, slot, COUNT))
    place = tl.program_id(0)
    tl.store(each_ptr + place, choose_at(logits_ptr, experts, place, BLOCK))


def chosen(logits):
    together, each = (torch.full((COUNT,), -1, dtype=torch.int32, device=logits.device) for _ in range(2))
    block = 32 * triton.cdiv(len(logits), 32)
    choose_kernel[(COUNT,)](logits, together, each, len(logits), COUNT=COUNT, BLOCK=block)
    assert torch.equal(together, each)
    return together.tolist()


@needs_kernels
@pytest.mark.parametrize("experts", [8, 40, 256])
def test_is_the_choice_of_route(experts, device):
    logits = torch.randn(experts, device=device)
    assert chosen(logits) == route(logits.unsqueeze(0), COUNT)[0][0].tolist()


@needs_kernels
def test_of_equal_ones_the_first(device):
    logits = torch.zeros(40, device=device)
    logits[3], logits[17], logits[35], logits[36] = -1, 2, 2, -0.0
    assert chosen(logits) == [17, 35, 0, 1, 2, 4, 5, 6]


@needs_kernels
def test_whatever_stands_there_ids_are_those_of_experts(device):
    for value in (float("nan"), float("-inf"), -float("nan")):
        assert all(0 <= expert < 33 for expert in chosen(torch.full((33,), value, device=device)))
