"""Every choice of the sampler against a distribution computed by hand or counted over many seeds."""

import math

import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import Sampler, SamplingRow, gumbel, logprobs, lowest_kept, noise_key, penalise

CPU = torch.device("cpu")
# how far above its mean a chi-square may lie, in standard deviations; the seeds are fixed, so it never flickers
SIGMAS = 4.0


def params(**changes):
    return SamplingParams(**{"max_tokens": 16} | changes)


def row(sampling, seed=0, position=10, slot=0, num_outputs=0, drafts=()):
    return SamplingRow(sampling, seed, slot, position, num_outputs, drafts)


def sampler(vocab_size, num_slots=2):
    return Sampler(vocab_size, num_slots, CPU)


def chosen(logits, sampling, num_seeds=20_000):
    """How often each id is chosen, over as many seeds."""
    logits = torch.tensor([logits]).expand(num_seeds, -1)
    rows = [row(sampling, seed) for seed in range(num_seeds)]
    return torch.bincount(sampler(logits.shape[-1]).sample(logits, rows), minlength=logits.shape[-1])


def assert_distributed(counts, expected):
    """counts against probabilities; ids of probability 0 never occur."""
    expected = torch.as_tensor(expected, dtype=torch.float64) * counts.sum()
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0].double(), expected[expected > 0]
    cells = len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < cells + SIGMAS * math.sqrt(2 * cells) + 2 * SIGMAS


LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-38, 9e-6, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature):
    assert chosen([1.0, 30.0, 30.5, -3.0], params(temperature=temperature), num_seeds=50).tolist() == [0, 0, 50, 0]


def softmax(logits):
    return torch.tensor(logits, dtype=torch.float64).softmax(-1)


def test_temperature_zero_is_argmax():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    assert sampler(3).sample(logits, [row(params(temperature=0))] * 2).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    counts = chosen(LOGITS, params(temperature=temperature))
    assert_distributed(counts, softmax([x / temperature for x in LOGITS]))


def test_a_wrong_distribution_is_noticed():
    counts = chosen(LOGITS, params(temperature=1.0))
    with pytest.raises(AssertionError):
        assert_distributed(counts, softmax([x / 1.05 for x in LOGITS]))


def test_top_k_by_hand():
    # e2, e1, e0.5 of six
    kept = [*softmax(LOGITS[:3]).tolist(), 0, 0, 0]
    assert_distributed(chosen(LOGITS, params(top_k=3)), kept)


def test_top_p_by_hand():
    # 0.5, 0.3, 0.15, 0.05: the first two reach 0.8, so 0.79 keeps two and 0.81 three
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert_distributed(chosen(logits, params(top_p=0.79)), [0, 0.5 / 0.8, 0, 0.3 / 0.8])
    assert_distributed(chosen(logits, params(top_p=0.81)), [0.15 / 0.95, 0.5 / 0.95, 0, 0.3 / 0.95])


def test_top_p_counts_what_top_k_left():
    # top-k leaves 0.5, 0.3, 0.15 of 0.95: 0.5 / 0.95 = 0.526 and 0.8 / 0.95 = 0.842
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert_distributed(chosen(logits, params(top_k=3, top_p=0.83)), [0, 0.5 / 0.8, 0, 0.3 / 0.8])
    assert_distributed(chosen(logits, params(top_k=3, top_p=0.52)), [0, 1, 0, 0])


def test_min_p_by_hand():
    # at least 0.35 * 0.5 = 0.175
    logits = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]
    assert_distributed(chosen(logits, params(min_p=0.35)), [0, 0.5 / 0.8, 0, 0.3 / 0.8])


@pytest.mark.parametrize("vocab", [600, 2000])
def test_top_p_beyond_the_first_look(vocab):
    """A flat distribution needs nearly the whole vocabulary to reach top_p."""
    logits = torch.linspace(0, -1, vocab)[None]
    lowest = lowest_kept(logits, [0], torch.tensor([[0.9]]), torch.tensor([[0.0]]))
    p = logits.double().softmax(-1)
    before = p.cumsum(-1) - p
    assert (logits >= lowest).sum() == (before < 0.9).sum()


def test_top_p_zero_keeps_the_most_likely():
    assert_distributed(chosen(LOGITS, params(top_p=0.0), num_seeds=100), [1, 0, 0, 0, 0, 0])


def test_equal_logits_are_kept_together_whatever_stands_beside():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0], [4.0, 3.0, 2.0, 1.0]])
    neutral = torch.ones(2, 1), torch.zeros(2, 1)
    alone = lowest_kept(logits[:1], [2], *(x[:1] for x in neutral))
    beside = lowest_kept(logits, [2, 4], *neutral)
    assert (logits[0] >= alone[0]).tolist() == (logits[0] >= beside[0]).tolist() == [True, True, True, False]


def test_penalties_by_hand():
    logits = torch.tensor([[2.0, -2.0, 3.0, 1.0]])
    counts = torch.tensor([[2, 1, 0, 0]])
    in_prompt = torch.tensor([[False, False, True, False]])
    column = [torch.tensor([[x]]) for x in (0.5, 0.25, 2.0)]
    # 2/2 - 0.5 - 2*0.25;  -2*2 - 0.5 - 0.25;  3/2;  untouched
    assert penalise(logits, counts, in_prompt, *column).tolist() == [[0.0, -4.75, 1.5, 1.0]]


