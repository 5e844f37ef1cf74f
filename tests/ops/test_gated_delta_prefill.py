"""A prompt's rows through Gated DeltaNet: convolution with the lengths of heads, then the delta rule in chunks."""

import dataclasses
from functools import partial

import pytest
import torch

from engine.ops.causal_conv_heads import causal_conv_heads, causal_conv_heads_reference, causal_conv_heads_triton
from engine.ops.delta_state import Keep
from engine.ops.gated_delta_prefill import gated_delta_prefill_reference, gated_delta_prefill_triton
from tests.ops.conftest import assert_matches, starts_of
from tests.ops.delta_examples import DIM, copied, delta_memory, delta_rows, delta_weights, doubled
from tests.ops.kernels import both

CONV = both(causal_conv_heads_reference, causal_conv_heads_triton)
PREFILL = both(gated_delta_prefill_reference, gated_delta_prefill_triton)
# relative L2 error of outputs and of the final state: products of bf16 in two parts, sums in fp32
PRODUCTS = 5e-5


def convolve(implementation, x, weights, memory, slots, num_rows):
    mixed = weights.split(x)[0]
    slots, starts = torch.tensor(slots, device=x.device), starts_of(num_rows, x.device)
    return implementation(mixed, weights.conv, memory.inputs, slots, starts, num_rows, 2 * weights.key_heads, DIM)


def attend(implementation, x, convolved, norms, weights, state, slots, num_rows):
    a, b = weights.split(x)[2:]
    slots, starts = torch.tensor(slots, device=x.device), starts_of(num_rows, x.device)
    return implementation(convolved, norms, a, b, weights, state, slots, starts, num_rows)


def relative(actual, oracle):
    return ((actual.double() - oracle).norm() / oracle.norm()).item()


def example(num_rows, key_heads, group, device):
    weights = delta_weights(key_heads, group, device)
    return weights, delta_memory(4, weights, device), delta_rows(sum(num_rows), weights, device)


@pytest.mark.parametrize("implementation", CONV)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [[1], [2, 70, 3]])
def test_convolution_matches_its_oracle(implementation, dtype, num_rows, device):
    weights, memory, _ = example(num_rows, 1, 1, device)
    x = delta_rows(sum(num_rows), weights, device, dtype)
    slots, oracle = [3, 0, 2][: len(num_rows)], copied(memory, torch.float64)
    expected, _ = convolve(causal_conv_heads_reference, x.double(), doubled(weights), oracle, slots, num_rows)
    convolved, norms = convolve(implementation, x, weights, memory, slots, num_rows)
    assert convolved.dtype == dtype
    # the interpreter cuts numbers of 8 bits off: no more than the last of them
    last = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    assert ((convolved.double() - expected).abs() <= last * expected.abs() + 1e-6).all()
    heads = convolved[:, : 2 * DIM].double().unflatten(-1, (2, DIM))
    assert_matches(norms, torch.rsqrt(heads.square().sum(-1) + 1e-6))
    assert torch.equal(memory.inputs[:, :3].double(), oracle.inputs[:, :3])
    assert memory.inputs[:, 3:].isnan().all()


@pytest.mark.parametrize("implementation", CONV)
def test_convolution_by_hand(implementation, device):
    weights, memory, _ = example([1], 1, 1, device)
    weights.conv.copy_(torch.tensor([1.0, 10.0, 100.0, 1000.0], device=device))
    memory.inputs[1, :3] = torch.tensor([1.0, 2.0, 3.0], device=device)[:, None]
    x = torch.zeros(2, 4 * DIM + 2, device=device)
    x[:, : 3 * DIM] = torch.tensor([[4.0], [5.0]], device=device)
    convolved, norms = convolve(implementation, x, weights, memory, [1], [2])
    expected = torch.tensor([[4321.0], [5432.0]], dtype=torch.float64, device=device)
    assert_matches(convolved, expected.expand(2, 3 * DIM))
    assert_matches(norms, (1 / (expected * DIM**0.5)).expand(2, 2))
    assert memory.inputs[1, :3, 0].tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("implementation", PREFILL)
@pytest.mark.parametrize("key_heads, group, num_rows", [(1, 2, [1]), (1, 1, [65]), (2, 1, [5, 70, 64])])
def test_delta_rule_matches_its_oracle(implementation, key_heads, group, num_rows, device):
    weights, memory, x = example(num_rows, key_heads, group, device)
    slots, before = [3, 0, 2][: len(num_rows)], memory.state.clone()
    convolved, norms = convolve(causal_conv_heads_reference, x, weights, memory, slots, num_rows)
    oracle = before.double()
    parts = (x.double(), convolved.double(), norms.double(), doubled(weights))
    expected = attend(gated_delta_prefill_reference, *parts, oracle, slots, num_rows)
    actual = attend(implementation, x, convolved, norms, weights, memory.state, slots, num_rows)
    assert actual.dtype == torch.float32
    assert relative(actual, expected) < PRODUCTS
    assert relative(memory.state, oracle) < PRODUCTS
    assert torch.equal(memory.state[1], before[1])


@pytest.mark.parametrize("implementation", PREFILL)
@pytest.mark.parametrize("decay", [-1e-6, -30.0])
def test_rows_that_are_alike(implementation, decay, device):
    """Sixty-four times the same key written at full strength, forgotten at once or not at all."""
    weights, memory, x = example([128], 1, 1, device)
    weights = dataclasses.replace(weights, decay=torch.full_like(weights.decay, decay))
    x[1:] = x[:1]
    x[:, -1] = 20.0
    convolved, norms = convolve(causal_conv_heads_reference, x, weights, memory, [1], [128])
    oracle = memory.state.double()
    parts = (x.double(), convolved.double(), norms.double(), doubled(weights))
    expected = attend(gated_delta_prefill_reference, *parts, oracle, [1], [128])
    actual = attend(implementation, x, convolved, norms, weights, memory.state, [1], [128])
    assert relative(actual, expected) < PRODUCTS
    assert relative(memory.state, oracle) < PRODUCTS


