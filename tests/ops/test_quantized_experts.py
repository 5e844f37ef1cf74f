"""quantized_experts: against a naive sum in fp64, and rows that do not see each other."""

import pytest
import torch
import torch.nn.functional as F

from engine.ops.quantize_rows import QuantizedRows, quantize_rows_reference
from engine.ops.quantized_experts import QuantizedExperts, quantized_experts_reference, quantized_experts_triton
from engine.ops.quantized_weight import dequantize_weight, quantize_weight
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both

IMPLEMENTATIONS = both(quantized_experts_reference, quantized_experts_triton)
HIDDEN, WIDTH, EXPERTS, CHOSEN = 64, 64, 5, 2


def matrix(bits, *shape, device):
    return quantize_weight(torch.randn(*shape, device=device) * shape[-1] ** -0.5, bits)[0]


def experts_of(bits, shared_bits, device, width=WIDTH):
    return QuantizedExperts(
        gate_up=matrix(bits, EXPERTS, 2 * width, HIDDEN, device=device),
        down=matrix(bits, EXPERTS, HIDDEN, width, device=device),
        shared_gate_up=matrix(shared_bits, 2 * width, HIDDEN, device=device),
        shared_down=matrix(shared_bits, HIDDEN, width, device=device),
    )


def routed(rows, device):
    chosen = torch.stack([torch.randperm(EXPERTS, device=device)[:CHOSEN] for _ in range(rows)])
    return chosen, torch.rand(rows, CHOSEN + 1, device=device)


def numbers(rows):
    return (rows.values.double().unflatten(-1, (-1, 64)) * rows.scales.double().unsqueeze(-1)).flatten(-2)


def naive(x, chosen, weights, experts):
    """Expert by expert; what stands between the products is rounded to 8 bits as the operation says."""
    y = torch.zeros(len(chosen), HIDDEN, dtype=torch.float64, device=chosen.device)
    for r in range(len(chosen)):
        pairs = [(experts.gate_up[e], experts.down[e]) for e in chosen[r].tolist()]
        pairs.append((experts.shared_gate_up, experts.shared_down))
        for (gate_up, down), weight in zip(pairs, weights[r], strict=True):
            gate, up = (dequantize_weight(gate_up).double() @ numbers(x)[r]).chunk(2)
            inner = numbers(quantize_rows_reference((F.silu(gate) * up).unsqueeze(0)))[0]
            y[r] += weight * (dequantize_weight(down).double() @ inner)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits, shared_bits", [(4, 8), (8, 4)])
def test_matches_naive_sum(implementation, bits, shared_bits, device):
    experts = experts_of(bits, shared_bits, device)
    x = quantize_rows_reference(torch.randn(2, HIDDEN, device=device))
    chosen, weights = routed(2, device)
    residual = torch.randn(2, HIDDEN, dtype=torch.bfloat16, device=device)
    exact = naive(x, chosen, weights, experts) + residual.double()
    assert_matches(implementation(x, chosen, weights, experts, torch.float32, residual), exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_do_not_depend_on_other_rows(implementation, device):
    experts = experts_of(4, 8, device)
    x = quantize_rows_reference(torch.randn(2, HIDDEN, device=device))
    chosen, weights = routed(2, device)
    # the two share an expert
    chosen[:] = torch.tensor([[0, 3], [3, 1]])
    whole = implementation(x, chosen, weights, experts, torch.float32)
    row = QuantizedRows(x.values[1:], x.scales[1:], x.sums[1:])
    assert torch.equal(implementation(row, chosen[1:], weights[1:], experts, torch.float32), whole[1:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_zero_leave_the_shared_expert(implementation, device):
    experts = experts_of(4, 8, device)
    x = quantize_rows_reference(torch.randn(1, HIDDEN, device=device))
    chosen, weights = routed(1, device)
    weights[:, :-1], weights[:, -1] = 0, 1
    gate, up = (numbers(x) @ dequantize_weight(experts.shared_gate_up).double().T).chunk(2, dim=-1)
    inner = numbers(quantize_rows_reference(F.silu(gate) * up))
    exact = inner @ dequantize_weight(experts.shared_down).double().T
    assert_matches(implementation(x, chosen, weights, experts, torch.float32), exact)


def test_many_rows_of_the_reference(device):
    experts = experts_of(8, 8, "cpu", width=128)
    x = quantize_rows_reference(torch.randn(40, HIDDEN))
    chosen, weights = routed(40, "cpu")
    exact = naive(x, chosen, weights, experts)
    assert_matches(quantized_experts_reference(x, chosen, weights, experts, torch.float32), exact)
