import pytest

from router.errors import ForbiddenError, ModelNotFoundError
from router.lane import Candidate, LaneMemory, TokenRatio, Wish, choose

LONG = 8192
ENGINE = Candidate("engine", "long", {"qwen": 262_144})
VLLM = Candidate("vllm", "short", {"qwen": 32_768, "small": 4096})


def decide(prompt_tokens=10, model="qwen", candidates=(ENGINE, VLLM), **wish):
    return choose(Wish(model=model, prompt_tokens=prompt_tokens, **wish), candidates, LONG)


@pytest.mark.parametrize(
    ("wish", "lane", "reason", "workers", "spares"),
    [
        ({"lane": "long"}, "long", "path", ("engine",), ()),
        ({"lane": "short", "prompt_tokens": 20_000}, "short", "path", ("vllm",), ()),
        ({"model": "small", "prompt_tokens": 100}, "short", "model", ("vllm",), ()),
        ({"prompt_tokens": LONG}, "long", "length", ("engine",), ("vllm",)),
        ({"prompt_tokens": LONG - 1}, "short", "length", ("vllm",), ("engine",)),
        ({"prompt_tokens": 40_000}, "long", "limit", ("engine",), ()),
        ({"prompt_tokens": LONG - 1, "last_lane": "long"}, "long", "conversation", ("engine",), ("vllm",)),
        ({"prompt_tokens": LONG // 2 - 1, "last_lane": "long"}, "short", "length", ("vllm",), ("engine",)),
        ({"prompt_tokens": LONG, "last_lane": "short"}, "long", "length", ("engine",), ("vllm",)),
        ({"prompt_tokens": 20_000, "lanes": ("short",)}, "short", "key", ("vllm",), ()),
        ({"model": None}, "short", "length", ("vllm",), ("engine",)),
        ({"prompt_tokens": 300_000}, "long", "limit", ("engine",), ()),
    ],
)
def test_rule(wish, lane, reason, workers, spares):
    decision = decide(**wish)
    assert (decision.lane, decision.reason, decision.workers, decision.spares) == (lane, reason, workers, spares)


def test_lane_without_upstream_falls_back():
    decision = decide(candidates=(ENGINE,))
    assert (decision.lane, decision.workers, decision.spares, decision.is_fallback) == ("short", ("engine",), (), True)
    assert not decide(candidates=(ENGINE, VLLM)).is_fallback


def test_unknown_model_lists_what_the_caller_may_use():
    with pytest.raises(ModelNotFoundError, match=r"'gpt'.*qwen, small"):
        decide(model="gpt")
    with pytest.raises(ModelNotFoundError, match=r"'small'.*: qwen$"):
        decide(model="small", lane="long")
    with pytest.raises(ModelNotFoundError, match=r"'small'.*: qwen$"):
        decide(model="small", models=("qwen",))


def test_model_of_an_upstream_never_reached_is_not_called_unknown():
    unreached = Candidate("engine", "long", None)
    assert decide(model="qwen", candidates=(unreached,)).workers == ("engine",)
    assert decide(model="small", candidates=(unreached, VLLM)).workers == ("vllm",)


def test_key_without_the_lane_of_the_path():
    with pytest.raises(ForbiddenError, match="may not use the long lane"):
        decide(lane="long", lanes=("short",))


def test_memory_forgets_the_least_recently_used():
    memory = LaneMemory(capacity=2)
    for conversation in ("a", "b", "a", "c"):
        memory.remember(conversation, "long")
    assert [memory.recall(one) for one in "abc"] == ["long", None, "long"]
    memory.remember(None, "long")
    assert len(memory) == 2
    assert memory.recall(None) is None


def test_ratio_moves_towards_what_upstreams_report():
    ratio = TokenRatio()
    before = ratio.estimate(10_000, "m")
    for _ in range(100):
        ratio.learn(10_000, "m", 10_000)
    assert before < 3_000
    assert ratio.estimate(10_000, "m") == pytest.approx(10_000, rel=0.01)
    assert ratio.estimate(10_000, "other") == before
    ratio.learn(100, "n", 1)
    ratio.learn(10_000, "n", None)
    assert "n" not in ratio.bytes_per_token
