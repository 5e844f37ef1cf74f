"""A runner that is one pass ahead gives what one gives that finishes every pass before the next."""

import random
from dataclasses import replace

import pytest
import torch

from engine.convert.convert import convert
from tests.engine.checkpoints import DENSE, MOE, Geometry, transparent, write_checkpoint
from tests.engine.runtime import Output, drain, engine, finish, generate, request

GEOMETRY = Geometry(vocab_size=320)


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, GEOMETRY)


def prompt(seed, length):
    return random.Random(seed).choices(range(GEOMETRY.vocab_size), k=length)


def pair(directory, **changes):
    """The same engine without and with a pass in flight."""
    fields = {"prefill_chunk": 128, "kv_cache_tokens": 4096, "max_num_requests": 4} | changes
    return engine(directory, is_ahead=False, **fields), engine(directory, is_ahead=True, **fields)


def mixed_requests():
    return [
        request("a", prompt(1, 1), max_tokens=30),
        request("b", prompt(2, 200), max_tokens=20, temperature=1.0, seed=5),
        request("c", prompt(3, 64), max_tokens=1),
        request("d", prompt(4, 65), max_tokens=12, presence_penalty=0.7, repetition_penalty=1.3),
        request("e", prompt(5, 130), max_tokens=25, temperature=1.2, top_k=20, seed=-1, frequency_penalty=0.5),
        request("f", prompt(6, 3), max_tokens=9, logit_bias={7: 4.0, 8: 3.0}, temperature=0.5, seed=1, min_p=0.01),
    ]


@pytest.mark.parametrize("num_drafts", [0, 3, 7])
def test_tokens_are_the_same(checkpoint_dir, num_drafts):
    in_step, ahead = pair(checkpoint_dir, num_drafts=num_drafts)
    expected = generate(in_step, *mixed_requests())
    assert generate(ahead, *mixed_requests()) == expected
    # slots and blocks that were used before
    assert generate(ahead, *reversed(mixed_requests())) == expected[::-1]


def test_tokens_are_the_same_of_a_dense_model(tmp_path):
    in_step, ahead = pair(write_checkpoint(tmp_path, DENSE, GEOMETRY))
    requests = mixed_requests()[1:4]
    assert generate(ahead, *requests) == generate(in_step, *requests)


def test_every_draft_of_a_perfect_mtp_is_accepted(tmp_path):
    _, ahead = pair(write_checkpoint(tmp_path, MOE, GEOMETRY, edit=transparent))
    generate(ahead, request("a", prompt(1, 100), max_tokens=60, temperature=1.0, seed=1))
    stats = ahead.stats()
    # the first token comes without drafts, the last pass has more than the limit allows
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40


def test_drafts_count_that_a_pass_had_rows_for(tmp_path):
    """Nine requests decode in turns, of which not every one has room for all drafts that followed the one before."""
    path = write_checkpoint(tmp_path, MOE, GEOMETRY, edit=transparent)
    _, ahead = pair(path, num_drafts=7, max_num_requests=9, kv_cache_tokens=8192)
    requests = [request(str(i), prompt(i, 20), max_tokens=20 + i) for i in range(9)]
    generate(ahead, *requests)
    stats = ahead.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 80


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_stop_drops_what_came_after_it(checkpoint_dir, num_drafts):
    in_step, ahead = pair(checkpoint_dir, num_drafts=num_drafts)
    text = prompt(9, 40)
    (tokens,) = generate(in_step, request("a", text, max_tokens=24))
    stop = tokens[10]
    output = finish(ahead, request("a", text, max_tokens=24, stop_token_ids=(stop,)))
    assert (output.token_ids, output.finish_reason) == (tokens[: tokens.index(stop)], "stop")


def test_min_tokens_put_off_the_stop(checkpoint_dir):
    in_step, ahead = pair(checkpoint_dir)
    (tokens,) = generate(in_step, request("a", prompt(9, 40), max_tokens=24))
    stop = next(token for i, token in enumerate(tokens) if tokens.index(token) == i > 1)
    each = request("a", prompt(9, 40), max_tokens=24, stop_token_ids=(stop,), min_tokens=8)
    assert generate(ahead, each) == generate(in_step, each)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_logprobs_are_the_same(checkpoint_dir, num_drafts):
    in_step, ahead = pair(checkpoint_dir, num_drafts=num_drafts)
    each = request("a", prompt(10, 30), max_tokens=12, temperature=1.0, seed=3, logprobs=4, top_k=50)
    beside = request("b", prompt(11, 30), max_tokens=12)
    for core in (in_step, ahead):
        core.add(beside)
    expected, found = finish(in_step, each), finish(ahead, each)
    assert found.token_ids == expected.token_ids
    assert [[i for i, _ in one.top] for one in found.logprobs] == [[i for i, _ in one.top] for one in expected.logprobs]
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_events_come_one_step_late_and_nothing_is_left(checkpoint_dir):
    _, ahead = pair(checkpoint_dir)
    ahead.add(request("a", prompt(1, 10), max_tokens=2))
    assert [len(ahead.step()) for _ in range(2)] == [0, 1]
    assert not ahead.is_idle
    output = drain(ahead)["a"]
    assert (len(output.token_ids), output.finish_reason) == (1, "length")


