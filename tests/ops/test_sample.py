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
from engine.ops.sample_truncate import TruncateShape, lowest_kept, lowest_of_row
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.sample_examples import assert_choices, random_example

SMALL = TruncateShape(block=128, counters=2, rankers=2, counted=64, tile=32, cuts=8, capacity=64)
# always more logits left than are ranked
BISECTING = TruncateShape(
    block=256, counters=1, rankers=1, counted=256, tile=128, cuts=2, levels=1, capacity=4, ranked=4
)
SIGMAS = 4.0


def by_kernel(shape):
    def sample(logits, table, tokens, rows):
        return op.sample_triton(logits, table, tokens, rows, shape=shape)

    return sample


@triton.jit
def lowest_kernel(
    lowest_ptr, table_ptr, ranges_ptr, masses_ptr, bounds_ptr, places_ptr, values_ptr, before_ptr, found_ptr,
    bisected_ptr, programs,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, LEVELS: tl.constexpr, CUTS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lowest = lowest_of_row(
        ranges_ptr, masses_ptr, bounds_ptr, places_ptr, values_ptr, before_ptr, found_ptr, bisected_ptr,
        table_ptr + row * WIDTH, row, programs, PARTS, LEVELS, CUTS, CAPACITY, 4,
    )  # fmt: skip
    tl.store(lowest_ptr + row, lowest)


def lowest_found(table, space, shape):
    """What the kernels keep, of one row per slot."""
    rows, programs, _ = space.ranges.shape
    lowest = torch.empty(rows, device=space.ranges.device)
    lowest_kernel[(rows,)](
        lowest, table.words, space.ranges, space.masses, space.bounds, space.places, space.values, space.before,
        space.found, space.lowest, programs, WIDTH=table.words.shape[1], PARTS=triton.next_power_of_2(programs),
        LEVELS=shape.levels, CUTS=shape.cuts, CAPACITY=shape.capacity,
    )  # fmt: skip
    return lowest.cpu()


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
@pytest.mark.parametrize("seed", range(3))
def test_kernels_choose_as_the_reference(shape, seed, device):
    example = random_example(seed + 100 * (shape is SMALL), vocab=300, num_requests=2, num_drafts=1)
    assert_choices(example, by_kernel(shape)(*example.on(device)))


LIMITS = [
    {"top_k": 7}, {"top_k": 90}, {"top_p": 0.3}, {"top_p": 0.98}, {"min_p": 0.3}, {"top_k": 40, "top_p": 0.5},
    {"top_k": 80, "top_p": 0.9},
]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("kind, shape", [("flat", SMALL), ("rounded", SMALL), ("rounded", BISECTING)])
def test_the_smallest_kept_logit(shape, kind, device):
    rows = len(LIMITS)
    logits = torch.randn(rows, 100)
    logits = logits.mul(4).round().div(4) if kind == "rounded" else logits
    logits[:, :5] = -torch.inf
    table, tokens = SamplingTable.neutral(rows, device), TokenCounts.zeros(rows, 100, device)
    for slot, fields in enumerate(LIMITS):
        table.write(slot, temperature=1.0, **fields)
    asked = rows_of(rows, device, slots=torch.arange(rows, dtype=torch.int32, device=device))
    space = op.SampleWorkspace.empty(rows, 100, device, shape)
    op.sample_triton(logits.to(device), table, tokens, asked, space, shape)
    columns = [[fields.get(name, off) for fields in LIMITS] for name, off in (("top_p", 1.0), ("min_p", 0.0))]
    top_k = [fields.get("top_k", 0) for fields in LIMITS]
    expected = lowest_kept(logits, top_k, *(torch.tensor(column)[:, None] for column in columns))
    kept = logits >= lowest_found(table, space.truncate, shape)[:, None]
    assert torch.equal(kept, logits >= expected)


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
    chosen = set(sampled(implementation, FIVE, 2 if few else 100, device, temperature=5.0, **fields).tolist())
    assert chosen <= kept if few else chosen == kept


@IMPLEMENTATIONS
def test_greedy_by_hand(implementation, device):
    logits = [2.0, 5.0, 5.0, 4.5]
    assert sampled(implementation, logits, 1, device).item() == 1
    assert sampled(implementation, logits, 1, device, logit_bias={3: 0.6}, top_k=3).item() == 3
    stops = {"stop_token_ids": (1, 2), "min_tokens": 3, "num_prompt_tokens": 9}
    assert sampled(implementation, logits, 3, device, **stops).tolist() == [3, 3, 1], "outputs before: 1, 2, 3"


@IMPLEMENTATIONS
def test_drafts_before_a_row_count(implementation, device):
    table, tokens = SamplingTable.neutral(2, device), TokenCounts.zeros(2, 4, device)
    table.write(0, frequency_penalty=0.3)
    table.write(1, frequency_penalty=0.3)
    tokens.counts[1, 0] = 1
    rows = rows_of(
        6,
        device,
        slots=torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32, device=device),
        drafts=torch.tensor([[0, 1], [1, 2]], device=device),
        num_drafts=torch.tensor([0, 1, 2] * 2, dtype=torch.int32, device=device),
    )
    logits = torch.tensor([[3.0, 2.9, 2.5, 0.0]], device=device).repeat(6, 1)
    # of ids 0 and 1: 3.0, 2.9; 2.7, 2.9; 2.7, 2.6; and after a 0 in the output 2.7, 2.9; 2.7, 2.6; 2.7, 2.6
    assert implementation(logits, table, tokens, rows).tolist() == [0, 1, 0, 1, 0, 0]


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
    # nor on how many programs share the work
    for shape in (SMALL, replace(SMALL, block=256, counters=1, rankers=1)):
        assert torch.equal(by_kernel(shape)(logits[2:], table, tokens, alone), together[2:])


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
