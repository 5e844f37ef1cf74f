"""quantized_experts: against a naive sum in fp64, and rows that do not see each other."""

import pytest
import torch
import torch.nn.functional as F

from engine.ops.quantize_rows import QuantizedRows, quantize_rows_reference
from engine.ops.quantized_experts import QuantizedExperts, quantized_experts_reference, quantized_experts_triton
from engine.ops.quantized_weight import dequantize_weight, quantize_weight
from tests.ops.conftest import assert_matches
from tests.ops.kernels import both, needs_kernels

IMPLEMENTATIONS = both(quantized_experts_reference, quantized_experts_triton)
HIDDEN, WIDTH, EXPERTS, CHOSEN = 64, 64, 5, 2


def example(rows, device):
    x = quantize_rows_reference(torch.randn(rows, HIDDEN, device=device))
    return x, torch.randn(rows, EXPERTS + 1, device=device)


def matrix(bits, *shape, device):
    return quantize_weight(torch.randn(*shape, device=device) * shape[-1] ** -0.5, bits)[0]


def experts_of(bits, shared_bits, device, width=WIDTH):
    return QuantizedExperts(
        gate_up=matrix(bits, EXPERTS, 2 * width, HIDDEN, device=device),
        down=matrix(bits, EXPERTS, HIDDEN, width, device=device),
        shared_gate_up=matrix(shared_bits, 2 * width, HIDDEN, device=device),
        shared_down=matrix(shared_bits, HIDDEN, width, device=device),
    )


def numbers(rows):
    return (rows.values.double().unflatten(-1, (-1, 64)) * rows.scales.double().unsqueeze(-1)).flatten(-2)


def naive(x, logits, experts, num_chosen=CHOSEN):
    """Expert by expert; what stands between the products is rounded to 8 bits as the operation says."""
    y = torch.zeros(len(logits), HIDDEN, dtype=torch.float64, device=logits.device)
    for r in range(len(logits)):
        best, chosen = logits[r, :-1].double().sort(descending=True, stable=True)
        weights = torch.cat([torch.softmax(best[:num_chosen], 0), torch.sigmoid(logits[r, -1:].double())])
        pairs = [(experts.gate_up[e], experts.down[e]) for e in chosen[:num_chosen].tolist()]
        pairs.append((experts.shared_gate_up, experts.shared_down))
        for (gate_up, down), weight in zip(pairs, weights, strict=True):
            gate, up = (dequantize_weight(gate_up).double() @ numbers(x)[r]).chunk(2)
            inner = numbers(quantize_rows_reference((F.silu(gate) * up).unsqueeze(0)))[0]
            y[r] += weight * (dequantize_weight(down).double() @ inner)
    return y


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits, shared_bits", [(4, 8), (8, 4)])
def test_matches_naive_sum(implementation, bits, shared_bits, device):
    experts = experts_of(bits, shared_bits, device)
    x, logits = example(2, device)
    residual = torch.randn(2, HIDDEN, dtype=torch.bfloat16, device=device)
    exact = naive(x, logits, experts) + residual.double()
    assert_matches(implementation(x, logits, experts, CHOSEN, torch.float32, residual), exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_experts_and_wider_ones(implementation, device):
    experts = experts_of(4, 4, device, width=128)
    x, logits = example(1, device)
    exact = naive(x, logits, experts, EXPERTS)
    assert_matches(implementation(x, logits, experts, EXPERTS, torch.float32), exact)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_of_any_sign_and_size(implementation, device):
    experts = experts_of(4, 8, device)
    x, _ = example(3, device)
    logits = torch.tensor([[-3.0, -1.0, -2.0, -9.0, -1.5], [0.0, -0.5, 1e-30, 80.0, -1e30], [-60.0, 5, 6, 6.5, 7]])
    logits = torch.cat([logits, torch.tensor([[-80.0], [0.0], [80.0]])], dim=1).to(device)
    assert_matches(implementation(x, logits, experts, CHOSEN, torch.float32), naive(x, logits, experts))


@needs_kernels
def test_of_equal_logits_the_first_are_chosen(device):
    experts = experts_of(4, 8, device)
    x, _ = example(2, device)
    logits = torch.zeros(2, EXPERTS + 1, device=device)
    logits[1] = torch.tensor([1.0, 2.0, 2.0, 2.0, 1.0, 0.0])
    assert_matches(quantized_experts_triton(x, logits, experts, CHOSEN, torch.float32), naive(x, logits, experts))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_do_not_depend_on_other_rows(implementation, device):
    experts = experts_of(4, 8, device)
    x, logits = example(2, device)
    # the two share an expert
    logits[:, 3] = 9
    whole = implementation(x, logits, experts, CHOSEN, torch.float32)
    row = QuantizedRows(x.values[1:], x.scales[1:], x.sums[1:])
    assert torch.equal(implementation(row, logits[1:], experts, CHOSEN, torch.float32), whole[1:])


def test_many_rows_of_the_reference(device):
    experts = experts_of(8, 8, "cpu", width=128)
    x, logits = example(40, "cpu")
    exact = naive(x, logits, experts)
    assert_matches(quantized_experts_reference(x, logits, experts, CHOSEN, torch.float32), exact)


@needs_kernels
def test_garbage_reads_nothing_out_of_bounds(device):
    """A row of padding may hold anything; its experts are those of the matrix all the same."""
    experts = experts_of(4, 8, device)
    x, logits = example(2, device)
    exact = naive(x, logits, experts)
    logits[0, :-1] = -1e30
    x.values[0] = -128
    actual = quantized_experts_triton(x, logits, experts, CHOSEN, torch.float32)
    assert_matches(actual[1:], exact[1:])
