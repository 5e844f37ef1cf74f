"""The simulation of many engines: its model of costs by hand, and what it says of the ways to share requests."""

import itertools
import math

import pytest

from tests.bench.agents import Agent, Shape, Step, agents
from tests.bench.replay.generate import Traffic, generate
from tests.bench.replay.trace import Call, Piece
from tests.bench.simulation import POLICIES, Costs, Engine, Served, simulate, summary

COSTS = Costs(prefill=1000.0, decode=10.0, cache_tokens=10_000, places=2)
ALONE = Agent("a", 0, 1_000, 5.0, (Step(500, 20, 2.0), Step(100, 10, 0.0)))


def test_lengths_and_times_of_one_agent_by_hand():
    first, second = simulate(list(ALONE.calls()), 1, "affinity", COSTS)
    # 1,500 tokens at 1,000 a second, then 20 tokens at 10 a second
    assert first == Served(5.0, pytest.approx(6.6), pytest.approx(8.5), 1_500, 0, 20)
    # after a pause of 2 s only the 100 new tokens are computed
    assert second == Served(pytest.approx(10.5), pytest.approx(10.7), pytest.approx(11.6), 1_620, 1_520, 10)


def call_of(name, *sizes, answer=1):
    pieces = [Piece("system", "system", 1_000), *(Piece("user", f"{name}-{n}", size) for n, size in enumerate(sizes))]
    return Call(name, "t", tuple(pieces), Piece("assistant", f"{name}-answer", answer))


def test_prompts_are_computed_one_after_the_other_and_places_are_waited_for():
    engine = Engine(COSTS)
    three = [engine.take(0.0, call_of(name, 500, answer=101)) for name in "abc"]
    # the second and third find the system prompt of 1,000 tokens; the third waits until the first one's place is free
    assert [round(one.first_s, 6) for one in three] == [1.6, 2.1, three[0].end_s + 0.5 + 0.1]


def test_what_was_used_least_recently_is_forgotten_from_its_end():
    engine = Engine(COSTS)
    for name in "abc":
        engine.take(0.0, call_of(name, 2_000, 1_000))
    # 1,000 tokens of the system prompt, 3,001 of each conversation: the first one lost its answer and last message
    assert engine.num_cached == 10_003 - 1_001
    assert sum(engine.cached.values()) == engine.num_cached
    assert engine.take(0.0, call_of("a", 2_000, 1_000, 5)).cached_tokens == 4_000 - 1_000
    assert engine.take(0.0, call_of("c", 2_000, 1_000, 5)).cached_tokens == 4_000


def test_the_same_seed_gives_the_same_agents_and_another_one_others():
    assert agents(20, 1) == agents(20, 1) != agents(20, 2)
    assert agents(5, 1) == agents(20, 1)[:5]
    shape = Shape()
    for agent in agents(50, 3):
        last = list(agent.calls())[-1]
        assert sum(piece.num_tokens for piece in last.messages) <= shape.max_context
        assert agent.system < shape.num_systems and agent.steps


def calls_of(count):
    return [call for agent in agents(count, 0, Shape(num_steps=15)) for call in agent.calls()]


def test_affinity_keeps_prefixes_where_the_others_spread_them():
    population = calls_of(32)
    rows = {by: summary(simulate(population, 4, by, Costs())) for by in POLICIES}
    assert rows == {by: summary(simulate(population, 4, by, Costs())) for by in POLICIES}
    affinity = rows.pop("affinity")
    for row in rows.values():
        assert affinity.cached > row.cached + 0.1
        assert affinity.ttft_p50_s < row.ttft_p50_s / 2
        assert affinity.tokens_per_s > row.tokens_per_s
        assert row.requests == affinity.requests == len(population)


def test_engines_and_their_agents_grow_together():
    rates = [summary(simulate(calls_of(8 * count), count, "affinity", Costs())).tokens_per_s for count in (2, 4, 8)]
    assert all(later > 1.6 * earlier for earlier, later in itertools.pairwise(rates))


def test_gateways_that_know_nothing_of_each_other_choose_alike():
    population = calls_of(32)
    one, four = (summary(simulate(population, 4, "affinity", Costs(), count)) for count in (1, 4))
    assert math.isclose(one.cached, four.cached, abs_tol=0.05)


def test_traces_of_the_replay_run_here_too():
    """Sub-agents wait for several calls, and conversations are compacted."""
    calls = generate(Traffic(num_agents=6, num_tasks=2, num_questions=10), 0)
    rows = {by: summary(simulate(calls, 3, by, Costs())) for by in POLICIES}
    assert rows["affinity"].requests == len(calls)
    assert rows["affinity"].cached > rows["round_robin"].cached
