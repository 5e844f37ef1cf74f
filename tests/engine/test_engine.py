import random

import pytest
import torch

from engine.batch import BlockTables, RequestRows, build_batch
from engine.cache.kv_cache import KVCache
from engine.cache.state_cache import StateCache
from engine.errors import QueueFullError
from engine.models.weights import load_model
from tests.engine.checkpoints import DENSE, MOE, Geometry, write_checkpoint
from tests.engine.runtime import Output, drain, engine, generate, request

GEOMETRY = Geometry(vocab_size=320)


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, GEOMETRY)


@pytest.fixture(scope="module")
def core(checkpoint_dir):
    return engine(checkpoint_dir, prefill_chunk=64, kv_cache_tokens=8192, max_num_requests=6)


def prompt(seed, length):
    return random.Random(seed).choices(range(GEOMETRY.vocab_size), k=length)


def mixed_requests():
    """Five requests of different lengths, all greedy or seeded."""
    return [
        request("a", prompt(1, 1), max_tokens=30),
        request("b", prompt(2, 200), max_tokens=20, temperature=1.0, seed=5),
        request("c", prompt(3, 64), max_tokens=25, temperature=0.8, top_p=0.9, seed=6),
        request("d", prompt(4, 65), max_tokens=12, presence_penalty=0.7, repetition_penalty=1.3),
        request("e", prompt(5, 130), max_tokens=40, temperature=1.2, top_k=20, seed=-1, frequency_penalty=0.5),
    ]


def teacher_forced_logits(checkpoint_dir, token_ids):
    """Logits at every position of a text, in one pass, without the engine."""
    model = load_model(checkpoint_dir, torch.device("cpu"), torch.float32)
    tables = BlockTables(1, 8, torch.device("cpu"))
    tables.extend(0, range(8))
    kv = KVCache(model.config, 8, torch.device("cpu"), torch.float32)
    states = StateCache(model.config, 1, torch.device("cpu"))
    batch = build_batch([RequestRows(0, 0, token_ids)], tables, commits=True)
    return model.compute_logits(model.forward(batch, kv, states))


def test_interleaved_requests_equal_requests_alone(core):
    alone = [generate(core, each)[0] for each in mixed_requests()]
    assert generate(core, *mixed_requests()) == alone
    assert [len(tokens) for tokens in alone] == [30, 20, 25, 12, 40]


def test_interleaved_dense_requests_equal_requests_alone(tmp_path):
    dense = engine(write_checkpoint(tmp_path, DENSE, GEOMETRY), prefill_chunk=64, kv_cache_tokens=8192)
    requests = mixed_requests()[1:4]
    assert generate(dense, *requests) == [generate(dense, each)[0] for each in requests]


def test_requests_that_arrive_one_by_one_equal_requests_alone(core):
    alone = [generate(core, each)[0] for each in mixed_requests()]
    outputs: dict[str, Output] = {}
    for each in mixed_requests():
        core.add(each)
        for _ in range(3):
            for event in core.step():
                outputs.setdefault(event.request_id, Output()).add(event)
    drain(core, outputs)
    assert [outputs[each.request_id].token_ids for each in mixed_requests()] == alone


