"""What the device has given up comes back from host memory and disk, and changes nothing but time."""

import os
import random

import pytest

from engine.cache.host_slab import create_file
from engine.checkpoint_dir import EMBEDDED_DIR
from engine.loading import load_engine
from tests.engine.checkpoints import DENSE, MOE, Geometry, write_checkpoint
from tests.engine.runtime import engine, finish, generate, request, settings

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
    return core._scheduler._tiers


def prompts(texts, **sampling):
    return [request(f"r{i}", text, max_tokens=6, **sampling) for i, text in enumerate(texts)]


def expected(checkpoint_dir, texts):
    return generate(engine(checkpoint_dir, prefix_caching=False), *prompts(texts))


@pytest.mark.parametrize("profile, is_ahead", [(MOE, False), (DENSE, False), (MOE, True)])
@pytest.mark.parametrize("codec", ["bf16", "rk4v4-e8"])
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
