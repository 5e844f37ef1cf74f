"""The gated delta rule in its three parts: chunked, recurrent with pending rows, fold."""

import pytest
import torch

from engine.ops.delta_state import DeltaState
from engine.ops.gated_delta_chunked import gated_delta_chunked_reference
from engine.ops.gated_delta_copy import gated_delta_copy_reference, gated_delta_copy_triton
from engine.ops.gated_delta_fold import gated_delta_fold, gated_delta_fold_reference, gated_delta_fold_triton
from engine.ops.gated_delta_recurrent import gated_delta_recurrent_reference
from engine.ops.l2_norm import l2_norm
from tests.ops.conftest import assert_matches
from tests.ops.kernels import needs_kernels

DIM = 128
KEY_HEADS = 2
PENDING = 8


def inputs(rows, group, device, dtype=torch.float32):
    """query, key, value, log_alpha, beta of `rows` rows."""
    query, key = (l2_norm(torch.randn(rows, KEY_HEADS, DIM, device=device)) for _ in range(2))
    value = torch.randn(rows, KEY_HEADS * group, DIM, device=device)
    log_alpha = -torch.rand(rows, KEY_HEADS * group, device=device) * 2
    beta = torch.rand(rows, KEY_HEADS * group, device=device)
    return tuple(x.to(dtype) for x in (query, key, value, log_alpha, beta))


def memory(slots, group, device, dtype=torch.float32):
    heads = KEY_HEADS * group
    return DeltaState(
        state=torch.randn(slots, heads, DIM, DIM, device=device, dtype=dtype) / 8,
        inputs=torch.randn(slots, 3 + PENDING, 16, device=device, dtype=dtype),
        pending_key=torch.full((slots, PENDING, KEY_HEADS, DIM), float("nan"), device=device, dtype=dtype),
        pending_u=torch.full((slots, PENDING, heads, DIM), float("nan"), device=device, dtype=dtype),
        pending_alpha=torch.full((slots, PENDING, heads), float("nan"), device=device, dtype=dtype),
    )


def copied(memory, dtype=None):
    return DeltaState(*(tensor.to(dtype or tensor.dtype, copy=True) for tensor in memory.tensors()))