@pytest.mark.kernels
def test_bits_do_not_depend_on_where_a_prompt_is_cut(device):
    cut = 64
    weights, memory, x = example([150], 1, 1, device)
    convolved, norms = convolve(causal_conv_heads_triton, x, weights, copied(memory), [1], [150])
    whole, state = memory.state.clone(), memory.state
    expected = attend(gated_delta_prefill_triton, x, convolved, norms, weights, whole, [1], [150])
    outputs = []
    for part, rows, factors in zip(x.split(cut), convolved.split(cut), norms.split(cut), strict=True):
        again = convolve(causal_conv_heads_triton, part, weights, memory, [1], [len(part)])
        assert torch.equal(again[0], rows) and torch.equal(again[1], factors)
        outputs.append(attend(gated_delta_prefill_triton, part, *again, weights, state, [1], [len(part)]))
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(state, whole)


def keep(num_rows, *indices, device):
    return Keep(num_rows, indices, torch.tensor(indices, device=device))


SHORT = partial(gated_delta_prefill_triton, segment=128)


@pytest.mark.parametrize("implementation", [*PREFILL, pytest.param(SHORT, marks=pytest.mark.kernels)])
def test_states_are_kept_on_the_way(implementation, device):
    """What a pass leaves that ends there, of whoever asks for it, on the edge of a segment and behind it too; nothing
    else changes."""
    num_rows, slots = [200, 70, 64], torch.tensor([3, 0, 2], device=device)
    weights, memory, x = example(num_rows, 1, 1, device)
    convolved, norms = convolve(causal_conv_heads_reference, x, weights, copied(memory), slots.tolist(), num_rows)
    a, b = weights.split(x)[2:]

    def run(count, *keeps):
        """Of the first rows of each request."""
        parts = [torch.cat([rows[:count] for rows in of.split(num_rows)]) for of in (convolved, norms, a, b)]
        rows = [min(each, count) for each in num_rows]
        state, kept = memory.state.clone(), torch.full((6, *memory.state.shape[1:]), -1.0, device=device)
        where = weights, state, slots, starts_of(rows, device), rows
        return implementation(*parts, *where, keeps, kept), state, kept

    asked = (128, 0, -1, -1), (64, 5, 1, -1), (192, 4, -1, -1)
    output, state, kept = run(200, *(keep(*each, device=device) for each in asked))
    plain, plain_state, _ = run(200)
    bound = 1e-6 if implementation is gated_delta_prefill_reference else 0.0
    assert relative(output, plain.double()) <= bound
    assert relative(state, plain_state.double()) <= bound
    for count, slot, index in ((128, 3, 0), (64, 3, 5), (64, 0, 1), (192, 3, 4)):
        assert relative(kept[index], run(count)[1][slot].double()) <= bound
    assert (kept[2:4] == -1).all()


def test_inputs_of_the_convolution_are_kept_on_the_way(device):
    num_rows = [130, 64]
    weights, memory, x = example(num_rows, 1, 1, device)
    mixed, taps = weights.split(x)[0], torch.full((3, 3, len(weights.conv)), -1.0, device=device)
    where = torch.tensor([2, 0], device=device), starts_of(num_rows, device), num_rows
    keeps = keep(128, 1, -1, device=device), keep(64, 2, -1, device=device)
    causal_conv_heads(mixed, weights.conv, memory.inputs, *where, 2, DIM, keeps, taps)
    assert torch.equal(taps[[1, 2]], torch.stack([mixed[125:128], mixed[61:64]]).float())
    assert (taps[0] == -1).all()


@pytest.mark.kernels
def test_bits_do_not_depend_on_how_long_a_segment_is(device):
    num_rows = [5, 70, 64]
    weights, memory, x = example(num_rows, 1, 1, device)
    convolved, norms = convolve(causal_conv_heads_triton, x, weights, copied(memory), [3, 0, 2], num_rows)

    def run(segment):
        a, b = weights.split(x)[2:]
        state, slots = memory.state.clone(), torch.tensor([3, 0, 2], device=device)
        starts = starts_of(num_rows, device)
        output = gated_delta_prefill_triton(
            convolved, norms, a, b, weights, state, slots, starts, num_rows, segment=segment
        )
        return output, state

    for whole, part in zip(run(1024), run(64), strict=True):
        assert torch.equal(whole, part)


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.parametrize("speed", [1e-3, 1.0, 30.0])
def test_long_prompts_match_their_oracle(speed, device):
    """Forgetting from almost never to almost at once, over several segments."""
    num_rows = [100, 64, 8192]
    weights, memory, x = example(num_rows, 2, 2, device)
    weights = dataclasses.replace(weights, decay=weights.decay * speed)
    convolved, norms = convolve(causal_conv_heads_triton, x, weights, memory, [3, 0, 2], num_rows)
    oracle = memory.state.double()
    parts = (x.double(), convolved.double(), norms.double(), doubled(weights))
    expected = attend(gated_delta_prefill_reference, *parts, oracle, [3, 0, 2], num_rows)
    actual = attend(gated_delta_prefill_triton, x, convolved, norms, weights, memory.state, [3, 0, 2], num_rows)
    assert relative(actual, expected) < PRODUCTS
    assert relative(memory.state, oracle) < PRODUCTS
