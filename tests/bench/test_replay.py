"""The simulation itself, on traces small enough for every run."""

from dataclasses import replace

import pytest

from engine.scheduler import Scheduler
from tests.bench.replay.generate import Traffic, generate
from tests.bench.replay.policies import LruCache
from tests.bench.replay.real import replay
from tests.bench.replay.simulate import Costs, Record, Simulation, percentile, result_of
from tests.bench.replay.trace import Call, Piece, Spelling, read_trace, scaled, write_trace

TRAFFIC = Traffic(num_agents=4, num_tasks=3, num_steps=5, num_questions=8, answer_tokens=60)


def scheduler(num_snapshots=24, chunk=512):
    return Scheduler(
        num_blocks=20_000,
        num_slots=8,
        prefill_chunk=chunk,
        num_drafts=0,
        max_queued_requests=1000,
        max_queued_tokens=10**9,
        num_snapshots=num_snapshots,
        longest_gap_s=0.1,
    )


def simulated(calls, chosen=None, **changes) -> list[Record]:
    simulation = Simulation(calls, chosen or scheduler(), Costs(), tokens_per_step=3, **changes)
    return list(simulation.run().records.values())


@pytest.fixture(scope="module")
def calls():
    return generate(TRAFFIC, seed=3)


def test_a_trace_is_read_as_it_was_written(tmp_path, calls):
    write_trace(tmp_path / "trace.jsonl", calls)
    again = read_trace(tmp_path / "trace.jsonl")
    assert [replace(call, wait_s=0.0, cancel_s=None) for call in again] == [
        replace(call, wait_s=0.0, cancel_s=None) for call in calls
    ]
    assert all(abs(a.wait_s - b.wait_s) < 1e-3 for a, b in zip(again, calls, strict=True))


def test_a_trace_has_what_agents_do(calls):
    groups = {call.group for call in calls}
    assert groups == {"agent", "sub-agent", "question"}
    assert any(call.cancel_s is not None for call in calls)
    assert any(piece.first for call in calls for piece in call.messages), "nobody drops thoughts"
    assert generate(TRAFFIC, seed=3) == calls != generate(TRAFFIC, seed=4)


def test_a_prompt_goes_on_from_the_answer_before_it():
    spelling = Spelling(1000)
    first = Call("a", "", (Piece("user", "u", 9),), Piece("assistant", "x", 5))
    second = replace(first, messages=(*first.messages, first.answer, Piece("user", "v", 3)))
    (before, _), (after, marks) = spelling.prompt(first), spelling.prompt(second)
    assert after[: len(before) + 5] == (*before, *spelling.tokens(first.answer))
    assert marks == (14, 14 + 12 + 8)
    assert scaled([first], 4)[0].messages[0].num_tokens == 2


def test_nearly_all_that_an_infinite_cache_would_serve_is_reused(calls):
    chosen, least_recent = scheduler(), scheduler()
    least_recent._reuse._cache = LruCache(least_recent._pool, 24)
    result, other = result_of(simulated(calls, chosen)), result_of(simulated(calls, least_recent))
    assert result.of_infinite >= 0.98 > other.of_infinite
    assert result.gap_max <= 0.1


def test_short_prompts_are_not_starved_by_a_long_one():
    shorts = [
        Call(f"s{i}", "", (Piece("user", f"s{i}", 1000),), Piece("assistant", f"a{i}", 50), wait_s=0.5)
        for i in range(10)
    ]
    long = Call("long", "", (Piece("user", "long", 200_000),), Piece("assistant", "a", 50))
    alone, beside = simulated(shorts), simulated([*shorts, long])
    ttft = [[r.first_s - r.submitted_s for r in records if r.call.call_id != "long"] for records in (alone, beside)]
    assert percentile(ttft[1], 0.95) <= 2 * percentile(ttft[0], 0.95)
    assert all(record.first_s is not None for record in beside)


def test_the_engine_reuses_as_much_of_a_trace_scaled_down():
    small = generate(Traffic(num_agents=2, num_tasks=2, num_steps=2, num_questions=1, sub_agent_share=0.0), seed=1)
    found = replay(small, factor=60, num_snapshots=32)
    assert found.calls == len(small)
    assert found.hit >= 0.98 * found.infinite > 0
