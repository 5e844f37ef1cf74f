"""route and moe."""

import pytest
import torch
import torch.nn.functional as F

from engine.ops.moe import moe
from engine.ops.route import route, route_reference
from tests.ops.conftest import assert_matches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_route_matches_oracle(dtype, device):
    logits = torch.randn(7, 16, dtype=dtype, device=device)
    experts, weights = route(logits, 4)
    oracle_experts, oracle_weights = route_reference(logits.double(), 4)
    assert torch.equal(experts, oracle_experts)
    assert_matches(weights, oracle_weights)


def test_route_by_hand(device):
    experts, weights = route(torch.tensor([[0.0, 3.0, 1.0, 2.0]], device=device).log1p(), 2)  # 1 : 4 : 2 : 3
    assert experts.tolist() == [[1, 3]]
    assert_matches(weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64, device=device))


def naive(x, experts, weights, gate_up, down):
    rows = []
    for r in range(len(x)):
        row = torch.zeros_like(x[0])
        for e, weight in zip(experts[r].tolist(), weights[r], strict=True):
            gate, up = (gate_up[e] @ x[r]).chunk(2)
            row += weight * (down[e] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_moe_matches_naive_sum(dtype, rows, device):
    x = torch.randn(rows, 24, dtype=dtype, device=device)
    gate_up = torch.randn(6, 2 * 20, 24, dtype=dtype, device=device) / 5
    down = torch.randn(6, 24, 20, dtype=dtype, device=device) / 5
    experts, weights = route(torch.randn(rows, 6, device=device), 3)
    oracle = naive(x.double(), experts, weights.double(), gate_up.double(), down.double())
    actual = moe(x, experts, weights, gate_up, down)
    assert actual.dtype == dtype
    assert_matches(actual, oracle)


def test_experts_that_nobody_chose_are_not_read(device):
    x = torch.randn(3, 8, device=device)
    gate_up = torch.full((4, 8, 8), float("nan"), device=device)
    down = torch.full((4, 8, 4), float("nan"), device=device)
    gate_up[2], down[2] = 1.0, 1.0
    experts = torch.full((3, 1), 2, device=device)
    assert torch.isfinite(moe(x, experts, torch.ones(3, 1, device=device), gate_up, down)).all()
