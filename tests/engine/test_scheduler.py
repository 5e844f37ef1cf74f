import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import QueueFullError
from engine.request import Request, SamplingParams
from engine.schedule import Outcome
from engine.scheduler import Scheduler, cut_at_end

NUM_DRAFTS = 3


def scheduler(**changes):
    defaults = {
        "num_blocks": 16,
        "num_slots": 4,
        "prefill_chunk": 128,
        "num_drafts": NUM_DRAFTS,
        "max_queued_requests": 4,
        "max_queued_tokens": 10_000,
    }
    return Scheduler(**defaults | changes)


def request(name, num_prompt_tokens, max_tokens=8, priority=0):
    return Request(name, (1,) * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), priority=priority)


def spans(schedule):
    return [(chunk.state.request.request_id, chunk.start, chunk.end) for chunk in schedule.chunks]


def decoding(schedule):
    return [state.request.request_id for state in schedule.decodes]


def step(scheduler, token_ids=(7,), drafts=()):
    """One step in which every sampled request gets the same tokens and drafts."""
    schedule = scheduler.schedule()
    return schedule, scheduler.update(schedule, [Outcome(token_ids, (), drafts) for _ in schedule.sampled])


def test_prompt_is_cut_at_multiples_of_64():
    s = scheduler()
    s.add(request("a", 300), seed=0)
    assert [spans(step(s)[0]) for _ in range(3)] == [[("a", 0, 128)], [("a", 128, 256)], [("a", 256, 300)]]


def test_what_is_left_of_a_chunk_goes_to_the_next_prompt_in_whole_blocks():
    s = scheduler()
    s.add(request("a", 30), seed=0)
    s.add(request("b", 200), seed=0)
    assert spans(step(s)[0]) == [("a", 0, 30), ("b", 0, 64)]
    assert spans(step(s)[0]) == [("b", 64, 192)]


def test_remainder_smaller_than_a_block_waits():
    s = scheduler()
    s.add(request("a", 100), seed=0)
    s.add(request("b", 200), seed=0)
    assert spans(step(s)[0]) == [("a", 0, 100)]


def test_decoding_requests_get_a_token_between_two_chunks():
    s = scheduler()
    s.add(request("short", 10), seed=0)
    step(s)
    s.add(request("long", 400), seed=0)
    for start in (0, 128, 256):
        schedule, events = step(s)
        assert decoding(schedule) == ["short"]
        assert spans(schedule) == [("long", start, start + 128)]
        assert [event.request_id for event in events] == ["short"]


def test_computed_tokens_follow_what_was_accepted():
    s = scheduler()
    s.add(request("a", 10, max_tokens=20), seed=0)
    step(s, token_ids=(5,), drafts=(6, 7, 8))
    schedule, events = step(s, token_ids=(6, 7, 9))
    (state,) = schedule.decodes
    assert state.token_ids[10:] == [5, 6, 7, 9]
    assert state.num_computed_tokens == 13
    assert state.num_accepted_rows == 3
    assert events[0].token_ids == (6, 7, 9)
    stats = s.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_output_tokens) == (3, 2, 4)


@pytest.mark.parametrize(
    "token_ids, kept, reason",
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 99, 3), (1,), "stop"),
        ((99,), (), "stop"),
        ((1, 2, 3, 4), (1, 2, 3, 4), "length"),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4), "length"),
        ((1, 2, 3, 99), (1, 2, 3), "stop"),
        ((1, 2, 3, 4, 99), (1, 2, 3, 4), "length"),
    ],
)
def test_output_ends_before_the_stop_token_and_at_the_limit(token_ids, kept, reason):
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(99,))
    assert cut_at_end(token_ids, 2, sampling) == (kept, reason)


def test_finished_request_frees_everything():
    s = scheduler()
    s.add(request("a", 70, max_tokens=1), seed=0)
    _, (event,) = step(s)
    assert event.finish_reason == "length"
    assert not s.has_requests
    assert s.stats().num_free_kv_blocks == 16
    s.check_integrity()


