"""The simulation of many engines: its model of costs by hand, and what it says of the ways to share requests."""

import itertools
import math
from dataclasses import replace

import pytest

from tests.bench.agents import Agent, Shape, Step, agents
from tests.bench.simulation import POLICIES, Costs, Engine, Served, simulate, summary

COSTS = Costs(prefill=1000.0, decode=10.0, cache_tokens=10_000, places=2)
ALONE = Agent("a", 0, 1_000, 5.0, (Step(500, 20, 2.0), Step(100, 10, 0.0)))


def test_lengths_and_times_of_one_agent_by_hand():
    first, second = simulate([ALONE], 1, "affinity", COSTS)
    # 1,500 tokens at 1,000 a second, then 20 tokens at 10 a second
    assert first == Served(5.0, pytest.approx(6.6), pytest.approx(8.5), 1_500, 0, 20)
    # after a pause of 2 s only the 100 new tokens are computed
    assert second == Served(pytest.approx(10.5), pytest.approx(10.7), pytest.approx(11.6), 1_620, 1_520, 10)
    assert list(ALONE.prompt_tokens()) == [1_500, 1_620]


def test_prompts_are_computed_one_after_the_other_and_places_are_waited_for():
    engine = Engine(COSTS)
    three = [engine.take(0.0, replace(ALONE, name=name), 1_500, 101) for name in "abc"]
    # the second and third find the system prompt of 1,000 tokens; the third waits until the first one's place is free
    assert [round(one.first_s, 6) for one in three] == [1.6, 2.1, three[0].end_s + 0.5 + 0.1]


def test_what_was_used_least_recently_is_forgotten():
    engine = Engine(COSTS)
    for name in "abcd":
        engine.take(0.0, replace(ALONE, name=name), 4_000, 1)
    # 1,000 tokens of the system prompt and 3,001 of each conversation: two of them fit
    assert list(engine.cached) == ["c", "d", "system-0"]
    assert engine.take(0.0, replace(ALONE, name="a"), 4_100, 1).cached_tokens == 1_000
    assert engine.take(0.0, replace(ALONE, name="d"), 4_100, 1).cached_tokens == 4_001


def test_the_same_seed_gives_the_same_agents_and_another_one_others():
    assert agents(20, 1) == agents(20, 1) != agents(20, 2)
    assert agents(5, 1) == agents(20, 1)[:5]
    shape = Shape()
    for agent in agents(50, 3):
        assert max(agent.prompt_tokens()) <= shape.max_context
        assert agent.system < shape.num_systems and agent.steps


def test_affinity_keeps_prefixes_where_the_others_spread_them():
    population = agents(32, 0, Shape(num_steps=15))
    rows = {by: summary(simulate(population, 4, by, Costs())) for by in POLICIES}
    assert rows == {by: summary(simulate(population, 4, by, Costs())) for by in POLICIES}
    affinity = rows.pop("affinity")
    for row in rows.values():
        assert affinity.cached > row.cached + 0.1
        assert affinity.ttft_p50_s < row.ttft_p50_s / 2
        assert affinity.tokens_per_s > row.tokens_per_s
        assert row.requests == affinity.requests == sum(len(agent.steps) for agent in population)


def test_engines_and_their_agents_grow_together():
    rates = [
        summary(simulate(agents(8 * count, 0, Shape(num_steps=15)), count, "affinity", Costs())).tokens_per_s
        for count in (2, 4, 8)
    ]
    assert all(later > 1.6 * earlier for earlier, later in itertools.pairwise(rates))


def test_gateways_that_know_nothing_of_each_other_choose_alike():
    population = agents(32, 0, Shape(num_steps=15))
    one, four = (summary(simulate(population, 4, "affinity", Costs(), count)) for count in (1, 4))
    assert math.isclose(one.cached, four.cached, abs_tol=0.05)
