import json

import pytest

from config import Alias, Upstream
from config.keys import digest, generate
from router.errors import ModelNotFoundError
from router.lane import Candidate, Wish, choose
from router.models import list_models
from router.names import matches, resolve
from router.usage import ask_for_model
from router.worker import Health, Worker

CHAT = "/v1/chat/completions"
ENGINE = Candidate("engine", "long", {"qwen": 262_144, "coder": 100_000})
VLLM = Candidate("vllm", "short", {"qwen": 32_768, "small": 4096})
ALIASES = (Alias(name="gpt-4", model="qwen"), Alias(name="gpt-*", model="small"), Alias(name="best", model="auto"))


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("qwen", "qwen", True),
        ("qwen", "qwen2", False),
        ("*", "anything/at:all\n", True),
        ("claude-*", "claude-opus", True),
        ("claude-*", "xclaude-opus", False),
        ("a*c", "abbbc", True),
        ("a.c", "abc", False),
        ("[a]*", "[a]b", True),
        ("*", "x" * 257, False),
    ],
)
def test_patterns(pattern, name, is_match):
    assert matches(pattern, name) is is_match


def test_exact_alias_goes_before_a_served_name_and_that_before_a_pattern():
    served = {"gpt-4", "gpt-oss", "qwen"}
    assert [resolve(name, ALIASES, served) for name in ("gpt-4", "gpt-oss", "gpt-5", "qwen", "other")] == [
        "qwen",
        "gpt-oss",
        "small",
        "qwen",
        "other",
    ]


def decide(model, prompt_tokens=10, candidates=(ENGINE, VLLM), **wish):
    return choose(Wish(model=model, prompt_tokens=prompt_tokens, **wish), candidates, 8192)


def test_alias_tells_each_upstream_the_model_by_its_own_name():
    decision = decide("gpt-4", target="qwen")
    assert (decision.workers, decision.spares) == (("vllm",), ("engine",))
    assert decision.models == {"vllm": "qwen", "engine": "qwen"}
    assert decide("qwen").models == {}


def test_key_may_name_the_alias_or_the_model():
    for allowed in (("gpt-4",), ("qwen",), ("q*",)):
        assert decide("gpt-4", target="qwen", models=allowed).workers == ("vllm",)
    with pytest.raises(ModelNotFoundError):
        decide("gpt-4", target="qwen", models=("small",))


def test_auto_takes_the_roomiest_model_of_each_upstream_that_the_key_may_use():
    assert decide("auto", auto_models=("*",)).models == {"vllm": "qwen", "engine": "qwen"}
    assert decide("auto", auto_models=("small", "coder")).models == {"vllm": "small", "engine": "coder"}
    decision = decide("auto", 5000, auto_models=("small", "coder"))
    assert (decision.lane, decision.reason, decision.models) == ("long", "limit", {"engine": "coder"})
    assert decide("auto", auto_models=("*",), models=("small",)).models == {"vllm": "small"}
    assert decide("auto", auto_models=("*",), models=("auto",)).models == {"vllm": "qwen", "engine": "qwen"}
    for wish in ({}, {"auto_models": ("none",)}, {"auto_models": ("*",), "models": ("none",)}):
        with pytest.raises(ModelNotFoundError):
            decide("auto", **wish)


def test_upstream_with_patterns_serves_what_fits_them():
    other = Candidate("other", "short", {"openai/*": None})
    assert decide("openai/x", candidates=(ENGINE, other)).workers == ("other",)
    with pytest.raises(ModelNotFoundError):
        decide("x", candidates=(ENGINE, other))
    # a pattern is no model that `auto` could stand for
    assert decide("auto", auto_models=("*",), candidates=(ENGINE, other)).models == {"engine": "qwen"}


def worker(name, lane="short", cards=None, **fields):
    cards = {model: {"id": model, "max_model_len": limit} for model, limit in (cards or {}).items()}
    return Worker(Upstream(name=name, url="http://x", lane=lane, **fields), Health(True), cards=cards)


def test_limit_of_an_upstream_lowers_its_models():
    one = worker("v", cards={"m": 4096}, max_model_len=1000)
    assert one.candidate().models == {"m": 1000}
    one.cards["m"]["context_length"] = 4096
    assert one.listed() == [{"id": "m", "max_model_len": 1000, "context_length": 1000}]
    assert worker("v", cards={"m": 4096}, max_model_len=9000).candidate().models == {"m": 4096}
    assert worker("v", models=("x*",), cards={"m": 1, "xm": 2}).candidate().models == {"xm": 2, "x*": None}


def test_list_names_aliases_and_auto_with_the_limit_of_the_path():
    workers = [worker("e", "long", {"qwen": 262_144}), worker("v", "short", {"qwen": 32_768, "small": 4096})]

    def limits(lane=None, lanes=("long", "short"), models=()):
        cards = list_models(workers, lane, lanes, models, ALIASES, ("*",))
        return {card["id"]: card["max_model_len"] for card in cards}

    assert limits() == {"qwen": 262_144, "small": 4096, "gpt-4": 262_144, "best": 262_144, "auto": 262_144}
    assert limits("short") == {"qwen": 32_768, "small": 4096, "gpt-4": 32_768, "best": 32_768, "auto": 32_768}
    assert limits(lanes=("short",))["auto"] == 32_768
    assert limits(models=("small",)) == {"small": 4096, "auto": 4096}
    assert limits(models=("gpt-4",)) == {"gpt-4": 262_144}


def test_body_keeps_everything_but_the_name():
    body = b'{"model":"gpt-4","messages":[{"role":"user","content":"model"}]}'
    edited = ask_for_model(body, 'q"wen')
    assert json.loads(edited) == json.loads(body) | {"model": 'q"wen'}
    assert edited.startswith(body[:-1])


def test_alias_reaches_the_upstream_as_its_own_model(gateway, upstream, client):
    long = upstream(models={"qwen": 4096})
    url = gateway(long=long, aliases=ALIASES, auto_models=("*",)).url
    for name in ("gpt-4", "auto", "best"):
        assert client.post(url + CHAT, json={"model": name, "messages": []}).status_code == 200
        assert long.requests[-1].json["model"] == "qwen"
    told = client.post(url + "/explain" + CHAT, json={"model": "best", "messages": []}).json()
    assert told["models"] == {"engine": "qwen"}
    assert client.get(url + "/v1/models/gpt-4").json()["max_model_len"] == 4096
    assert client.post(url + CHAT, json={"model": "gpt-5", "messages": []}).status_code == 404


@pytest.mark.parametrize(
    "body", [b'{"model":"tiny","mod\\u0065l":"big"}', b'{"model":"tiny","model":"big"}', b'{"mod\\u0065l":"big"}']
)
def test_model_named_twice_or_in_escapes_is_the_one_that_upstreams_see(gateway, upstream, client, tmp_path, body):
    secret = generate()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest(secret)}"\nmodels = ["tiny"]')
    long = upstream(models={"tiny": 4096, "big": 4096})
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    response = client.post(gateway(long=long, keys_file=path).url + CHAT, content=body, headers=headers)
    assert (response.status_code, long.requests) == (404, [])