def test_admission_reserves_prompt_and_output():
    s = scheduler(num_blocks=4)
    s.add(request("a", 64, max_tokens=128), seed=0)
    s.add(request("b", 64, max_tokens=64), seed=0)
    assert (s.stats().num_running, s.stats().num_waiting) == (1, 1)
    step(s)
    # one block of three is written; the rest is promised, not taken
    assert s.stats().num_free_kv_blocks == 2
    s.abort("a")
    assert spans(step(s)[0]) == [("b", 0, 64)]


def test_first_in_line_is_not_overtaken():
    s = scheduler(num_blocks=4)
    s.add(request("a", 64, max_tokens=64), seed=0)
    s.add(request("large", 192, max_tokens=64), seed=0)
    s.add(request("small", 10), seed=0)
    assert s.stats().num_waiting == 2


def test_priority_comes_before_arrival():
    s = scheduler(num_slots=1)
    s.add(request("a", 10), seed=0)
    s.add(request("b", 10), seed=0)
    s.add(request("urgent", 10, priority=1), seed=0)
    step(s)
    s.abort("a")
    assert spans(step(s)[0]) == [("urgent", 0, 10)]


def test_queue_is_bounded_by_requests():
    s = scheduler(num_slots=1, max_queued_requests=1)
    s.add(request("a", 10), seed=0)
    s.add(request("b", 10), seed=0)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        s.add(request("c", 10), seed=0)
    s.check_integrity()


def test_queue_is_bounded_by_prompt_tokens():
    s = scheduler(num_slots=1, max_queued_tokens=100)
    s.add(request("a", 500), seed=0)
    s.add(request("b", 60), seed=0)
    with pytest.raises(QueueFullError, match="120 prompt tokens"):
        s.add(request("c", 60), seed=0)
    s.add(request("d", 40), seed=0)


def test_without_a_queue_only_what_runs_at_once_is_taken():
    s = scheduler(num_slots=1, max_queued_requests=0)
    s.add(request("a", 10), seed=0)
    with pytest.raises(QueueFullError):
        s.add(request("b", 10), seed=0)


def test_abort_of_an_unknown_request_is_ignored():
    assert scheduler().abort("nobody") is None


def cached(scheduler, name, num_prompt_tokens, **changes):
    """Tokens that a prompt reuses; the request runs to its end."""
    scheduler.add(request(name, num_prompt_tokens, **changes), seed=0)
    while scheduler.has_requests:
        _, events = step(scheduler, token_ids=(1,))
    scheduler.check_integrity()
    return events[-1].num_cached_tokens


def test_prompts_are_cut_where_states_stand():
    s = scheduler(num_snapshots=4)
    s.add(request("a", 300), seed=0)
    expected = [(0, 128), (128, 256), (256, 300)]
    assert [spans(step(s)[0]) for _ in range(3)] == [[("a", *each)] for each in expected]
    s.abort("a")
    s.add(request("b", 320), seed=0)
    # the state after 256 tokens is there; the last token's row has to be computed in any case
    assert spans(step(s)[0]) == [("b", 256, 320)]


def test_a_prompt_of_whole_blocks_leaves_a_state_for_itself_and_one_for_what_follows():
    s = scheduler(num_snapshots=4)
    assert cached(s, "a", 192) == 0
    assert cached(s, "same", 192) == 128
    assert cached(s, "longer", 193) == 192


def test_an_aborted_prefill_is_resumed():
    s = scheduler(num_snapshots=4)
    s.add(request("a", 600), seed=0)
    step(s)
    step(s)
    s.abort("a")
    s.check_integrity()
    assert spans(step_of(s, request("retry", 600))) == [("retry", 256, 384)]


def step_of(scheduler, each):
    scheduler.add(each, seed=0)
    return step(scheduler)[0]


@pytest.mark.parametrize("reuses_decoded, expected", [(True, 192), (False, 64)])
def test_an_answer_is_reused_up_to_its_last_whole_block(reuses_decoded, expected):
    s = scheduler(num_snapshots=4, reuses_decoded=reuses_decoded)
    cached(s, "a", 100, max_tokens=110)
    assert cached(s, "b", 230) == expected


