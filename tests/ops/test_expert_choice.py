"""expert_choice: which experts, with what weights, whatever the type of the logits."""

import pytest
import torch

from engine.ops.expert_choice import expert_choice_kernel, expert_choice_reference, expert_choice_triton
from tests.ops.conftest import assert_matches
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.targets import SHARED_MEMORY, compiled

IMPLEMENTATIONS = both(expert_choice_reference, expert_choice_triton)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, experts, count", [(1, 8, 8), (5, 40, 3), (3, 256, 8)])
def test_matches_oracle(implementation, dtype, rows, experts, count, device):
    # distinct in bf16 too
    order = torch.stack([torch.randperm(experts + 1, device=device) for _ in range(rows)])
    logits = ((order - experts // 2) / 64).to(dtype)
    chosen, weights = implementation(logits, count)
    oracle_chosen, oracle_weights = expert_choice_reference(logits.double(), count)
    assert torch.equal(chosen, oracle_chosen)
    assert weights.dtype == torch.float32
    assert_matches(weights, oracle_weights)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_by_hand(implementation, device):
    """e**0 and e**ln 3 of the chosen: a quarter and three quarters; sigmoid(0) of the shared one"""
    logits = torch.tensor([[0.0, -5.0, 1.0986123, -7.0, 0.0]], device=device)
    chosen, weights = implementation(logits, 2)
    assert chosen.tolist() == [[2, 0]]
    assert_matches(weights, torch.tensor([[0.75, 0.25, 0.5]], dtype=torch.float64, device=device))


@needs_kernels
def test_large_logits_stay_finite_and_of_equal_ones_the_first_is_taken(device):
    logits = torch.full((2, 41), 1e4, device=device)
    logits[1, :40] = -1e4
    chosen, weights = expert_choice_triton(logits, 4)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(weights, torch.tensor([[0.25] * 4 + [1.0]] * 2, device=device))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles(capability):
    types = {"logits_ptr": "*bf16", "chosen_ptr": "*i32", "weights_ptr": "*fp32", "experts": "i32"}
    compiled(expert_choice_kernel, capability, types, {"COUNT": 8, "BLOCK": 256}, num_warps=1)
