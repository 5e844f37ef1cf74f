"""The size of a step, against machines whose times are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.engine import BLOCK_SIZE
from engine.chunk_budget import ChunkBudget


def run(budget, launch_s, pace_s, steps=60, has_decodes=True, decode_s=0.002):
    """Steps of a long prompt; returns sizes and times."""
    found = []
    for _ in range(steps):
        budget.observe(0, has_decodes, decode_s)
        tokens = budget.num_tokens(has_decodes)
        seconds = launch_s + pace_s * tokens + decode_s * has_decodes
        budget.observe(tokens, has_decodes, seconds)
        found.append((tokens, seconds))
    return found


def test_without_a_bound_steps_are_whole():
    budget = ChunkBudget(8192, None)
    assert {tokens for tokens, _ in run(budget, 0.1, 1e-3)} == {8192}


@pytest.mark.parametrize("pace_s", [1e-5, 5e-5, 3e-4])
def test_the_bound_is_kept_where_it_can_be(pace_s):
    last = run(ChunkBudget(8192, 0.1), 0.005, pace_s)[20:]
    assert all(seconds <= 0.1 for _, seconds in last)
    assert all(tokens == 8192 or seconds > 0.035 for tokens, seconds in last), "steps are smaller than they need be"


def test_an_expensive_launch_does_not_make_steps_small():
    """80 ms before the first token, whatever the size: blocks of 64 would compute 800 tokens a second."""
    last = run(ChunkBudget(8192, 0.1), 0.08, 2.5e-5)[20:]
    assert all(tokens >= 2048 and seconds <= 0.25 for tokens, seconds in last)


def test_small_prompts_first_do_not_make_steps_small():
    budget = ChunkBudget(8192, 0.1)
    for _ in range(5):
        budget.observe(64, False, 0.08)
    assert run(budget, 0.08, 2.5e-5, has_decodes=False)[-1][0] >= 2048


def test_one_slow_step_is_forgotten():
    budget = ChunkBudget(4096, 0.1)
    budget.observe(4096, True, 20.0)
    assert run(budget, 0.02, 2e-5, steps=80)[-1][0] > 1024


def test_slower_tokens_make_steps_smaller_at_once():
    budget = ChunkBudget(8192, 0.1)
    before = run(budget, 0.001, 1e-5)[-1][0]
    assert run(budget, 0.001, 1e-4, steps=4)[-1][0] < before / 4


@given(st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.floats(0, 1e3)), max_size=50))
def test_a_step_has_whole_blocks_and_at_least_one(observed):
    budget = ChunkBudget(8192, 0.1)
    for observation in observed:
        budget.observe(*observation)
        for has_decodes in (False, True):
            tokens = budget.num_tokens(has_decodes)
            assert BLOCK_SIZE <= tokens <= 8192 and tokens % BLOCK_SIZE == 0


def test_a_long_prompt_after_short_ones_is_not_cut_small():
    """What was timed before there were requests counts: not a ramp of doubled steps from the first short prompt on."""
    budget = ChunkBudget(8192, 0.1)
    for size in (64, 1024, 8192):
        budget.observe(size, False, 0.02 + 2e-5 * size)
    assert budget.num_tokens(True) == 2048
    for _ in range(5):
        budget.observe(64, False, 0.045)
    assert budget.num_tokens(False) >= 2048
    assert ChunkBudget(8192, 0.1).num_tokens(True) < 2048