def test_the_state_of_an_answer_stands_where_a_block_ends_among_accepted_rows():
    s = scheduler(num_snapshots=4)
    s.add(request("a", 62, max_tokens=20), seed=0)
    step(s, token_ids=(1,), drafts=(1, 1, 1))
    (state,) = s.running
    step(s, token_ids=(1, 1, 1))
    # rows 62, 63 and 64 stand, two of them belong to the block
    assert (state.num_computed_tokens, state.num_accepted_rows) == (65, 3)
    (copy,) = s.schedule().kept
    assert (copy.slot, copy.position) == (state.slot, 64)


def test_rejected_drafts_do_not_fill_a_block():
    s = scheduler(num_snapshots=4)
    s.add(request("a", 62, max_tokens=20), seed=0)
    step(s, token_ids=(1,), drafts=(1, 1, 1))
    step(s, token_ids=(9,))
    (state,) = s.running
    assert (state.num_computed_tokens, state.path.depth, s.schedule().kept) == (63, 0, ())


def test_tokens_after_a_stop_do_not_fill_a_block():
    """Accepted with the stop token, but not part of the output."""
    s = scheduler(num_snapshots=4)
    sampling = SamplingParams(max_tokens=20, stop_token_ids=(99,))
    s.add(Request("a", (1,) * 60, sampling), seed=0)
    step(s, token_ids=(1,), drafts=(1, 99, 1))
    _, (event,) = step(s, token_ids=(1, 99, 1, 1))
    assert (event.token_ids, event.finish_reason, s.schedule().kept) == ((1,), "stop", ())
    assert s.stats().num_cached_blocks == 0


def ahead(s, each, outcomes):
    """Schedules, each made before the outcome of the one before it is known; what the engine has for each is given."""
    s.add(each, seed=0)
    schedules = [s.schedule()]
    for token_ids, drafts in outcomes:
        schedules.append(s.schedule())
        s.update(schedules[-2], [Outcome(token_ids, (), drafts)])
    return schedules


def test_a_state_that_a_pass_in_flight_may_reach_is_copied_before_it_moves_on():
    s = scheduler(num_snapshots=4)
    drafts = (1, 1, 1)
    schedules = ahead(
        s, request("a", 58, 40), [((1,), drafts), ((1, 1), drafts), ((1,), drafts), ((1, 1, 1, 1), drafts)]
    )
    # rows 58, 60 and 61 begin the passes; the last of them may reach 64, and so may the one before it
    assert [[copy.position for copy in each.kept] for each in schedules] == [[], [], [], [64], [64]]
    assert s.stats().num_snapshots == 1
    s.check_integrity()


def test_a_state_that_was_not_reached_gives_its_place_back():
    s = scheduler(num_snapshots=2)
    *_, last = ahead(s, request("a", 62, 40), [((1,), (1, 1, 1)), ((9,), (1, 1, 1))])
    assert [copy.position for copy in last.kept] == [64]
    assert s.stats().num_snapshots == 0
    s.check_integrity()


def test_a_state_beyond_the_end_of_an_answer_does_not_stand():
    s = scheduler(num_snapshots=2)
    each = Request("a", (1,) * 62, SamplingParams(max_tokens=40, stop_token_ids=(99,)))
    *_, last = ahead(s, each, [((1,), (99, 1, 1)), ((99, 1, 1, 1), ())])
    assert [copy.position for copy in last.kept] == [64]
    assert not s.has_requests and s.stats().num_snapshots == 0
    s.check_integrity()


def test_one_snapshot_is_left_to_prompts():
    s = scheduler(num_snapshots=1)
    schedules = ahead(s, request("a", 62, 40), [((1,), ()), ((1,), ()), ((1,), ())])
    assert not any(each.kept for each in schedules)
    s.check_integrity()


def test_what_is_cached_gives_way_to_what_is_admitted():
    s = scheduler(num_blocks=4, num_snapshots=4)
    cached(s, "a", 130)
    assert s.stats().num_cached_blocks == 2
    s.add(Request("b", (2,) * 200, SamplingParams(max_tokens=56)), seed=0)
    assert s.stats().num_running == 1
    while s.has_requests:
        step(s, token_ids=(3,))
    s.check_integrity()
    assert s.stats().num_evicted_blocks == 2


