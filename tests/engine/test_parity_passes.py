"""However a sequence is cut into passes, and whatever else is in them, its hidden states are the same."""

import pytest
import torch

from engine.models.weights import load_model
from tests.engine.checkpoints import PROFILES, Geometry, write_checkpoint
from tests.engine.passes import CPU, Runner, relative_error

# the same formulas in another order of summation
REORDERED = 1e-5
GEOMETRY = Geometry()
PROMPT, TOTAL = 70, 150


@pytest.fixture(scope="module", params=PROFILES)
def model(request, tmp_path_factory):
    directory = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param, GEOMETRY)
    return load_model(directory, CPU, torch.float32)


def sequence(seed):
    return torch.randint(0, GEOMETRY.vocab_size, (TOTAL,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_drafts, accepted", [(1, 1), (3, 0), (3, 2), (3, 3), (7, 5)])
def test_rejected_rows_leave_no_trace(model, num_drafts, accepted):
    """Each pass brings one certain token and drafts, of which only the first `accepted` are right."""
    token_ids, runner = sequence(1), Runner(model)
    expected = Runner(model).prefill(token_ids)
    hidden, stand = [runner.prefill(token_ids[:PROMPT])], 0
    position = PROMPT
    while position + accepted < TOTAL:
        right = token_ids[position : position + 1 + accepted]
        wrong = (token_ids[:num_drafts] + 17) % GEOMETRY.vocab_size
        rows = torch.cat([right, wrong])[: 1 + num_drafts]
        out = runner.forward({0: rows}, {0: position}, commits=False, accepted={0: stand})
        hidden.append(out[: len(right)])
        stand = len(right)
        position += stand
    assert relative_error(torch.cat(hidden), expected[:position]) < REORDERED


def test_pending_rows_are_folded_before_a_committing_pass(model):
    token_ids, runner = sequence(2), Runner(model)
    expected = Runner(model).prefill(token_ids)
    runner.prefill(token_ids[:PROMPT])
    rows = torch.cat([token_ids[PROMPT : PROMPT + 2], token_ids[:2]])
    runner.forward({0: rows}, {0: PROMPT}, commits=False)
    last = runner.forward({0: token_ids[PROMPT + 2 :]}, {0: PROMPT + 2}, commits=True, accepted={0: 2})
    assert relative_error(last, expected[PROMPT + 2 :]) < REORDERED


def test_requests_together_are_requests_alone(model):
    """Ragged prefill chunks and ragged drafts of three requests in the same passes."""
    prompts = {r: sequence(10 + r)[: [90, 5, 64][r]] for r in range(3)}
    tails = {r: sequence(20 + r)[: [4, 1, 2][r]] for r in range(3)}
    together, alone = Runner(model, 3), {}
    for r in range(3):
        single = Runner(model, 3)
        prompt = single.prefill(prompts[r], request=r)
        first = single.forward({r: tails[r]}, {r: len(prompts[r])}, commits=False)
        alone[r] = torch.cat([prompt, first])
    chunks = [{0: 40, 1: 3}, {0: 50, 2: 1}, {1: 2, 2: 63}]
    done, hidden = dict.fromkeys(prompts, 0), {r: [] for r in prompts}
    for chunk in chunks:
        rows = {r: prompts[r][done[r] : done[r] + count] for r, count in chunk.items()}
        out = together.forward(rows, done, commits=True)
        for r, part in zip(rows, out.split([len(row) for row in rows.values()]), strict=True):
            hidden[r].append(part)
            done[r] += len(part)
    out = together.forward(tails, done, commits=False)
    for r, part in zip(tails, out.split([len(row) for row in tails.values()]), strict=True):
        assert relative_error(torch.cat([*hidden[r], part]), alone[r]) < REORDERED


def test_a_slot_is_as_new_after_reset(model):
    token_ids, runner = sequence(3), Runner(model)
    first = runner.prefill(token_ids[:PROMPT])
    runner.forward({0: token_ids[:3]}, {0: PROMPT}, commits=False)
    runner.states.reset(0)
    assert all((tensor == 0).all() for layer in runner.states.layers for tensor in layer.tensors())
    assert torch.equal(runner.prefill(token_ids[:PROMPT]), first)


def test_reset_leaves_other_slots_alone(model):
    runner = Runner(model, 2)
    runner.prefill(sequence(4)[:PROMPT], request=1)
    before = [tensor[1].clone() for layer in runner.states.layers for tensor in layer.tensors()]
    runner.states.reset(0)
    after = [tensor[1] for layer in runner.states.layers for tensor in layer.tensors()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
