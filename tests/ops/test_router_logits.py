"""router_logits: the rows for the experts, and logits that do not see their rounding."""

import pytest
import torch

from engine.ops.quantize_rows import quantize_rms_norm_reference
from engine.ops.router_logits import router_logits_reference, router_logits_triton
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both, needs_kernels

IMPLEMENTATIONS = both(router_logits_reference, router_logits_triton)
EPS = 1e-6


def example(rows, hidden, outputs, device):
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
    router = (torch.randn(outputs, hidden, device=device) * hidden**-0.5).bfloat16()
    return x, torch.rand(hidden, device=device) + 0.5, router


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows, hidden, outputs", [(1, 64, 3), (3, 192, 9)])
def test_matches_oracle(implementation, rows, hidden, outputs, device):
    x, weight, router = example(rows, hidden, outputs, device)
    x[0] *= 1e-3
    rounded, logits = implementation(x, weight, EPS, router)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_matches(logits, normed @ router.double().T)
    expected = quantize_rms_norm_reference(x, weight, EPS)
    assert torch.equal(rounded.values, expected.values) and torch.equal(rounded.sums, expected.sums)
    assert_matches(rounded.scales, normed.unflatten(-1, (-1, 64)).abs().amax(-1) / 127)


@needs_kernels
def test_bits_do_not_depend_on_other_rows(device):
    x, weight, router = example(3, 128, 5, device)
    x[0] = 1e4
    (_, together), (_, alone) = (router_logits_triton(rows, weight, EPS, router) for rows in (x, x[2:]))
    assert torch.equal(together[2:], alone)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_by_hand(implementation, device):
    x = torch.full((1, 64), 3.0, device=device)
    x[0, ::2] = -3
    router = torch.zeros(2, 64, device=device)
    router[1, 4] = 5
    rounded, logits = implementation(x, torch.full((64,), 2.0, device=device), 0.0, router)
    # of length 1 in every column, times 2
    assert logits[0].tolist() == pytest.approx([0.0, -10.0])
    assert rounded.values[0, :2].tolist() == [-127, 127] and rounded.sums.tolist() == [[0]]