# --- the next schedule made before what the last one gave is known


def names(events):
    return [(event.request_id, event.token_ids, event.finish_reason) for event in events]


def test_a_prompt_that_is_being_read_counts_as_read():
    s = scheduler()
    s.add(request("a", 200), seed=0)
    first, second, third = s.schedule(), s.schedule(), s.schedule()
    assert [spans(each) for each in (first, second, third)] == [[("a", 0, 128)], [("a", 128, 200)], []]
    assert decoding(third) == ["a"]
    assert s.update(first, []) == []
    assert names(s.update(second, [Outcome((5,))])) == [("a", (5,), None)]
    assert names(s.update(third, [Outcome((6,))])) == [("a", (6,), None)]


def test_what_comes_after_the_end_is_dropped():
    s = scheduler()
    s.add(Request("a", (1,) * 10, SamplingParams(max_tokens=20, stop_token_ids=(99,))), seed=0)
    first, second = s.schedule(), s.schedule()
    assert names(s.update(first, [Outcome((99,))])) == [("a", (), "stop")]
    assert not s.has_requests
    s.check_integrity()
    s.add(request("b", 10), seed=0)
    third = s.schedule()
    assert third.chunks[0].state.slot == second.decodes[0].slot
    assert s.update(second, [Outcome((7,))]) == []
    assert names(s.update(third, [Outcome((8,))])) == [("b", (8,), None)]


def test_what_is_given_to_an_aborted_request_is_dropped():
    s = scheduler()
    s.add(request("a", 10), seed=0)
    schedule = s.schedule()
    s.abort("a")
    assert s.update(schedule, [Outcome((7,))]) == []
    s.check_integrity()


def test_no_pass_is_made_for_a_token_that_the_limit_forbids():
    s = scheduler()
    s.add(request("a", 10, max_tokens=2), seed=0)
    first, second, third = s.schedule(), s.schedule(), s.schedule()
    assert (decoding(second), third.is_empty) == (["a"], True)
    s.update(first, [Outcome((7,))])
    assert names(s.update(second, [Outcome((7,))])) == [("a", (7,), "length")]


def test_blocks_are_there_for_every_draft_that_may_be_accepted():
    s = scheduler()
    s.add(request("a", 120, max_tokens=100), seed=0)
    first, second = s.schedule(), s.schedule()
    (state,) = second.decodes
    # the first may add one token (its drafts come after it), and the second reads it and as many drafts as there may
    # be, behind which MTP drafts as many again
    assert len(state.block_ids) * 64 >= 120 + 1 + 2 * NUM_DRAFTS
    s.update(first, [Outcome((7,), (), (7, 7, 7))])
    third = s.schedule()
    assert len(state.block_ids) * 64 >= 121 + (1 + NUM_DRAFTS) + 2 * NUM_DRAFTS
    s.update(second, [Outcome((7, 7, 7, 7), (), (7, 7, 7))])
    s.update(third, [Outcome((7, 7, 7, 7), (), (7, 7, 7))])
    assert state.num_computed_tokens == 128


def test_more_requests_than_a_step_takes_decode_in_turns():
    s = scheduler(most_decodes=2)
    for name in "abc":
        s.add(request(name, 10, max_tokens=20), seed=0)
    turns = []
    for _ in range(7):
        schedule, _ = step(s)
        turns.append(sorted(decoding(schedule)))
    assert turns == [[], ["a", "b"], ["a", "c"], ["b", "c"], ["a", "b"], ["a", "c"], ["b", "c"]]


def test_a_state_after_a_prompt_is_kept_with_the_schedule_that_reads_it():
    s = scheduler(num_snapshots=4, reuses_decoded=False)
    s.add(request("a", 130), seed=0)
    first = s.schedule()
    (copy,) = first.copies
    assert copy.position == 128
    # reuse needs no more than the order in which passes run
    s.add(request("b", 140), seed=0)
    assert spans(s.schedule()) == [("a", 128, 130), ("b", 128, 140)]


