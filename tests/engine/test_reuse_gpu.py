"""Answers that were decoded through graphs, one pass ahead of the host, and come back with the next turn."""

from random import Random

import pytest
import torch

from engine.checkpoint_dir import EMBEDDED_DIR
from engine.convert.convert import convert
from tests.engine.runtime import drain, engine, finish, request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

SIZES = {"device": "cuda", "max_model_len": 2048, "kv_cache_tokens": 16384}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("artifact") / "w4"
    convert(EMBEDDED_DIR, directory, "w4", device=torch.device("cuda"))
    return directory


def text(seed, length):
    return Random(seed).choices(range(256), k=length)


def turns(core, count=4, length=100, **sampling):
    """Turns of a conversation, each behind all before it: answers, and tokens that were reused."""
    history, answers, reused = text(0, 150), [], []
    for turn in range(count):
        output = finish(core, request(f"turn{turn}", history, max_tokens=length, **sampling))
        answers.append(output.token_ids)
        reused.append(output.num_cached_tokens)
        history = history + output.token_ids + text(turn + 1, 20)
    return answers, reused


@pytest.mark.parametrize("codec", ["bf16", "int8-g64", "rk4v4-e8"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_graphs_leave_the_states_that_single_launches_leave(artifact, num_drafts, codec):
    changes = SIZES | {"num_drafts": num_drafts, "kv_codec": codec}
    with_graphs, without = (turns(engine(artifact, cuda_graphs=on, **changes)) for on in (True, False))
    assert with_graphs == without
    # all but the last blocks of each turn's prompt and answer, whose last token's row was never computed
    assert with_graphs[1] == [0, *((150 + 120 * turn + 99) // 64 * 64 for turn in range(3))]


def test_states_of_answers_beside_others(artifact):
    """Eight requests decode in one graph; each finds its own answer again."""
    core = engine(artifact, num_drafts=0, **SIZES)
    prompts = [text(seed, 100 + 7 * seed) for seed in range(8)]
    for index, prompt in enumerate(prompts):
        core.add(request(f"first{index}", prompt, max_tokens=100))
    answers = [output.token_ids for output in drain(core).values()]
    alone = engine(artifact, num_drafts=0, **SIZES)
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        follow = request(f"second{index}", prompt + answer + [5, 6, 7], max_tokens=20)
        expected = finish(alone, request(f"first{index}", prompt, max_tokens=100)).token_ids
        assert answer == expected
        mine, other = finish(core, follow), finish(alone, follow)
        assert mine.num_cached_tokens == other.num_cached_tokens == (len(prompt) + 99) // 64 * 64
        assert mine.token_ids == other.token_ids


def test_warm_is_near_cold_and_with_determinism_the_same(artifact):
    """What an answer left differs by the rounding of its products' inputs from the same tokens as a prompt."""
    warm, cold, exact = (
        engine(artifact, num_drafts=0, **SIZES, **changes)
        for changes in ({}, {"prefix_caching": False}, {"deterministic": True})
    )
    (answer, *_), _ = turns(warm, count=1)
    finish(exact, request("turn", text(0, 150), max_tokens=100))
    follow = request("follow", text(0, 150) + answer + text(1, 20), max_tokens=1, logprobs=5)
    outputs = [finish(core, follow) for core in (warm, cold, exact)]
    assert [output.num_cached_tokens for output in outputs] == [192, 0, 128]
    mine, theirs, same = (output.logprobs[0] for output in outputs)
    assert abs(dict(theirs.top)[theirs.top[0][0]] - dict(mine.top).get(theirs.top[0][0], float("-inf"))) < 0.5
    assert same == theirs