def test_an_abort_beside_a_pass_in_flight(checkpoint_dir):
    """Its slot and blocks go to the next request at once, though the device still writes to them."""
    _, ahead = pair(checkpoint_dir, max_num_requests=1, kv_cache_tokens=256, max_model_len=256)
    expected = generate(ahead, request("a", prompt(4, 90), max_tokens=12))
    for steps in range(1, 8):
        ahead.add(request("other", prompt(steps, 150), max_tokens=60, temperature=1.0, presence_penalty=1.0))
        for _ in range(steps):
            ahead.step()
        ahead.abort("other")
        ahead.check_integrity()
        assert generate(ahead, request("a", prompt(4, 90), max_tokens=12)) == expected


def test_random_submits_and_aborts_leave_nothing(checkpoint_dir):
    rng = random.Random(11)
    _, ahead = pair(checkpoint_dir, kv_cache_tokens=1024, max_model_len=512)
    expected: dict[str, list[int]] = {}
    outputs: dict[str, Output] = {}
    live: set[str] = set()
    texts = {seed: prompt(seed, rng.randint(1, 200)) for seed in range(4)}
    alone = {seed: finish(ahead, request("alone", text, max_tokens=12)).token_ids for seed, text in texts.items()}
    for index in range(60):
        if rng.random() < 0.5:
            seed, name = rng.randrange(4), f"r{index}"
            expected[name] = alone[seed][: rng.randint(1, 12)]
            ahead.add(request(name, texts[seed], max_tokens=len(expected[name])))
            live.add(name)
        if live and rng.random() < 0.2:
            name = rng.choice(sorted(live))
            ahead.abort(name)
            live.remove(name)
            del expected[name]
        for event in ahead.step():
            outputs.setdefault(event.request_id, Output()).add(event)
            if event.finish_reason is not None:
                live.discard(event.request_id)
        ahead.check_integrity()
    drain(ahead, outputs)
    assert {name: outputs[name].token_ids for name in expected} == expected


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_prompts_and_answers_are_reused_up_to_their_last_block(checkpoint_dir, num_drafts):
    in_step, ahead = pair(checkpoint_dir, num_drafts=num_drafts)
    history, reused = prompt(3, 150), 0
    for turn in range(4):
        each = request(f"turn{turn}", history, max_tokens=50)
        expected, output = finish(in_step, each), finish(ahead, each)
        assert output.token_ids == expected.token_ids
        assert output.num_cached_tokens == expected.num_cached_tokens == reused
        history = history + output.token_ids
        # the last token's row was never computed
        reused = (len(history) - 1) // 64 * 64
        history = history + prompt(turn, 20)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_states_that_a_pass_keeps_on_its_way_are_those_of_passes_that_end_there(checkpoint_dir, num_drafts):
    """After system and tools, after the last message, and at the last whole block: one step instead of four."""
    in_step, ahead = pair(checkpoint_dir, num_drafts=num_drafts, prefill_chunk=512)
    text, beside = prompt(3, 420), prompt(4, 90)
    first = replace(request("first", text, max_tokens=30), marks=(150, 330))
    ahead.add(first)
    ahead.add(request("beside", beside, max_tokens=9))
    ahead.step()
    assert ahead.stats().num_prompt_tokens == len(text) + len(beside)
    assert drain(ahead)["first"].token_ids == finish(in_step, first).token_ids
    for shared, cached in ((420, 384), (350, 320), (200, 128)):
        follow = request("follow", text[:shared] + prompt(shared, 50), max_tokens=30)
        output = finish(ahead, follow)
        assert (output.num_cached_tokens, output.token_ids) == (cached, finish(in_step, follow).token_ids)


def test_what_is_kept_of_a_pass_is_what_passes_leave_that_end_there(checkpoint_dir):
    """States of every layer, taps, and the hidden state of the token before, for MTP."""
    in_step, ahead = pair(checkpoint_dir, num_drafts=3, prefill_chunk=512)
    for core in (in_step, ahead):
        core.add(replace(request("a", prompt(3, 420), max_tokens=1), marks=(150, 330)))
        core.add(request("b", prompt(4, 90), max_tokens=1))
        drain(core)
    expected, found = (snapshots_of(core) for core in (in_step, ahead))
    assert sorted(depth for depth, _ in found) == sorted(depth for depth, _ in expected) == [64, 128, 320, 384]
    for key, parts in found.items():
        for mine, other in zip(parts, expected[key], strict=True):
            assert mine.abs().sum() > 0 or not other.numel()
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def snapshots_of(core):
    """By depth and the block they stand after."""
    standing = core._scheduler._reuse._cache._snapshots
    return {(s.node.depth, s.node.block_hash): core._runner._snapshots.parts(s.index) for s in standing}