def prompt(name, *parts, max_tokens=8, salt="", marks=(), priority=0):
    """parts  (token id, count)"""
    token_ids = tuple(token_id for token_id, count in parts for _ in range(count))
    return Request(name, token_ids, SamplingParams(max_tokens=max_tokens), salt, priority, marks)


def chunks_until_idle(scheduler):
    found = []
    while scheduler.has_requests:
        schedule, _ = step(scheduler)
        found += spans(schedule)
    scheduler.check_integrity()
    return found


def test_equal_prompts_at_once_are_computed_once():
    s = scheduler(num_snapshots=4)
    for name in ("first", "second", "third"):
        s.add(prompt(name, (1, 300), max_tokens=1), seed=0)
    assert chunks_until_idle(s) == [
        ("first", 0, 128),
        ("first", 128, 256),
        ("first", 256, 300),
        ("second", 256, 300),
        ("third", 256, 300),
    ]


def test_what_two_prompts_have_in_common_is_computed_once():
    s = scheduler(num_snapshots=4, num_blocks=32)
    s.add(prompt("first", (1, 200), (2, 400), max_tokens=1), seed=0)
    step(s)
    s.add(prompt("second", (1, 200), (3, 100), max_tokens=1), seed=0)
    # the state is left where the two part, and there the second goes on at once
    assert [spans(step(s)[0]) for _ in range(2)] == [[("first", 128, 192)], [("second", 192, 256), ("first", 192, 256)]]


def test_whoever_waits_for_a_prompt_goes_on_when_it_is_aborted():
    s = scheduler(num_snapshots=4)
    s.add(prompt("first", (1, 500)), seed=0)
    s.add(prompt("second", (1, 500)), seed=0)
    assert spans(step(s)[0]) == [("first", 0, 128)]
    s.abort("first")
    s.check_integrity()
    assert spans(step(s)[0]) == [("second", 128, 256)]


def test_tenants_do_not_wait_for_each_other():
    s = scheduler(num_snapshots=4, prefill_chunk=256)
    s.add(prompt("first", (1, 128), salt="a"), seed=0)
    s.add(prompt("second", (1, 128), salt="b"), seed=0)
    assert spans(step(s)[0]) == [("first", 0, 64), ("second", 0, 64)]


def test_short_prompts_pass_a_long_one_that_still_gets_its_share():
    s = scheduler(num_blocks=64, prefill_chunk=64)
    s.add(prompt("long", (1, 2000)), seed=0)
    step(s)
    for name in ("a", "b"):
        s.add(prompt(name, (2, 100), max_tokens=1), seed=0)
    names = [spans(step(s)[0])[0][0] for _ in range(6)]
    assert names == ["a", "a", "long", "b", "b", "long"]


def test_a_long_prompt_steps_aside_while_others_wait_for_a_slot():
    s = scheduler(num_blocks=64, num_slots=2, prefill_chunk=64)
    s.add(prompt("decoding", (1, 10), max_tokens=30), seed=0)
    step(s)
    s.add(prompt("long", (2, 2000)), seed=0)
    assert [len(step(s)[0].chunks) for _ in range(4)] == [1, 1, 1, 1]
    s.add(prompt("waiting", (3, 10)), seed=0)
    assert [len(step(s)[0].chunks) for _ in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]
    s.abort("decoding")
    assert [spans(step(s)[0]) for _ in range(2)] == [[("waiting", 0, 10)], [("long", 384, 448)]]


def test_a_long_prompt_shares_no_step_with_short_ones():
    s = scheduler(num_blocks=64, prefill_chunk=128)
    s.add(prompt("long", (2, 2000)), seed=0)
    s.add(prompt("short", (3, 10)), seed=0)
    assert [spans(step(s)[0]) for _ in range(2)] == [[("short", 0, 10)], [("long", 0, 128)]]


def test_tenants_share_prompt_tokens():
    """One sends four prompts, another one later; each of the same length."""
    s = scheduler(num_blocks=64, num_slots=8, prefill_chunk=64)
    for name in ("a1", "a2", "a3", "a4"):
        s.add(prompt(name, (1, 200), max_tokens=1, salt="a"), seed=0)
    step(s)
    s.add(prompt("b", (2, 200), max_tokens=1, salt="b"), seed=0)
    order = list(dict.fromkeys(name for name, _, _ in chunks_until_idle(s)))
    assert order.index("b") == 1


