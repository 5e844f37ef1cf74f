"""What the device has given up comes back from host memory and disk, and changes nothing but time."""

import gc
import os
import random
import time
from dataclasses import replace
from threading import Event

import pytest

from engine.cache.disk_tier import DiskTier
from engine.cache.host_slab import create_file
from engine.loading import load_engine
from tests.engine.checkpoints import DENSE, MOE, Geometry, write_checkpoint
from tests.engine.runtime import Output, drain, engine, finish, generate, request, settings

GEOMETRY = Geometry(vocab_size=320)
# no more than one of the prompts below fits the device
SMALL = {"max_model_len": 512, "kv_cache_tokens": 512, "prefill_chunk": 128, "host_cache_bytes": 64 * 2**20}


@pytest.fixture(scope="module")
def checkpoint_dirs(tmp_path_factory):
    return {p: write_checkpoint(tmp_path_factory.mktemp(p), p, GEOMETRY) for p in (MOE, DENSE)}


@pytest.fixture(scope="module")
def texts():
    return [random.Random(seed).choices(range(GEOMETRY.vocab_size), k=400) for seed in range(8)]


@pytest.fixture
def host_file():
    file = create_file()
    yield file
    os.close(file)


def tiers_of(core):
    return core._scheduler._reuse._tiers


def prompts(texts, **sampling):
    return [request(f"r{i}", text, max_tokens=6, **sampling) for i, text in enumerate(texts)]


def expected(checkpoint_dir, texts):
    return generate(engine(checkpoint_dir, prefix_caching=False), *prompts(texts))


@pytest.mark.parametrize(
    "profile, is_ahead, codec", [(MOE, False, "bf16"), (DENSE, False, "rk4v4-e8"), (MOE, True, "int8-g64")]
)
def test_what_the_device_gave_up_comes_back(checkpoint_dirs, texts, profile, is_ahead, codec):
    cold = engine(checkpoint_dirs[profile], prefix_caching=False, kv_codec=codec, is_ahead=is_ahead)
    answers = generate(cold, *prompts(texts[:4]))
    core = engine(checkpoint_dirs[profile], is_ahead=is_ahead, kv_codec=codec, **SMALL)
    first = [finish(core, each) for each in prompts(texts[:4])]
    assert [output.num_cached_tokens for output in first] == [0] * 4
    again = [finish(core, each) for each in prompts(texts[:4])]
    assert [output.token_ids for output in first] == [output.token_ids for output in again] == answers
    assert [output.num_cached_tokens for output in again] == [384] * 4
    assert core.stats().num_host_tokens >= 3 * 384


def test_what_is_brought_back_is_bit_for_bit_what_was_kept(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[MOE], **SMALL)
    each = request("a", texts[0], max_tokens=8, logprobs=4)
    first = finish(core, each)
    finish(core, request("b", texts[1]))
    again = finish(core, each)
    assert core.stats().num_host_tokens == 384
    assert first.logprobs == again.logprobs


def test_equal_prompts_at_once_are_brought_back_once(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[MOE], **SMALL | {"kv_cache_tokens": 1024})
    finish(core, request("a", texts[0], max_tokens=1))
    for i in (1, 2, 3):
        finish(core, request(f"o{i}", texts[i], max_tokens=1))
    before = core.stats()
    answers = generate(core, *(request(f"r{i}", texts[0], max_tokens=6) for i in range(3)))
    assert answers[0] == answers[1] == answers[2]
    assert core.stats().num_host_tokens - before.num_host_tokens == 384
    assert core.stats().num_prompt_tokens - before.num_prompt_tokens == 3 * 16


def test_tenants_do_not_share_what_lies_outside(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[DENSE], **SMALL)
    salted = [replace(request(f"s{s}", texts[0], max_tokens=2), cache_salt=s) for s in ("x", "y")]
    assert finish(core, salted[0]).num_cached_tokens == 0
    finish(core, request("b", texts[1]))
    assert finish(core, salted[1]).num_cached_tokens == 0
    finish(core, request("c", texts[2]))
    assert [finish(core, each).num_cached_tokens for each in salted] == [384, 384]


def test_another_engine_goes_on_with_the_memory_of_a_dead_one(checkpoint_dirs, texts, host_file):
    cold = expected(checkpoint_dirs[MOE], texts[:3])
    config = settings(checkpoint_dirs[MOE], **SMALL)
    first = load_engine(config, host_file=host_file)
    assert generate(first, *prompts(texts[:3])) == cold
    tiers_of(first).settle()
    second = load_engine(config, host_file=os.dup(host_file))
    outputs = [finish(second, each) for each in prompts(texts[:3])]
    assert [output.num_cached_tokens for output in outputs] == [384] * 3
    assert [output.token_ids for output in outputs] == cold
    assert second.stats().num_host_damaged == 0


def test_what_a_dying_engine_spoiled_is_computed_again(checkpoint_dirs, texts, host_file):
    cold = expected(checkpoint_dirs[MOE], texts[:2])
    config = settings(checkpoint_dirs[MOE], **SMALL)
    first = load_engine(config, host_file=host_file)
    generate(first, *prompts(texts[:2]))
    tiers_of(first).settle()
    # the state at the end of the first prompt, and the third block of the second
    for text, is_state in ((texts[0], True), (texts[1], False)):
        path = first._scheduler._reuse._cache.begin("")
        hashes = first._scheduler._reuse._cache.address(path, text)
        index = tiers_of(first)._index
        entry = index.state(hashes[-1]) if is_state else index.block(hashes[2])
        tiers_of(first)._slab.parts(entry)[0][5] ^= 1
    second = load_engine(config, host_file=os.dup(host_file))
    outputs = [finish(second, each) for each in prompts(texts[:2])]
    assert [output.token_ids for output in outputs] == cold
    assert [output.num_cached_tokens for output in outputs] == [0, 0]
    assert second.stats().num_host_damaged == 2