def test_a_state_among_accepted_drafts_is_reused(tmp_path):
    """Four rows a pass, all accepted: a block ends in the middle of them."""
    in_step, ahead = pair(write_checkpoint(tmp_path, MOE, GEOMETRY, edit=transparent))
    for length in (61, 62, 63):
        text = prompt(length, length)
        answer = finish(ahead, request("a", text, max_tokens=70)).token_ids
        follow = request("b", text + answer + prompt(1, 5), max_tokens=20)
        output = finish(ahead, follow)
        assert output.num_cached_tokens == 128
        assert output.token_ids == finish(in_step, follow).token_ids


def test_an_aborted_answer_is_reused(checkpoint_dir):
    in_step, ahead = pair(checkpoint_dir)
    text = prompt(2, 100)
    (answer,) = generate(in_step, request("a", text, max_tokens=130))
    ahead.add(request("a", text, max_tokens=150))
    num_tokens = 0
    while num_tokens < 100:
        num_tokens += sum(len(event.token_ids) for event in ahead.step())
    ahead.abort("a")
    drain(ahead)
    output = finish(ahead, request("b", text + answer[:100], max_tokens=30))
    assert (output.num_cached_tokens, output.token_ids) == (192, answer[100:])


def test_deterministic_reuses_prompts_alone(checkpoint_dir):
    _, ahead = pair(checkpoint_dir, deterministic=True)
    text = prompt(2, 100)
    answer = finish(ahead, request("a", text, max_tokens=100)).token_ids
    assert finish(ahead, request("b", text + answer, max_tokens=1)).num_cached_tokens == 64


def test_answers_come_back_from_host_memory(checkpoint_dir):
    in_step, ahead = pair(checkpoint_dir, kv_cache_tokens=512, max_model_len=512, host_cache_bytes=64 * 2**20)
    text = prompt(2, 100)
    answer = finish(ahead, request("a", text, max_tokens=100)).token_ids
    finish(ahead, request("other", prompt(3, 400), max_tokens=80))
    follow = request("b", text + answer + prompt(4, 9), max_tokens=30)
    output = finish(ahead, follow)
    assert (output.num_cached_tokens, ahead.stats().num_host_tokens) == (192, 192)
    assert output.token_ids == finish(in_step, follow).token_ids


@pytest.mark.parametrize("num_drafts", [0, 7])
def test_more_requests_than_a_pass_takes_decode_in_turns(checkpoint_dir, num_drafts):
    in_step, ahead = pair(checkpoint_dir, max_num_requests=11, num_drafts=num_drafts)
    requests = [request(str(i), prompt(i, 5 + i), max_tokens=6 + i % 3, temperature=i % 2, seed=i) for i in range(11)]
    assert generate(ahead, *requests) == generate(in_step, *requests)


def test_what_warming_up_leaves_is_not_seen(checkpoint_dir):
    in_step, ahead = pair(checkpoint_dir)
    ahead._runner.warm_up([[(0, 1)], [(0, 130)], [(1024, 64)], [(0, 1), (0, 7), (64, 3)]])
    assert [size for size, seconds in ahead._runner.time_prompts([1, 64]) if seconds > 0] == [1, 64]
    assert generate(ahead, *mixed_requests()) == generate(in_step, *mixed_requests())


def test_tokens_of_an_artifact_are_the_same(tmp_path):
    """Drafted or not, beside others or alone: one arithmetic for every decode row."""
    small = Geometry(hidden_size=128, num_experts=4, experts_per_token=2, width=64, vocab_size=320)
    convert(write_checkpoint(tmp_path / "source", MOE, small), tmp_path / "artifact", "w4")
    requests = [
        request("a", prompt(1, 70), max_tokens=12),
        request("b", prompt(2, 9), max_tokens=12, temperature=1.0, seed=2),
    ]
    in_step, ahead = engine(tmp_path / "artifact", num_drafts=0), engine(tmp_path / "artifact", True, num_drafts=2)
    alone = [generate(in_step, each)[0] for each in requests]
    assert generate(ahead, *requests) == alone
    # and behind the answers, whose keys, values and states hold what decoding rounds
    follow = request("c", [*requests[0].prompt_token_ids, *alone[0], *prompt(3, 20)], max_tokens=60)
    again = request("d", follow.prompt_token_ids + (7,) * 30, max_tokens=12)
    expected, outputs = ([finish(core, each) for each in (follow, again)] for core in (in_step, ahead))
    assert [output.num_cached_tokens for output in outputs] == [64, 64]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