def test_a_tenant_with_few_requests_is_admitted_first():
    s = scheduler(num_slots=2)
    for name in ("a1", "a2", "a3"):
        s.add(prompt(name, (1, 10), salt="a"), seed=0)
    s.add(prompt("b", (1, 10), salt="b"), seed=0)
    s.abort("a1")
    step(s)
    assert {state.request.request_id for state in s.running} == {"a2", "b"}


def test_the_next_in_line_stays_next_until_it_fits():
    s = scheduler(num_blocks=8, num_slots=4)
    s.add(prompt("a", (1, 64), max_tokens=256, salt="a"), seed=0)
    s.add(prompt("large", (1, 64), max_tokens=256, salt="a"), seed=0)
    step(s)
    s.add(prompt("b", (1, 10), salt="b"), seed=0)
    step(s)
    assert [state.request.request_id for state in s.running] == ["a"]
    s.abort("a")
    step(s)
    assert [state.request.request_id for state in s.running] == ["large", "b"]


def test_chunks_beside_decoding_requests_shrink_to_the_bound():
    s = scheduler(num_blocks=200, prefill_chunk=4096, longest_gap_s=0.1)
    s.add(prompt("decoding", (1, 10), max_tokens=1000), seed=0)
    schedule, _ = step(s)
    for _ in range(3):
        s.observe(step(s)[0], 0.01)
    s.add(prompt("long", (2, 11_000)), seed=0)
    sizes = []
    for _ in range(12):
        schedule, _ = step(s)
        ((_, start, end),) = spans(schedule)
        sizes.append(end - start)
        # 10 ms and 0.1 ms for each prompt token
        s.observe(schedule, 0.01 + (end - start) * 1e-4)
    assert sizes[0] == 256
    # the next size would take 112 ms
    assert sizes[-1] == 512
    assert max(sizes) <= 900


def test_chunks_of_a_context_that_grows_slower_stay_within_the_bound():
    s = scheduler(num_blocks=4000, prefill_chunk=4096, longest_gap_s=0.1)
    s.add(prompt("decoding", (1, 10), max_tokens=2000), seed=0)
    step(s)
    s.observe(step(s)[0], 0.005)
    s.add(prompt("long", (2, 200_000)), seed=0)
    while not (schedule := step(s)[0]).chunks[0].ends_prompt:
        ((_, start, end),) = spans(schedule)
        seconds = 0.005 + (end - start) / 50_000 * (1 + start / 70_000)
        assert seconds <= 0.1
        s.observe(schedule, seconds)


def test_states_stand_after_the_first_and_the_last_mark():
    s = scheduler(num_snapshots=8, prefill_chunk=1024)
    s.add(prompt("a", (1, 700), marks=(130, 200, 330, 500)), seed=0)
    assert [spans(step(s)[0])[0][1:] for _ in range(3)] == [(0, 128), (128, 448), (448, 640)]
    s.abort("a")
    # another conversation with the same system and tools
    s.add(prompt("b", (1, 140), (2, 300)), seed=0)
    assert spans(step(s)[0])[0] == ("b", 128, 384)


def test_states_stand_inside_of_a_chunk_where_passes_keep_them():
    s = scheduler(num_snapshots=8, num_blocks=32, prefill_chunk=1024, keeps_inside=True)
    s.add(prompt("a", (1, 700), marks=(130, 200, 330, 500)), seed=0)
    schedule, _ = step(s)
    assert spans(schedule) == [("a", 0, 700)]
    assert [copy.position for copy in schedule.copies] == [128, 448, 640]
    s.abort("a")
    s.add(prompt("b", (1, 140), (2, 300)), seed=0)
    s.add(prompt("c", (1, 700)), seed=0)
    assert sorted(spans(step(s)[0])) == [("b", 128, 440), ("c", 640, 700)]