def test_another_service_goes_on_with_what_lies_on_disk(checkpoint_dirs, texts, tmp_path):
    cold = expected(checkpoint_dirs[MOE], texts[:3])
    changes = SMALL | {"disk_cache_dir": str(tmp_path)}
    first = engine(checkpoint_dirs[MOE], **changes)
    assert generate(first, *prompts(texts[:3])) == cold
    tiers_of(first).settle()
    second = engine(checkpoint_dirs[MOE], **changes)
    outputs = [finish(second, each) for each in prompts(texts[:3])]
    assert [output.num_cached_tokens for output in outputs] == [384] * 3
    assert [output.token_ids for output in outputs] == cold
    assert second.stats().num_disk_tokens == second.stats().num_host_tokens == 3 * 384
    assert second.stats().disk_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.*"))
    # what answers were computed from is not asked of a service that reuses prompts alone
    third = engine(checkpoint_dirs[MOE], deterministic=True, **changes)
    assert finish(third, prompts(texts[:1])[0]).num_cached_tokens == 0


def test_a_damaged_file_costs_time_alone(checkpoint_dirs, texts, tmp_path):
    cold = expected(checkpoint_dirs[MOE], texts[:1])
    changes = SMALL | {"disk_cache_dir": str(tmp_path)}
    first = engine(checkpoint_dirs[MOE], **changes)
    generate(first, *prompts(texts[:1]))
    tiers_of(first).settle()
    hashes = first._scheduler._reuse._cache.address(first._scheduler._reuse._cache.begin(""), texts[0])
    (file,) = tmp_path.rglob(f"{hashes[4].hex()}.kv")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    second = engine(checkpoint_dirs[MOE], **changes)
    output = finish(second, prompts(texts[:1])[0])
    assert output.token_ids == cold[0]
    assert output.num_cached_tokens < 4 * 64
    assert second.stats().num_disk_damaged == 1
    # what was computed again is written again
    tiers_of(second).settle()
    assert len(file.read_bytes()) == len(whole)


def test_a_disk_that_does_not_answer_holds_nobody_up_for_long(checkpoint_dirs, texts, tmp_path, monkeypatch):
    changes = SMALL | {"disk_cache_dir": str(tmp_path)}
    first = engine(checkpoint_dirs[DENSE], **changes)
    answer = finish(first, request("a", texts[0])).token_ids
    tiers_of(first).settle()
    monkeypatch.setattr("engine.reuse.LONGEST_FETCH_S", 100.0)
    second = engine(checkpoint_dirs[DENSE], **changes | {"kv_cache_tokens": 1024})
    answers = Event()
    monkeypatch.setattr(DiskTier, "read", lambda *_: answers.wait(100) and False)
    second.add(request("a", texts[0]))
    # meanwhile others go on
    assert finish_beside(second, request("b", texts[1])).num_cached_tokens == 0
    (waiting,) = second._scheduler.running
    assert 50 < waiting.fetch_until_s - time.monotonic() <= 100
    waiting.fetch_until_s = time.monotonic()
    output = drain(second)["a"]
    answers.set()
    assert (output.num_cached_tokens, output.token_ids) == (0, answer)
    tiers_of(second).settle()
    second.check_integrity()


def finish_beside(core, each):
    core.add(each)
    output = Output()
    while output.finish_reason is None:
        for event in core.step():
            assert event.request_id == each.request_id
            output.add(event)
    return output


def test_an_aborted_prompt_is_kept_outside_too(checkpoint_dirs, texts):
    core = engine(checkpoint_dirs[MOE], **SMALL)
    core.add(request("a", texts[0], max_tokens=6))
    core.step()
    core.step()
    core.abort("a")
    while not core.is_idle:
        core.step()
    finish(core, request("b", texts[1]))
    assert finish(core, request("a", texts[0], max_tokens=6)).num_cached_tokens == 256
    assert core.stats().num_host_tokens == 256


def test_memory_that_nobody_lent_is_held_once(checkpoint_dirs):
    """By its map alone, which ends with the engine."""

    def count():
        return sum("longlane-host-cache" in os.readlink(f"/proc/self/fd/{name}") for name in fds())

    # of engines that other tests have left
    gc.collect()
    before = count()
    core = engine(checkpoint_dirs[DENSE], **SMALL)
    assert count() == before + 1
    tiers_of(core).close()


def fds():
    return [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]


def test_a_slab_too_small_for_a_prompt_is_gone_without(checkpoint_dirs, texts):
    cold = expected(checkpoint_dirs[MOE], texts[:3])
    probe = engine(checkpoint_dirs[MOE], **SMALL)
    geometry = tiers_of(probe)._slab.layout.geometry
    size = 2 * geometry.state_bytes + 4 * geometry.block_bytes
    small = engine(checkpoint_dirs[MOE], **SMALL | {"host_cache_bytes": size})
    for _ in range(2):
        assert [finish(small, each).token_ids for each in prompts(texts[:3])] == cold
    assert small.stats().num_tier_dropped > 0
    none = engine(checkpoint_dirs[MOE], **SMALL | {"host_cache_bytes": 1000})
    assert [finish(none, each).token_ids for each in prompts(texts[:3])] == cold
