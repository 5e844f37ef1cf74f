"""Reuse may change speed and nothing else: every engine here is compared with one that computes all prompts again."""

import json
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from engine.checkpoint_dir import EMBEDDED_DIR
from tests.engine.checkpoints import DENSE, MOE, Geometry, write_checkpoint
from tests.engine.runtime import Output, drain, engine, finish, generate, request

GEOMETRY = Geometry(vocab_size=320)
EMBEDDED = "embedded"


@pytest.fixture(scope="module")
def checkpoint_dirs(tmp_path_factory):
    small = {p: write_checkpoint(tmp_path_factory.mktemp(p), p, GEOMETRY) for p in (MOE, DENSE)}
    return small | {EMBEDDED: EMBEDDED_DIR}


@pytest.fixture(scope="module")
def texts():
    """Prompts of a few hundred tokens that nobody shares, by checkpoint; real text where the checkpoint was trained."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_DIR / "tokenizer.json"))
    lines = (EMBEDDED_DIR.parent / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    ids = tokenizer.encode(" ".join(_words(json.loads(line)) for line in lines)).ids
    randoms = [random.Random(seed).choices(range(GEOMETRY.vocab_size), k=400) for seed in range(8)]
    return {EMBEDDED: [ids[i * 400 : (i + 1) * 400] for i in range(8)], MOE: randoms, DENSE: randoms}


def _words(value):
    """All text in a JSON value."""
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return " ".join(filter(None, map(_words, parts)))


def cold(directory, **changes):
    return engine(directory, prefix_caching=False, **changes)


class Conversation:
    """Turns that each bring back everything before them. The answers are the cold engine's, which others must give."""

    def __init__(self, core, name, text, lengths, **sampling):
        self.requests, self.answers = [], []
        history, given = [], iter(text)
        for turn, length in enumerate(lengths):
            history = history + [next(given) for _ in range(length)]
            each = request(f"{name}-{turn}", history, **sampling)
            answer = finish(core, each).token_ids
            self.requests.append(each)
            self.answers.append(answer)
            history = history + answer

    def least_reused(self, turn):
        """All but 63 tokens of the last turn's prompt and answer; the answer's last token was never computed."""
        if turn == 0:
            return 0
        return len(self.requests[turn - 1].prompt_token_ids) + len(self.answers[turn - 1]) - 1 - 63


@pytest.mark.parametrize("profile, num_drafts", [(MOE, 0), (MOE, 3), (DENSE, 3), (EMBEDDED, 3)])
def test_turns_of_a_conversation_are_warm_and_give_the_same_tokens(checkpoint_dirs, texts, profile, num_drafts):
    talk = Conversation(cold(checkpoint_dirs[profile]), "a", texts[profile][0], (150, 64, 33), max_tokens=40)
    warm = engine(checkpoint_dirs[profile], num_drafts=num_drafts, prefill_chunk=128)
    for turn, (each, answer) in enumerate(zip(talk.requests, talk.answers, strict=True)):
        output = finish(warm, each)
        assert output.token_ids == answer
        assert output.num_cached_tokens >= talk.least_reused(turn)
        # and once more, from the snapshot at its own prompt's end
        again = finish(warm, each)
        assert again.token_ids == answer
        assert again.num_cached_tokens == (len(each.prompt_token_ids) - 1) // 64 * 64


@pytest.mark.parametrize("profile", [MOE, EMBEDDED])
def test_five_conversations_interleaved_return_warm(checkpoint_dirs, texts, profile):
    reference = cold(checkpoint_dirs[profile])
    sampling = [{}, {}, {"temperature": 1.0, "seed": 3}, {}, {"frequency_penalty": 0.5, "presence_penalty": 0.5}]
    talks = [
        Conversation(reference, f"t{i}", texts[profile][i], (130 + 17 * i, 60), max_tokens=24, **sampling[i])
        for i in range(5)
    ]
    warm = engine(checkpoint_dirs[profile], prefill_chunk=64, kv_cache_tokens=4096)
    for turn in range(2):
        outputs: dict[str, Output] = {}
        for talk in talks:
            warm.add(talk.requests[turn])
            for event in warm.step():
                outputs.setdefault(event.request_id, Output()).add(event)
        drain(warm, outputs)
        for talk in talks:
            output = outputs[talk.requests[turn].request_id]
            assert output.token_ids == talk.answers[turn]
            assert output.num_cached_tokens >= talk.least_reused(turn)