def naive(query, key, value, log_alpha, beta, state):
    """The recurrence as it is written down, head by head in fp64; returns outputs and the final state."""
    state = state.double().clone()
    group = value.shape[1] // key.shape[1]
    outputs = torch.zeros_like(value, dtype=torch.float64)
    for t in range(len(value)):
        for head in range(value.shape[1]):
            k, q = (x[t, head // group].double() for x in (key, query))
            s = state[head] * log_alpha[t, head].double().exp()
            u = beta[t, head].double() * (value[t, head].double() - s @ k)
            state[head] = s + torch.outer(u, k)
            outputs[t, head] = state[head] @ q / DIM**0.5
    return outputs, state


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("num_rows", [[1], [63], [64], [65], [1, 70, 2]])
def test_chunked_matches_the_recurrence(group, num_rows, device):
    rows = inputs(sum(num_rows), group, device)
    states = memory(4, group, device)
    before, slots = states.state.clone(), torch.tensor([3, 0, 1], device=device)[: len(num_rows)]
    actual = gated_delta_chunked_reference(*rows, states.state, slots, num_rows)
    parts = zip(*(x.split(num_rows) for x in rows), strict=True)
    expected = [naive(*part, before[slot]) for part, slot in zip(parts, slots.tolist(), strict=True)]
    assert_matches(actual, torch.cat([output for output, _ in expected]))
    assert_matches(states.state[slots], torch.stack([state for _, state in expected]))
    assert torch.equal(states.state[2], before[2])


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("num_rows", [[1], [8], [1, 1, 1], [3, 3], [1, 8, 4]])
def test_recurrent_matches_the_recurrence(group, num_rows, device):
    rows = inputs(sum(num_rows), group, device)
    states = memory(4, group, device)
    before, slots = copied(states), torch.tensor([3, 0, 1], device=device)[: len(num_rows)]
    actual = gated_delta_recurrent_reference(*rows, states, slots, num_rows)
    parts = zip(*(x.split(num_rows) for x in rows), strict=True)
    expected = [naive(*part, before.state[slot])[0] for part, slot in zip(parts, slots.tolist(), strict=True)]
    assert_matches(actual, torch.cat(expected))
    assert torch.equal(states.state, before.state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_forms_match_their_fp64_selves(dtype, device):
    rows, states = inputs(8, 2, device, dtype), memory(1, 2, device)
    wide, num_rows, slots = [x.double() for x in rows], [8], torch.tensor([0], device=device)
    rows = [x.float() for x in rows]
    oracle = gated_delta_recurrent_reference(*wide, copied(states, torch.float64), slots, num_rows)
    assert_matches(gated_delta_recurrent_reference(*rows, copied(states), slots, num_rows), oracle)
    oracle = gated_delta_chunked_reference(*wide, states.state.double(), slots, num_rows)
    assert_matches(gated_delta_chunked_reference(*rows, states.state, slots, num_rows), oracle)


def test_by_hand(device):
    """k = q = e0, v = 8 e1, alpha = beta = 1/2, S e0 = 4 e1: u = (8 - 2) / 2 = 3, the new S e0 = 5 e1."""
    unit = torch.zeros(1, KEY_HEADS, DIM, device=device)
    unit[..., 0] = 1.0
    value = torch.zeros(1, KEY_HEADS, DIM, device=device)
    value[..., 1] = 8.0
    half = torch.full((1, KEY_HEADS), 0.5, device=device)
    rows, states = (unit, unit, value, half.log(), half), memory(1, 1, device)
    states.state.zero_()
    states.state[..., 1, 0] = 4.0
    expected = torch.zeros(1, KEY_HEADS, DIM, dtype=torch.float64, device=device)
    expected[..., 1] = 5 / 128**0.5
    slots, num_rows = torch.tensor([0], device=device), [1]
    assert_matches(gated_delta_recurrent_reference(*rows, states, slots, num_rows), expected)
    assert states.pending_u[0, 0, :, 1].tolist() == [3.0, 3.0]
    assert_matches(gated_delta_chunked_reference(*rows, states.state, slots, num_rows), expected)
    assert states.state[0, :, 1, 0].tolist() == [5.0, 5.0]


def test_zero_rows_change_nothing_but_the_decay(device):
    rows, states = [torch.zeros_like(x) for x in inputs(5, 2, device)], memory(1, 2, device)
    before = states.state.clone()
    assert (gated_delta_chunked_reference(*rows, states.state, torch.tensor([0]), [5]) == 0).all()
    assert torch.equal(states.state, before)


@pytest.mark.parametrize("accepted", [[0, 0], [1, 0], [3, 5], [8, 2]])
def test_fold_commits_the_accepted_rows_and_no_others(accepted, device):
    num_rows = [8, 5]
    rows, states = inputs(13, 2, device), memory(4, 2, device)
    before, slots = copied(states), torch.tensor([2, 0], device=device)
    gated_delta_recurrent_reference(*rows, states, slots, num_rows)
    gated_delta_fold(states, slots, torch.tensor(accepted, device=device).int())
    for part, slot, count in zip(zip(*(x.split(num_rows) for x in rows), strict=True), [2, 0], accepted, strict=True):
        expected = naive(*(x[:count] for x in part), before.state[slot])[1]
        assert_matches(states.state[slot], expected)
        assert torch.equal(states.inputs[slot, :3], before.inputs[slot, count : count + 3])
    assert torch.equal(states.state[[1, 3]], before.state[[1, 3]])


@pytest.mark.parametrize(
    "copy, fold",
    [
        (gated_delta_copy_reference, gated_delta_fold_reference),
        pytest.param(gated_delta_copy_triton, gated_delta_fold_triton, marks=needs_kernels),
    ],
)
def test_a_copy_is_bit_for_bit_what_the_rows_commit_to(copy, fold, device):
    """Of every layer, while the rows themselves go on waiting; nothing of a request whose rows end elsewhere."""
    layers = [memory(4, 2, device) for _ in range(2)]
    slots = torch.tensor([2, 0, 1], device=device)
    for one in layers:
        gated_delta_recurrent_reference(*inputs(13, 2, device), one, slots[:2], [8, 5])
    whole = DeltaState(*map(torch.stack, zip(*(one.tensors() for one in layers), strict=True)))
    before = copied(whole)
    state, taps = (
        x.new_full((5, 2, *size), -1.0) for x, size in ((whole.state, (4, DIM, DIM)), (whole.inputs, (3, 16)))
    )
    counts, indices = torch.tensor([3, 5, -1], device=device).int(), torch.tensor([4, 0, 3], device=device)
    copy(whole, slots, counts, state, taps, indices)
    for number, one in enumerate(layers):
        fold(one, slots[:2], counts[:2])
        for slot, index in ((2, 4), (0, 0)):
            assert torch.equal(state[index, number], one.state[slot])
            assert torch.equal(taps[index, number], one.inputs[slot, :3])
    assert (state[[1, 2, 3]] == -1).all() and (taps[[1, 2, 3]] == -1).all()
    for mine, expected in zip(whole.tensors(), before.tensors(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pass_rows, accepted", [(1, 1), (4, 4), (4, 2), (8, 3)])
def test_passes_with_partial_acceptance_are_the_plain_recurrence(pass_rows, accepted, device):
    """Rejected rows are run again: outputs and state are bit for bit those of one row per pass."""
    rows, states = inputs(24, 2, device), memory(1, 2, device)
    single, slots = copied(states), torch.tensor([0], device=device)
    one, few = (torch.tensor([n], device=device).int() for n in (1, accepted))
    start = 0
    while start + pass_rows <= 24:
        part = [x[start : start + pass_rows] for x in rows]
        outputs = gated_delta_recurrent_reference(*part, states, slots, [pass_rows])
        gated_delta_fold(states, slots, few)
        for t in range(accepted):
            output = gated_delta_recurrent_reference(*(x[t : t + 1] for x in part), single, slots, [1])
            gated_delta_fold(single, slots, one)
            assert torch.equal(outputs[t : t + 1], output)
        assert torch.equal(states.state, single.state)
        start += accepted


def test_chunks_of_any_size_are_one_call(device):
    rows, states = inputs(300, 2, device), memory(1, 2, device)
    whole = states.state.clone()
    expected = gated_delta_chunked_reference(*rows, whole, torch.tensor([0]), [300])
    for size in (7, 64, 100):
        state = states.state.clone()
        parts = [
            gated_delta_chunked_reference(*part, state, torch.tensor([0]), [len(part[0])])
            for part in zip(*(x.split(size) for x in rows), strict=True)
        ]
        assert_matches(torch.cat(parts), expected.double())
        assert_matches(state, whole.double())


def test_no_drift_over_600_rows_of_bf16_inputs(device):
    """The state is fp32 whatever the inputs are: errors do not add up."""
    rows, states = inputs(600, 1, device, torch.bfloat16), memory(1, 1, device)
    rows = [x.float() for x in rows]
    expected, final = naive(*rows, states.state[0])
    actual = gated_delta_chunked_reference(*rows, states.state, torch.tensor([0]), [600])
    assert_matches(actual[-64:], expected[-64:])
    assert_matches(states.state[0], final)