@pytest.mark.parametrize("keeps_inside", [False, True])
def test_a_cut_that_comes_after_its_chunk_was_made(keeps_inside):
    """Two prompts meet in a step: the first has its chunk when it is seen that the second begins alike."""
    s = scheduler(num_snapshots=8, num_blocks=64, prefill_chunk=256, keeps_inside=keeps_inside)
    s.add(prompt("first", (1, 192), (2, 300)), seed=0)
    step(s)
    s.add(prompt("second", (1, 192), (2, 128), (3, 500)), seed=0)
    schedule, _ = step(s)
    assert spans(schedule)[0] == ("first", 256, 492 if keeps_inside else 448)
    inside = [copy.position for copy in schedule.copies if copy.position != 448]
    assert inside == ([320] if keeps_inside else [])


def test_of_two_states_in_one_place_the_later_one_is_kept():
    s = scheduler(num_snapshots=1, prefill_chunk=1024, keeps_inside=True)
    s.add(prompt("a", (1, 400), marks=(130,)), seed=0)
    schedule, _ = step(s)
    assert [copy.position for copy in schedule.copies] == [384]


def test_whoever_waits_begins_where_a_state_stands_inside_of_a_chunk():
    s = scheduler(num_snapshots=4, num_blocks=32, prefill_chunk=256, keeps_inside=True)
    s.add(prompt("first", (1, 320), (2, 100), max_tokens=1), seed=0)
    step(s)
    s.add(prompt("second", (1, 320), (3, 100), max_tokens=1), seed=0)
    assert [spans(step(s)[0]) for _ in range(2)] == [[("first", 256, 420)], [("second", 320, 420)]]


