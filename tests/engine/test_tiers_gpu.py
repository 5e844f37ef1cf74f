"""The tiers on a CUDA GPU: pinned memory, a stream beside the steps, layers that wait for their own blocks."""

import os
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from engine.cache.host_slab import create_file
from engine.checkpoint_dir import EMBEDDED_DIR
from engine.convert.convert import convert
from engine.embedded.skills import needles
from engine.embedded.skills.example import load_template
from engine.loading import load_engine
from tests.embedded.haystack import haystack
from tests.engine.runtime import drain, engine, finish, request, settings
from tests.engine.test_tiers import tiers_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

# no more than two of the prompts below fit the device; chunks of one size, because where a prompt is cut may move its
# numbers by rounding
SMALL = {
    **{"device": "cuda", "max_model_len": 4096, "kv_cache_tokens": 6144, "host_cache_bytes": 2**30},
    **{"prefill_chunk": 4096, "longest_gap_ms": 1e6},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("artifact") / "w4"
    convert(EMBEDDED_DIR, directory, "w4", device=torch.device("cuda"))
    return {"artifact": directory, "checkpoint": EMBEDDED_DIR}


@pytest.fixture(scope="module")
def prompts():
    return [Random(seed).choices(range(256), k=3000) for seed in range(5)]


@pytest.fixture(scope="module")
def questions():
    """Prompts whose answers no rounding changes: each hides a fact and asks for it."""
    tokenizer, render = Tokenizer.from_file(str(EMBEDDED_DIR / "tokenizer.json")), load_template()

    def encode(seed):
        messages = needles.needle(Random(seed), haystack(), 2900, 1, 1).messages[:-1]
        return tokenizer.encode(render(messages=messages, add_generation_prompt=True, enable_thinking=False)).ids

    return [encode(seed) for seed in range(5)]


def requests(prompts):
    return [request(f"r{i}", prompt, max_tokens=16, logprobs=2) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("model", ["artifact", "checkpoint"])
@pytest.mark.parametrize("codec", ["bf16", "int8-g64", "rk4v4-e8"])
def test_what_the_device_gave_up_comes_back_bit_for_bit(models, prompts, model, codec):
    core = engine(models[model], kv_codec=codec, **SMALL)
    first = [finish(core, each) for each in requests(prompts)]
    again = [finish(core, each) for each in requests(prompts)]
    assert [output.num_cached_tokens for output in again] == [2944] * len(prompts)
    assert core.stats().num_host_tokens >= 3 * 2944
    assert [output.token_ids for output in again] == [output.token_ids for output in first]
    assert [output.logprobs[0] for output in again] == [output.logprobs[0] for output in first]


def test_copies_run_beside_requests_that_write(models, questions):
    """Many at once in little memory: blocks are given up, written and brought back while others decode."""
    cold = engine(models["artifact"], **SMALL | {"host_cache_bytes": 0, "prefix_caching": False})
    expected = [finish(cold, each).token_ids for each in requests(questions)]
    assert len({tuple(tokens) for tokens in expected}) == len(questions)
    core = engine(models["artifact"], **SMALL)
    for _ in range(4):
        for each in requests(questions):
            core.add(each)
        outputs = drain(core)
        assert [outputs[f"r{i}"].token_ids for i in range(len(questions))] == expected
    assert core.stats().num_host_tokens > 0


def test_another_engine_finds_what_was_copied_from_the_device(models, prompts):
    file = create_file()
    config = settings(models["artifact"], **SMALL)
    first = load_engine(config, host_file=file)
    answers = [finish(first, each).token_ids for each in requests(prompts)]
    tiers_of(first).settle()
    assert torch.frombuffer(first._runner._copier._tiers._slab.memory, dtype=torch.uint8).is_pinned()
    second = load_engine(config, host_file=os.dup(file))
    outputs = [finish(second, each) for each in requests(prompts)]
    assert [output.token_ids for output in outputs] == answers
    assert [output.num_cached_tokens for output in outputs] == [2944] * len(prompts)
    assert second.stats().num_host_damaged == 0
    os.close(file)