def test_counts_follow_the_request_and_are_forgotten_with_it():
    s = sampler(4)
    logits = torch.tensor([[3.0, 2.9, 0.0, 0.0]])
    sampling = params(temperature=0, presence_penalty=1.0)
    s.begin(0, [0, 0], sampling)
    assert s.sample(logits, [row(sampling)]).item() == 0, "a prompt does not count for presence"
    s.observe(0, [0], sampling)
    assert s.sample(logits, [row(sampling)]).item() == 1
    assert s.sample(logits, [row(sampling, slot=1)]).item() == 0, "another slot"
    s.begin(0, [3], sampling)
    assert s.sample(logits, [row(sampling)]).item() == 0


def test_drafts_of_the_round_count():
    s = sampler(4)
    logits = torch.tensor([[3.0, 2.9, 2.5, 0.0]]).repeat(3, 1)
    sampling = params(temperature=0, frequency_penalty=0.3)
    s.begin(0, [3], sampling)
    rows = [row(sampling, drafts=drafts) for drafts in ((), (0,), (0, 1, 1))]
    # 3.0;  2.7 against 2.9;  2.7 against 2.3 and 2.5
    assert s.sample(logits, rows).tolist() == [0, 1, 0]


def test_repetition_penalty_sees_the_prompt():
    s = sampler(3)
    sampling = params(temperature=0, repetition_penalty=2.0)
    s.begin(0, [1], sampling)
    assert s.sample(torch.tensor([[1.0, 1.5, 0.5]]), [row(sampling)]).item() == 0


def test_logit_bias():
    logits = torch.tensor([LOGITS])
    assert sampler(6).sample(logits, [row(params(temperature=0, logit_bias={4: 100.0}))]).item() == 4
    assert_distributed(chosen(LOGITS, params(logit_bias={0: -100.0})), [0, *softmax(LOGITS[1:]).tolist()])
    assert logits.tolist() == [LOGITS], "the caller's logits are left alone"


def test_stop_ids_wait_for_min_tokens():
    sampling = params(temperature=0, min_tokens=2, stop_token_ids=(0,))
    rows = [row(sampling, num_outputs=n) for n in (0, 1, 2)]
    assert sampler(6).sample(torch.tensor([LOGITS] * 3), rows).tolist() == [1, 1, 0]


def test_an_impossible_id_is_never_chosen():
    logits = [0.0, -math.inf, 0.0]
    assert_distributed(chosen(logits, params(temperature=5.0)), [0.5, 0, 0.5])
    assert_distributed(chosen(logits, params(temperature=5.0, top_k=3, min_p=0.01)), [0.5, 0, 0.5])


def test_a_row_does_not_depend_on_its_place_or_its_neighbours():
    torch.manual_seed(0)
    logits = torch.randn(1, 500) * 3
    kinds = [params(), params(top_k=5), params(top_p=0.7), params(temperature=0), params(presence_penalty=1.0)]
    s = sampler(500)
    for sampling in kinds:
        mine = [row(sampling, seed=3, position=p) for p in range(40)]
        alone = [s.sample(logits, [r]).item() for r in mine]
        mixed = [other for i, r in enumerate(mine) for other in (row(kinds[i % 5], seed=i), r)]
        assert s.sample(torch.cat([torch.randn_like(logits), logits]).repeat(40, 1), mixed)[1::2].tolist() == alone


def keys_of(pairs):
    return torch.tensor([noise_key(seed, position) for seed, position in pairs], dtype=torch.int32)


def test_noise_is_uniform_over_ids_positions_and_seeds():
    count, one_id = 100_000, torch.tensor(17, dtype=torch.int32)
    for keys, ids in (
        (keys_of([(1, 2)]), torch.arange(count, dtype=torch.int32)),
        (keys_of((1, position) for position in range(count)), one_id),
        (keys_of((seed, 2) for seed in range(count)), one_id),
    ):
        u = torch.exp(-torch.exp(-gumbel(keys, ids)))
        assert_distributed(torch.histc(u, 64, 0, 1), torch.full((64,), 1 / 64))
        pairs = (u[:-1] * 8).int() * 8 + (u[1:] * 8).int()
        assert_distributed(torch.bincount(pairs, minlength=64), torch.full((64,), 1 / 64))


def test_rare_tokens_are_as_rare_as_they_should_be():
    """The upper tail of the noise: among 2 ** 20 draws the largest lies near log(2 ** 20)."""
    noise = gumbel(keys_of([(3, 4)]), torch.arange(2**20, dtype=torch.int32))
    assert torch.isfinite(noise).all()
    for exponent in (8, 12, 16):
        expected = 2 ** (20 - exponent)
        assert abs((noise > exponent * math.log(2)).sum().item() - expected) < 5 * math.sqrt(expected)


def test_seeds_of_any_sign_and_size_differ():
    keys = [noise_key(seed, p) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for p in (0, 1, 262_143)]
    assert len(set(keys)) == 15
    assert all(-(2**31) <= half < 2**31 for key in keys for half in key)


def test_logprobs_by_hand():
    p = torch.tensor([[0.5, 0.125, 0.25, 0.125], [0.25, 0.25, 0.25, 0.25]])
    first, second = logprobs(p.log(), torch.tensor([2, 0]), 2)
    assert first.logprob == pytest.approx(math.log(0.25))
    assert [token_id for token_id, _ in first.top] == [0, 2]
    assert [value for _, value in first.top] == pytest.approx([math.log(0.5), math.log(0.25)])
    assert second.logprob == pytest.approx(math.log(0.25))
    assert logprobs(p.log(), torch.tensor([2, 0]), 0)[0].top == ()