class Chaos(RuleBasedStateMachine):
    """Random submits, steps with random acceptance, and aborts in any state; with the outcomes at once, or one step
    late."""

    @initialize(
        num_blocks=st.integers(2, 20),
        num_slots=st.integers(1, 4),
        prefill_chunk=st.sampled_from([64, 128]),
        num_snapshots=st.integers(0, 4),
        reuses_decoded=st.booleans(),
        is_ahead=st.booleans(),
        longest_gap_s=st.sampled_from([None, 0.1]),
        keeps_inside=st.booleans(),
    )
    def start(
        self,
        num_blocks,
        num_slots,
        prefill_chunk,
        num_snapshots,
        reuses_decoded,
        is_ahead,
        longest_gap_s,
        keeps_inside,
    ):
        self.scheduler = scheduler(
            num_blocks=num_blocks,
            num_slots=num_slots,
            prefill_chunk=prefill_chunk,
            num_snapshots=num_snapshots,
            reuses_decoded=reuses_decoded,
            longest_gap_s=longest_gap_s,
            keeps_inside=keeps_inside,
        )
        self.is_ahead, self.keeps_inside = is_ahead, keeps_inside
        self.in_flight = []
        self.last_decodes = ()
        self.reached: dict[int, range] = {}
        self.num_blocks = num_blocks
        self.num_snapshots = num_snapshots
        self.expected: dict[str, int] = {}
        self.num_submitted = 0

    @rule(
        lengths=st.tuples(st.integers(1, 200), st.integers(0, 150) | st.integers(300, 700)),
        max_tokens=st.integers(1, 150),
        priority=st.integers(-1, 1),
        salt=st.sampled_from("ab"),
        last=st.integers(1, 2),
        marks=st.lists(st.integers(1, 350), max_size=4),
    )
    def submit(self, lengths, max_tokens, priority, salt, last, marks):
        num_prompt_tokens = sum(lengths)
        if num_prompt_tokens + max_tokens > self.num_blocks * 64:
            return
        marks = tuple(sorted(mark for mark in marks if mark <= num_prompt_tokens))
        parts = (1, lengths[0]), (last, lengths[1])
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        try:
            each = prompt(name, *parts, max_tokens=max_tokens, salt=salt, marks=marks, priority=priority)
            self.scheduler.add(each, seed=0)
        except QueueFullError:
            return
        self.expected[name] = max_tokens

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.scheduler.abort(name).finish_reason == "abort"
        del self.expected[name]

    @rule(data=st.data())
    def step(self, data):
        before = self.in_flight[-1].decodes if self.in_flight else self.last_decodes
        schedule = self.scheduler.schedule()
        self.check_kept(schedule, {state.slot: state for state in before})
        assert not (schedule.is_empty and self.expected and not self.in_flight), "requests starve"
        assert sum(chunk.end - chunk.start for chunk in schedule.chunks) <= 128
        for state in (*(chunk.state for chunk in schedule.chunks), *schedule.decodes):
            assert len(state.block_ids) * 64 <= state.token_limit + 63
        self.check_chunks(schedule)
        self.scheduler.observe(schedule, data.draw(st.floats(0.0, 0.3)))
        self.in_flight.append(schedule)
        while len(self.in_flight) > self.is_ahead:
            self.update(data, self.in_flight.pop(0))

    def update(self, data, schedule):
        self.check_rows_have_blocks(schedule)
        standing = {state: state.num_computed_tokens for state in schedule.decodes}
        for event in self.scheduler.update(schedule, [self.outcome(data, state) for state in schedule.sampled]):
            self.expected[event.request_id] -= len(event.token_ids)
            assert self.expected[event.request_id] >= 0
            if event.finish_reason is not None:
                assert self.expected.pop(event.request_id) == 0
        self.last_decodes = schedule.decodes
        self.reached = {
            state.slot: range(start + 1, state.num_computed_tokens + 1) for state, start in standing.items()
        }
        for state in self.scheduler.running:
            assert 0 <= state.num_accepted_rows <= 1 + NUM_DRAFTS
            assert state.path.depth <= min(state.num_computed_tokens, len(state.token_ids))

    def check_chunks(self, schedule):
        """They have blocks; snapshots stand at multiples of 64, at their ends or inside, each in a place of its own."""
        for chunk in schedule.chunks:
            assert len(chunk.state.block_ids) * 64 >= chunk.end
        if self.num_snapshots:
            blocks = [h for c in schedule.chunks for h in c.state.path.hashes[c.start // 64 : -(-c.end // 64)]]
            assert len(set(blocks)) == len(blocks), "a block is computed twice in one step"
        chunks = {chunk.state.slot: chunk for chunk in schedule.chunks}
        assert len({copy.index for copy in schedule.copies}) == len(schedule.copies)
        for copy in schedule.copies:
            chunk = chunks[copy.slot]
            assert copy.position % 64 == 0 and 0 <= copy.index < self.num_snapshots
            assert copy.position == chunk.end or (self.keeps_inside and chunk.start < copy.position < chunk.end)

    def check_kept(self, schedule, decoded):
        """What is copied out of the last pass stands at multiples of 64 that the pass has reached, or may have where
        its outcome is not known; every copy has a place of its own."""
        assert len({copy.index for copy in schedule.kept}) == len(schedule.kept)
        for copy in schedule.kept:
            assert copy.position % 64 == 0 and 0 <= copy.index < self.num_snapshots
            if self.in_flight:
                start = decoded[copy.slot].num_computed_tokens
                assert start < copy.position <= start + 1 + NUM_DRAFTS
            else:
                assert copy.position in self.reached[copy.slot]

    def check_rows_have_blocks(self, schedule):
        """Where its rows lie is known now, and where MTP drafts behind them."""
        for state in schedule.decodes:
            if state.request.request_id in self.expected:
                last = len(state.token_ids) + len(state.draft_token_ids) + NUM_DRAFTS
                assert len(state.block_ids) * 64 >= min(last, state.token_limit)

    def outcome(self, data, state):
        drafts = state.draft_token_ids if not state.is_prefilling else ()
        num_new = data.draw(st.integers(1, 1 + len(drafts)))
        remaining = state.token_limit - len(state.token_ids) - num_new
        return Outcome((1,) * num_new, (), (2,) * max(0, min(NUM_DRAFTS, remaining - 1)))

    @invariant()
    def nothing_leaks(self):
        self.scheduler.check_integrity()
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.expected)
        if not self.expected:
            assert stats.num_free_kv_blocks == self.num_blocks

    def teardown(self):
        if self.num_submitted:
            for name in list(self.expected):
                self.scheduler.abort(name)
            self.scheduler.check_integrity()
            assert not self.scheduler.has_requests


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