def test_greedy_tokens_are_the_argmax_of_one_pass_over_the_whole_text(core, checkpoint_dir):
    text = prompt(7, 100)
    (tokens,) = generate(core, request("a", text, max_tokens=32))
    logits = teacher_forced_logits(checkpoint_dir, text + tokens)
    assert logits[len(text) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("prefill_chunk", [64, 128, 512])
def test_chunk_size_changes_nothing(core, checkpoint_dir, prefill_chunk):
    other = engine(checkpoint_dir, prefill_chunk=prefill_chunk)
    text = prompt(8, 300)
    assert generate(other, request("a", text)) == generate(core, request("a", text))


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(core):
    def sampled(seed):
        return generate(core, request("a", prompt(1, 20), temperature=1.0, max_tokens=24, seed=seed))[0]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(None) != sampled(None)


def test_stop_token_ends_the_output_and_is_not_part_of_it(core):
    text = prompt(9, 40)
    (tokens,) = generate(core, request("a", text, max_tokens=24))
    stop = tokens[10]
    core.add(request("a", text, max_tokens=24, stop_token_ids=(stop,)))
    output = drain(core)["a"]
    assert output.token_ids == tokens[: tokens.index(stop)]
    assert output.finish_reason == "stop"


def test_min_tokens_puts_off_the_stop(core):
    text = prompt(9, 40)
    (tokens,) = generate(core, request("a", text, max_tokens=24))
    first, stop = next((i, token) for i, token in enumerate(tokens) if tokens.index(token) == i > 1)
    core.add(request("a", text, max_tokens=24, stop_token_ids=(stop,), min_tokens=8))
    output = drain(core)["a"]
    assert output.token_ids[:first] == tokens[:first]
    assert stop not in output.token_ids[:8]
    assert len(output.token_ids) >= 8


def test_logprobs_are_those_of_the_model(core, checkpoint_dir):
    text = prompt(10, 30)
    core.add(request("a", text, max_tokens=12, temperature=1.0, seed=3, logprobs=4, top_k=50))
    output = drain(core)["a"]
    expected = teacher_forced_logits(checkpoint_dir, text + output.token_ids)[len(text) - 1 : -1].log_softmax(-1)
    assert len(output.logprobs) == 12
    for row, token_id, logprob in zip(expected, output.token_ids, output.logprobs, strict=True):
        assert logprob.logprob == pytest.approx(row[token_id].item(), abs=1e-4)
        assert [i for i, _ in logprob.top] == row.topk(4).indices.tolist()


def test_decoding_goes_on_while_a_long_prompt_is_read(core):
    core.add(request("short", prompt(1, 10), max_tokens=100))
    core.step()
    core.add(request("long", prompt(12, 640), max_tokens=4))
    for _ in range(9):
        assert {event.request_id for event in core.step()} == {"short"}
    assert {event.request_id for event in core.step()} == {"short", "long"}
    drain(core)


def test_abort_frees_everything_within_one_step(core):
    core.add(request("reading", prompt(1, 640), max_tokens=50))
    core.add(request("writing", prompt(2, 10), max_tokens=500))
    for index in range(8):
        core.add(request(f"waiting{index}", prompt(3, 10), max_tokens=500))
    for _ in range(12):
        core.step()
    for name in ("reading", "writing", *(f"waiting{index}" for index in range(8))):
        core.abort(name)
    events = core.step()
    assert {(event.request_id, event.finish_reason) for event in events} == {
        (name, "abort") for name in ("reading", "writing", *(f"waiting{index}" for index in range(8)))
    }
    assert core.is_idle
    core.check_integrity()
    assert core.stats().num_free_kv_blocks == core.stats().num_kv_blocks


def test_a_slot_remembers_nothing_of_its_last_request(core):
    """Blocks and slots are used again right after an abort in the middle of a round."""
    expected = generate(core, request("a", prompt(4, 90), max_tokens=12))
    for index in range(3):
        core.add(request("other", prompt(index, 150), max_tokens=60, temperature=1.0, presence_penalty=1.0))
        for _ in range(6):
            core.step()
        core.abort("other")
        assert generate(core, request("a", prompt(4, 90), max_tokens=12)) == expected


def test_random_submits_and_aborts_leave_nothing(core):
    rng = random.Random(11)
    live: set[str] = set()
    for index in range(120):
        if rng.random() < 0.5:
            each = request(f"r{index}", prompt(index, rng.randint(1, 200)), max_tokens=rng.randint(1, 12))
            core.add(each)
            live.add(each.request_id)
        if live and rng.random() < 0.3:
            core.abort(rng.choice(sorted(live)))
        live -= {event.request_id for event in core.step() if event.finish_reason is not None}
        core.check_integrity()
    drain(core)


def test_full_queue_is_refused(checkpoint_dir):
    small = engine(checkpoint_dir, max_num_requests=1, max_queued_requests=1)
    small.add(request("a", prompt(1, 5)))
    small.add(request("b", prompt(1, 5)))
    with pytest.raises(QueueFullError):
        small.add(request("c", prompt(1, 5)))
    assert sorted(drain(small)) == ["a", "b"]


def test_a_request_may_fill_the_whole_context(checkpoint_dir):
    small = engine(checkpoint_dir, max_model_len=130, kv_cache_tokens=130)
    (tokens,) = generate(small, request("a", prompt(1, 66), max_tokens=64))
    assert len(tokens) == 64
