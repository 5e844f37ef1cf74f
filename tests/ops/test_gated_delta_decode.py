"""From the projection of Gated DeltaNet to the rows of its output matrix."""

import dataclasses

import pytest
import torch

from engine.ops.gated_delta_decode import (
    gated_delta_decode_reference,
    gated_delta_decode_rounded_reference,
    gated_delta_decode_rounded_triton,
    gated_delta_decode_triton,
)
from engine.ops.quantize_rows import quantize_rows_reference
from tests.ops.conftest import assert_matches, starts_of
from tests.ops.delta_examples import DIM, copied, delta_memory, delta_rows, delta_weights, doubled
from tests.ops.kernels import both

# relative L2 error after hundreds of passes in fp32
DRIFT = 1e-4
DECODE = both(gated_delta_decode_reference, gated_delta_decode_triton)


def integers(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def run(implementation, x, weights, memory, slots, accepted, num_rows):
    device = x.device
    return implementation(
        x, weights, memory, torch.tensor(slots, device=device), starts_of(num_rows, device),
        integers(accepted, device), num_rows,
    )  # fmt: skip


def assert_memory_matches(memory, oracle):
    """Everything finite matches, and what was never written still is not."""
    for actual, expected in zip(memory.tensors(), oracle.tensors(), strict=True):
        written = expected.isfinite()
        assert torch.equal(actual.isfinite(), written)
        assert_matches(actual[written], expected[written])


@pytest.mark.parametrize("implementation", DECODE)
@pytest.mark.parametrize("key_heads, group, num_rows", [(1, 2, [1]), (2, 1, [3, 1]), (1, 3, [2, 8])])
def test_passes_match_the_oracle(implementation, key_heads, group, num_rows, device):
    """Two passes: what the first leaves pending, the second folds in part."""
    weights = delta_weights(key_heads, group, device)
    memory, slots = delta_memory(4, weights, device), [2, 0][: len(num_rows)]
    oracle = copied(memory, torch.float64)
    for accepted in ([0] * len(num_rows), [num_rows[0], 1][: len(num_rows)]):
        x = delta_rows(sum(num_rows), weights, device, torch.float32)
        actual = run(implementation, x, weights, memory, slots, accepted, num_rows)
        expected = run(gated_delta_decode_reference, x.double(), doubled(weights), oracle, slots, accepted, num_rows)
        assert_matches(actual, expected)
        assert_memory_matches(memory, oracle)


@pytest.mark.parametrize("implementation", DECODE)
def test_bf16_rows(implementation, device):
    weights = delta_weights(1, 2, device)
    memory = delta_memory(2, weights, device)
    x = delta_rows(2, weights, device)
    expected = run(
        gated_delta_decode_reference, x.double(), doubled(weights), copied(memory, torch.float64), [1], [0], [2]
    )
    actual = run(implementation, x, weights, memory, [1], [0], [2])
    assert actual.dtype == torch.bfloat16
    # the convolution's output is rounded before it is normalised, and so is the result
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 2 * 4e-3


@pytest.mark.parametrize("rounded, plain", [
    (gated_delta_decode_rounded_reference, gated_delta_decode_reference),
    pytest.param(gated_delta_decode_rounded_triton, gated_delta_decode_triton, marks=pytest.mark.kernels),
])  # fmt: skip
def test_rounded_is_the_plain_one_rounded(rounded, plain, device):
    weights = delta_weights(1, 2, device)
    memory, x = delta_memory(1, weights, device), delta_rows(2, weights, device)
    expected = quantize_rows_reference(run(plain, x, weights, copied(memory), [0], [0], [2]))
    actual = run(rounded, x, weights, memory, [0], [0], [2])
    # on a GPU torch divides by a constant through its reciprocal
    assert_matches(actual.scales, expected.scales.double())
    assert torch.equal(actual.values, expected.values) and torch.equal(actual.sums, expected.sums)


@pytest.mark.parametrize("implementation", DECODE)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(implementation, device):
    weights = delta_weights(1, 2, device)
    memory, x = delta_memory(3, weights, device), delta_rows(5, weights, device)
    alone = copied(memory)
    together = run(implementation, x, weights, memory, [2, 0], [0, 0], [3, 2])
    first = run(implementation, x[:1], weights, copied(alone), [2], [0], [1])
    second = run(implementation, x[3:], weights, alone, [0], [0], [2])
    if implementation is gated_delta_decode_triton:
        assert torch.equal(first, together[:1]) and torch.equal(second, together[3:])
    assert_matches(first, together[:1].double())


@pytest.mark.kernels
@pytest.mark.parametrize("pass_rows, accepted", [(3, 3), (4, 2)])
def test_drafts_change_no_bits(pass_rows, accepted, device):
    """Rows accepted out of passes of several are bit for bit those of one row per pass; rejected ones leave nothing."""
    weights = delta_weights(1, 2, device)
    memory, x = delta_memory(1, weights, device), delta_rows(6, weights, device)
    single = copied(memory)
    stands = alone = 0
    for start in range(0, len(x) - pass_rows + 1, accepted):
        outputs = run(
            gated_delta_decode_triton, x[start : start + pass_rows], weights, memory, [0], [stands], [pass_rows]
        )
        stands = accepted
        for t in range(accepted):
            output = run(gated_delta_decode_triton, x[start + t : start + t + 1], weights, single, [0], [alone], [1])
            assert torch.equal(output, outputs[t : t + 1])
            alone = 1


@pytest.mark.kernels
def test_rows_that_are_no_numbers_stay_where_they_are(device):
    weights = delta_weights(1, 2, device)
    memory, x = delta_memory(3, weights, device), delta_rows(2, weights, device)
    before = copied(memory)
    x[0] = float("nan")
    # a count that means nothing is held to what there is room for
    outputs = run(gated_delta_decode_triton, x, weights, memory, [0, 2], [99, 0], [1, 1])
    clean = run(gated_delta_decode_triton, x[1:], weights, copied(before), [2], [0], [1])
    assert torch.equal(outputs[1:], clean)
    assert torch.equal(memory.state[1:], before.state[1:])


@pytest.mark.parametrize("implementation", DECODE)
def test_by_hand(implementation, device):
    """Convolution picks the row itself, k = q = e0: as in the recurrence by hand, then normalised and gated."""
    weights = delta_weights(1, 1, device)
    weights.conv.zero_()
    weights.conv[:, 3] = 1.0
    weights = dataclasses.replace(weights, eps=1e-12)
    weights.norm.fill_(1.0)
    weights.decay.fill_(-1.0)
    weights.dt_bias.zero_()
    memory = delta_memory(1, weights, device)
    memory.state.zero_()
    memory.state[0, 0, 1, 0] = 4.0
    x = torch.zeros(1, 4 * DIM + 2, device=device)
    x[0, 0] = x[0, DIM] = 50.0
    x[0, 2 * DIM + 1] = 8.0
    x[0, 3 * DIM : 4 * DIM] = 1.0
    y = run(implementation, x, weights, memory, [0], [0], [1])
    # softplus(0) = ln 2: alpha = 1/2; beta = 1/2; silu(8) is what is written
    written = 8 / (1 + torch.tensor(-8.0, device=device).double().exp())
    u = 0.5 * (written - 2)
    assert_matches(memory.pending_u[0, 0, :1, 1].float(), u.view(1))
    # one of 128 values: its rms is its size over sqrt(128)
    silu = 1 / (1 + torch.tensor(-1.0, device=device).double().exp())
    expected = torch.zeros(1, DIM, dtype=torch.float64, device=device)
    expected[0, 1] = DIM**0.5 * silu
    assert_matches(y, expected)


@pytest.mark.kernels
@pytest.mark.gpu
def test_no_drift_over_512_passes(device):
    """Passes of four rows of which one to four stand: the oracle runs in fp64, with the same choices."""
    weights = delta_weights(1, 2, device)
    memory, accepted = delta_memory(1, weights, device), 0
    oracle = copied(memory, torch.float64)
    for step in range(512):
        x = delta_rows(4, weights, device, torch.float32)
        actual = run(gated_delta_decode_triton, x, weights, memory, [0], [accepted], [4])
        expected = run(gated_delta_decode_reference, x.double(), doubled(weights), oracle, [0], [accepted], [4])
        accepted = 1 + step % 4
    for result, exact in ((actual, expected), (memory.state, oracle.state)):
        assert (result.double() - exact).norm() < DRIFT * exact.norm()