def test_equal_prompts_at_once_share_one_prefill(checkpoint_dirs, texts):
    """The others wait for its blocks; when it is aborted on the way, one of them goes on from there."""
    text = texts[MOE][0][:330]
    expected = finish(cold(checkpoint_dirs[MOE]), request("a", text, max_tokens=12)).token_ids
    core = engine(checkpoint_dirs[MOE], prefill_chunk=64)
    names = ("first", "second", "third")
    for name in names:
        core.add(request(name, text, max_tokens=12))
    core.step()
    core.step()
    core.abort("first")
    outputs = drain(core)
    assert outputs["first"].finish_reason == "abort"
    assert [outputs[name].token_ids for name in names[1:]] == [expected] * 2
    # the whole prompt once, and of the third what no state stands after
    assert core.stats().num_prompt_tokens == 330 + 10


def test_another_conversation_begins_where_system_and_tools_end(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[MOE])
    system, user, other = texts[MOE][0][:150], texts[MOE][1][:90], texts[MOE][2][:90]
    expected = finish(cold(checkpoint_dirs[MOE]), request("a", system + other, max_tokens=8)).token_ids
    finish(core, replace(request("first", system + user, max_tokens=1), marks=(150, 240)))
    output = finish(core, replace(request("second", system + other, max_tokens=8), marks=(150, 240)))
    assert (output.num_cached_tokens, output.token_ids) == (128, expected)


