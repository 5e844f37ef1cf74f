"""MTP over a window of the context: other drafts perhaps, never another token."""

import random

import pytest
import torch

from engine.cache.mtp_window import MtpWindow
from tests.engine.checkpoints import MOE, Geometry, write_checkpoint
from tests.engine.runtime import engine, finish, generate, request

GEOMETRY = Geometry(vocab_size=320)


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, GEOMETRY)


def prompt(seed, length):
    return random.Random(seed).choices(range(GEOMETRY.vocab_size), k=length)


def make(checkpoint_dir, is_ahead, **changes):
    fields = {"prefill_chunk": 512, "kv_cache_tokens": 4096, "max_num_requests": 3, "mtp_window": 64}
    return engine(checkpoint_dir, is_ahead, **fields | changes)


def test_what_is_kept_of_a_prompt_by_hand():
    window = MtpWindow.of_tokens(100)
    assert (window.ring, window.blocks_per_slot) == (5, 6)
    # of 640 tokens, ten blocks, the newest four are looked at; of 641 those from block 7 on
    assert [window.first_block(count) for count in (1, 320, 321, 640, 641)] == [1, 1, 2, 6, 7]
    assert window.kept(0, 320) == [(0, 320)]
    assert window.kept(0, 640) == [(0, 64), (384, 640)]
    assert window.kept(10, 640) == [(10, 64), (384, 640)]
    assert window.kept(64, 640) == [(384, 640)]
    assert window.kept(512, 640) == [(512, 640)]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_window_as_long_as_the_context_changes_no_draft(checkpoint_dir, is_ahead):
    full, windowed = (make(checkpoint_dir, is_ahead, mtp_window=window) for window in (None, 2048))
    requests = [request(f"r{i}", prompt(i, length), max_tokens=50) for i, length in enumerate((1, 300))]
    assert generate(windowed, *requests) == generate(full, *requests)
    counts = [(core.stats().num_draft_tokens, core.stats().num_accepted_tokens) for core in (full, windowed)]
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_tokens_equal_those_without_drafts(checkpoint_dir, is_ahead):
    drafting, plain = (make(checkpoint_dir, is_ahead, num_drafts=count) for count in (3, 0))
    histories = {name: prompt(seed, length) for seed, (name, length) in enumerate([("a", 230), ("b", 370)])}
    for turn in range(2):
        sampling = {"max_tokens": 40, "temperature": float(turn), "seed": 5}
        requests = [request(f"{name}{turn}", history, **sampling) for name, history in histories.items()]
        answers = generate(drafting, *requests)
        assert answers == generate(plain, *requests)
        for (name, history), answer in zip(list(histories.items()), answers, strict=True):
            histories[name] = history + answer + prompt(turn, 30)
    assert drafting.stats().num_draft_tokens > 0
    assert drafting.stats().num_cached_tokens > 0


def test_states_from_host_memory_bring_the_window_back(checkpoint_dir):
    core = make(checkpoint_dir, True, kv_cache_tokens=1024, max_model_len=1024, host_cache_bytes=64 * 2**20)
    text = prompt(2, 500)
    answer = finish(core, request("a", text, max_tokens=80)).token_ids
    finish(core, request("other", prompt(3, 900), max_tokens=80))
    follow = request("b", text + answer + prompt(4, 9), max_tokens=60, temperature=4.0, seed=2)
    output = finish(core, follow)
    assert (output.num_cached_tokens, core.stats().num_host_tokens) == (576, 576)
    assert_sees_the_same(checkpoint_dir, core, follow, output)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_mtp_sees_are_the_rows_of_full_mtp(checkpoint_dir, is_ahead):
    """After rounds of drafts that were mostly refused, and again behind a state that was reused."""
    core = make(checkpoint_dir, is_ahead)
    # at this temperature drafts are accepted often but not always
    first = request("a", prompt(1, 501), max_tokens=100, temperature=4.0, seed=1)
    output = finish(core, first)
    assert 0 < core.stats().num_accepted_tokens < core.stats().num_draft_tokens
    assert_sees_the_same(checkpoint_dir, core, first, output)
    # in the same slot
    finish(core, request("other", prompt(3, 400), max_tokens=9))
    second = request("b", [*first.prompt_token_ids, *output.token_ids, *prompt(2, 3)], max_tokens=20)
    output = finish(core, second)
    assert output.num_cached_tokens > 500
    assert_sees_the_same(checkpoint_dir, core, second, output)


def assert_sees_the_same(checkpoint_dir, core, each, output):
    """Its window, as the only request left it, against the rows that a prompt of the same tokens leaves all of."""
    token_ids = [*each.prompt_token_ids, *output.token_ids]
    reference = make(checkpoint_dir, False, mtp_window=None, prefix_caching=False)
    finish(reference, request("all", token_ids, max_tokens=1))
    window, mine = kv_of(core).window, kv_of(core).layers[-1]
    # a fresh engine gives out blocks in order; either has had one request at a time, in slot 0
    expected = kv_of(reference).layers[-1]
    # a pass in flight at the end leaves as much unwritten as it may have rows
    count = len(token_ids) - 8
    first = window.first_block(count) * 64
    assert first > 64
    positions = torch.cat([torch.arange(64), torch.arange(first, count)])
    blocks = positions // 64
    places = torch.where(blocks == 0, 0, 1 + (blocks - 1) % window.ring)
    for seen, rows in ((mine.keys, expected.keys), (mine.values, expected.values)):
        wanted = rows.flatten(0, 1)[positions]
        torch.testing.assert_close(seen[places, positions % 64], wanted, rtol=1e-3, atol=1e-3)


def kv_of(core):
    return core._runner._state.kv if core._runner.is_ahead else core._runner._kv
