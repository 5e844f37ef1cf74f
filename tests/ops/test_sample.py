"""The choice of tokens by parameters on the device."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from engine.ops import sample as op
from engine.ops.penalise import TokenCounts
from engine.ops.sample_noise import gumbel, gumbel_noise, noise_key, seed_key
from engine.ops.sample_table import SamplingTable
from engine.ops.sample_truncate import TruncateShape
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.sample_examples import assert_choices, random_example

SMALL = TruncateShape(block=128, cuts=8, levels=2, capacity=64, tile=32)
# always more logits left than are ranked
BISECTING = TruncateShape(block=256, cuts=2, levels=1, capacity=4, tile=4)
SIGMAS = 4.0


def by_kernel(shape):
    def sample(logits, table, tokens, rows):
        return op.sample_triton(logits, table, tokens, rows, shape=shape)

    return sample


def rows_of(num_rows, device, **changes):
    """One request, from position 10 on."""
    rows = op.SampleRows(
        slots=torch.zeros(num_rows, dtype=torch.int32, device=device),
        positions=torch.arange(10, 10 + num_rows, device=device),
        drafts=torch.empty(1, 0, dtype=torch.int64, device=device),
        num_drafts=torch.zeros(num_rows, dtype=torch.int32, device=device),
    )
    return replace(rows, **changes)


def sampled(implementation, logits, num_rows, device, **fields):
    """Choices of one request with these logits at as many positions."""
    logits = torch.tensor(logits, device=device).expand(num_rows, -1).contiguous()
    table, tokens = SamplingTable.neutral(1, device), TokenCounts.zeros(1, logits.shape[1], device)
    table.write(0, **fields)
    return implementation(logits, table, tokens, rows_of(num_rows, device))


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", both(op.sample_reference, by_kernel(SMALL)))


@needs_kernels
@pytest.mark.parametrize("shape", [SMALL, BISECTING])
@pytest.mark.parametrize("seed", range(5))
def test_kernels_choose_as_the_reference(shape, seed, device):
    example = random_example(seed + 100 * (shape is SMALL), vocab=300, num_requests=2, num_drafts=1)
    assert_choices(example, by_kernel(shape)(*example.on(device)))


# e^(0.2, 0.6, 0.2, 0, -0.4) = 1.22, 1.82, 1.22, 1, 0.67 of 5.94 at temperature 5
FIVE = [1.0, 3.0, 1.0, 0.0, -2.0]


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "fields, kept",
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 1.0}, {1}),
        # equal ones are kept together
        ({"top_k": 2}, {0, 1, 2}),
        ({"top_p": 0.7}, {0, 1, 2}),
        ({"top_p": 0.73}, {0, 1, 2, 3}),
        # of the 4.26 that top-k leaves, 0.428 come before the next
        ({"top_k": 3, "top_p": 0.42}, {1}),
        ({"top_k": 3, "top_p": 0.44}, {0, 1, 2}),
        # e^-0.4 = 0.67 and e^-0.6 = 0.55 of the largest
        ({"min_p": 0.6}, {0, 1, 2}),
        ({"min_p": 0.5}, {0, 1, 2, 3}),
    ],
)
def test_what_truncation_keeps(implementation, fields, kept, device):
    few = IS_INTERPRETED and implementation is not op.sample_reference
    chosen = set(sampled(implementation, FIVE, 6 if few else 100, device, temperature=5.0, **fields).tolist())
    assert chosen <= kept if few else chosen == kept


@IMPLEMENTATIONS
def test_greedy_by_hand(implementation, device):
    logits = [2.0, 5.0, 5.0, 4.5]
    assert sampled(implementation, logits, 1, device).item() == 1
    assert sampled(implementation, logits, 1, device, logit_bias={3: 0.6}, top_k=3).item() == 3
    stops = {"stop_token_ids": (1, 2), "min_tokens": 3, "num_prompt_tokens": 9}
    assert sampled(implementation, logits, 3, device, **stops).tolist() == [3, 3, 1], "outputs before: 1, 2, 3"


@IMPLEMENTATIONS
def test_a_row_without_request(implementation, device):
    table, tokens = SamplingTable.neutral(1, device), TokenCounts.zeros(1, 40, device)
    table.write(0, temperature=1.0, top_k=3)
    rows = rows_of(2, device, slots=torch.tensor([-1, 0], dtype=torch.int32, device=device))
    logits = torch.zeros(2, 40, device=device)
    logits[:, 7] = 50.0
    assert implementation(logits, table, tokens, rows).tolist() == [0, 7]


@IMPLEMENTATIONS
@pytest.mark.parametrize("fields", [{}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_a_row_that_allows_nothing_gives_some_id(implementation, fields, device):
    logits = [-math.inf] * 5
    assert sampled(implementation, logits, 1, device, **({"temperature": 1.0} | fields)).item() in range(5)


@needs_kernels
def test_a_row_does_not_depend_on_those_beside_it(device):
    logits, table, tokens, rows = random_example(3, vocab=300, num_requests=2, num_drafts=1).on(device)
    together = by_kernel(SMALL)(logits, table, tokens, rows)
    masks = {"mask_words": rows.mask_words[2:], "mask_flags": rows.mask_flags[2:]}
    alone = op.SampleRows(rows.slots[2:], rows.positions[2:], rows.drafts[1:], rows.num_drafts[2:], **masks)
    assert torch.equal(by_kernel(SMALL)(logits[2:], table, tokens, alone), together[2:])


@needs_kernels
@pytest.mark.skipif(IS_INTERPRETED, reason="takes minutes")
def test_the_distribution_of_the_kernels(device):
    logits, num_rows = [2.0, 1.0, 0.5, 0.0, -1.0], 20_000
    chosen = sampled(by_kernel(SMALL), logits, num_rows, device, temperature=1.5, top_k=4, seed=11)
    expected = (torch.tensor(logits[:4], dtype=torch.float64) / 1.5).softmax(-1) * num_rows
    counts = torch.bincount(chosen.cpu(), minlength=5).double()
    assert counts[4] == 0
    chi_square = ((counts[:4] - expected) ** 2 / expected).sum().item()
    assert chi_square < 3 + SIGMAS * math.sqrt(6)


@triton.jit
def noise_kernel(noise_ptr, of_ptr, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    tl.store(noise_ptr + ids, gumbel_noise(tl.load(of_ptr), tl.load(of_ptr + 1), ids))


@needs_kernels
@pytest.mark.parametrize("seed, position", [(0, 0), (-(2**63), 262_143), (2**63 - 1, 5), (12345, 77)])
def test_the_noise_is_that_of_the_reference(seed, position, device):
    noise = torch.empty(4096, device=device)
    of = torch.tensor([seed_key(seed), position], device=device)
    noise_kernel[(1,)](noise, of, COUNT=4096)
    ids = torch.arange(4096, dtype=torch.int32)
    expected = gumbel(torch.tensor(noise_key(seed, position), dtype=torch.int32), ids)
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_slot_holds_so_many_ids(device):
    table = SamplingTable.neutral(1, device)
    table.write(0, stop_token_ids=range(64), logit_bias=dict.fromkeys(range(1024), 1.0))
    with pytest.raises(ValueError, match="65 ids; a slot holds at most 64"):
        table.write(0, stop_token_ids=range(65))