def test_deterministic_reuses_prompts_alone(checkpoint_dirs, texts):
    talk = Conversation(cold(checkpoint_dirs[MOE]), "a", texts[MOE][0], (150, 64), max_tokens=80)
    warm = engine(checkpoint_dirs[MOE], deterministic=True)
    outputs = [finish(warm, each) for each in talk.requests]
    assert [output.token_ids for output in outputs] == talk.answers
    prompts = [len(each.prompt_token_ids) // 64 * 64 for each in talk.requests]
    assert [output.num_cached_tokens for output in outputs] == [0, *prompts[:-1]]


def test_states_made_by_prefill_are_restored_bit_for_bit(checkpoint_dirs, texts):
    """The same rows are cut into the same chunks, so every logprob is equal, not only near."""
    core = engine(checkpoint_dirs[MOE], prefill_chunk=64)
    each = request("a", texts[MOE][0][:300], logprobs=4, max_tokens=8)
    first, second = finish(core, each), finish(core, each)
    assert second.num_cached_tokens == 256
    assert first.logprobs == second.logprobs


def test_a_state_that_stands_in_the_middle_of_accepted_drafts_leaves_the_answer_alone(checkpoint_dirs, texts):
    """Where a block ends, some accepted rows are folded for the snapshot and the others stay pending."""
    each = request("a", texts[EMBEDDED][1][:150], max_tokens=120, logprobs=0)
    expected, mine = (finish(engine(EMBEDDED_DIR, prefix_caching=on), each) for on in (False, True))
    assert mine.token_ids == expected.token_ids
    for a, b in zip(mine.logprobs, expected.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_mtp_sees_what_it_would_see_without_reuse(checkpoint_dirs, texts):
    """Two prompts part after 128 tokens: MTP's row of token 127 depends on what follows, and is the second one's."""
    common, (first, second) = texts[MOE][0][:128], (texts[MOE][1][:60], texts[MOE][2][:60])
    warm, reference = engine(checkpoint_dirs[MOE]), cold(checkpoint_dirs[MOE])
    finish(warm, request("first", common + first, max_tokens=1))
    # a state stands where the two part only once somebody has parted there
    finish(warm, request("parting", common + texts[MOE][3][:60], max_tokens=1))
    rows = []
    for core in (warm, reference):
        core.add(request("second", common + second, max_tokens=40))
        core.step()
        (state,) = core._scheduler.running
        while state.is_prefilling:
            core.step()
        layer = core._runner._kv.layers[-1]
        rows.append([x[torch.tensor(state.block_ids)].flatten(0, 1)[:188] for x in (layer.keys, layer.values)])
        assert state.num_cached_tokens == (128 if core is warm else 0)
        drain(core)
    for mine, expected in zip(*rows, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_tenants_do_not_share(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[DENSE])
    each = request("a", texts[DENSE][0], max_tokens=4)
    salted = [type(each)("s", each.prompt_token_ids, each.sampling, cache_salt=salt) for salt in ("x", "y", "x")]
    outputs = [finish(core, one) for one in (each, *salted)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 384]
    assert len({tuple(output.token_ids) for output in outputs}) == 1


def test_an_aborted_prefill_is_resumed_by_the_retry(checkpoint_dirs, texts):
    each = request("a", texts[MOE][0], max_tokens=12)
    (expected,) = generate(cold(checkpoint_dirs[MOE]), each)
    core = engine(checkpoint_dirs[MOE], prefill_chunk=64)
    for attempt in range(1, 4):
        core.add(each)
        core.step()
        core.abort("a")
        core.step()
        core.check_integrity()
        assert core.stats().num_prompt_tokens == attempt * 64
    output = finish(core, each)
    assert output.num_cached_tokens == 192
    assert output.token_ids == expected


def test_an_aborted_answer_is_reused(checkpoint_dirs, texts):
    text = texts[MOE][0][:100]
    (answer,) = generate(cold(checkpoint_dirs[MOE]), request("a", text, max_tokens=130))
    core = engine(checkpoint_dirs[MOE])
    core.add(request("a", text, max_tokens=150))
    num_tokens = 0
    while num_tokens < 100:
        num_tokens += sum(len(event.token_ids) for event in core.step())
    core.abort("a")
    core.step()
    output = finish(core, request("b", text + answer[:100], max_tokens=30))
    assert output.num_cached_tokens == 192
    assert output.token_ids == answer[100:130]


def test_equal_prompts_at_once_share_what_was_computed_before_they_begin(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[MOE], prefill_chunk=64)
    for index in range(3):
        core.add(request(f"r{index}", texts[MOE][0], max_tokens=20))
    outputs = list(drain(core).values())
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert [output.num_cached_tokens for output in outputs][1:] == [384, 384]


@pytest.mark.parametrize("profile", [MOE, DENSE])
def test_eviction_under_a_tiny_budget_changes_nothing(checkpoint_dirs, texts, profile):
    """Prompts that share beginnings of random length, in a cache of which they need several times as much."""
    rng = random.Random(5)
    reference = cold(checkpoint_dirs[profile], max_model_len=448)
    small = engine(
        checkpoint_dirs[profile],
        max_model_len=448,
        kv_cache_tokens=512,
        max_num_requests=3,
        prefill_chunk=64,
        snapshot_bytes=3 * snapshot_bytes(reference),
    )
    for round_index in range(7):
        requests = [
            request(f"{round_index}-{i}", _branch(texts[profile], rng), max_tokens=rng.randint(1, 30))
            for i in range(rng.randint(1, 3))
        ]
        assert generate(small, *requests) == generate(reference, *requests)
    stats = small.stats()
    assert stats.num_snapshots <= 3
    assert stats.num_cached_tokens > 0 and stats.num_evicted_blocks > 0 and stats.num_evicted_snapshots > 0


def _branch(prompts, rng):
    common = rng.choice(prompts[:2])[: rng.randint(100, 250)]
    return common + rng.choice(prompts)[: rng.randint(1, 100)]


def snapshot_bytes(core):
    from engine.cache.state_cache import StateSnapshots

    return StateSnapshots(core._runner._model.config, 1, torch.device("meta"), torch.float32).num_bytes


def test_what_was_reused_is_logged_without_the_text(checkpoint_dirs, texts, caplog):
    caplog.set_level("INFO", "longlane.engine.reuse")
    core = engine(checkpoint_dirs[DENSE])
    text = texts[DENSE][0][:200]
    finish(core, request("first", text, max_tokens=1))
    finish(core, request("second", [*text[:150], 319 - text[150], *text[151:]], max_tokens=1))
    lines = [record.getMessage() for record in caplog.records if record.name == "longlane.engine.reuse"]
    assert lines == [
        "request first: 0 of 200 prompt tokens reused; first divergent position 0: nothing is cached beyond",
        "request second: 0 of 200 prompt tokens reused; first divergent position 150: "
        "blocks are cached up to 128, but no state stands there",
    ]


def test_switched_off(checkpoint_dirs, texts):
    core = cold(checkpoint_dirs[DENSE])
    outputs = [finish(core, request("a", texts[DENSE][0], max_tokens=2)) for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert core.stats().num_cached_blocks == core.stats().num_snapshots == 0
