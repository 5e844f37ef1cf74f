"""The server over the real engine and the checkpoint that comes with the project."""

import pytest

from config import EngineConfig
from engine import EngineClient
from tests.server.conftest import ROOT
from tests.server.live import NAME, running
from tests.server.test_chat import ask, joined, message_of
from tests.server.test_streams import connect, is_idle, reset

EMBEDDED = ROOT / "engine" / "embedded" / "checkpoint"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    if not (EMBEDDED / "config.json").exists():
        pytest.skip(f"no checkpoint at {EMBEDDED}")
    engine = EngineClient(EngineConfig(model=str(EMBEDDED), device="cpu", max_model_len=2048, num_threads=1))
    with running(EMBEDDED, [{"output": "unused"}], tmp_path_factory.mktemp("local"), engine=engine) as live:
        yield live


def test_a_stream_joins_to_the_whole_answer(local):
    fields = {"temperature": 0, "max_tokens": 24}
    whole = local.post(ask("Tell me about the sea.", **fields)).json()
    made = joined(local.stream(ask("Tell me about the sea.", **fields)))[0]
    expected = message_of(whole["choices"][0])
    assert (made["content"], made["reasoning"], made["finishes"]) == (
        expected["content"],
        expected["reasoning"],
        [expected["finish"]],
    )
    assert 0 < whole["usage"]["completion_tokens"] <= 24


def test_logprobs_of_the_engine(local):
    answer = local.post(ask("Hello", logprobs=True, top_logprobs=3, max_tokens=4, temperature=0)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)


def test_a_client_that_leaves_stops_the_engine(local):
    client = connect(local, ask("Count", stream=True, ignore_eos=True, max_tokens=1900))
    local.wait_until(lambda: local.engine.stats.num_running == 1)
    reset(client)
    local.wait_until(lambda: is_idle(local), 3.0)
    assert local.post(ask("hi", max_tokens=2)).status_code == 200


def test_limits_are_those_of_the_engine(local):
    card = local.http.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == (NAME, 2048)
    answer = local.post(ask("word " * 4000))
    assert answer.json()["error"]["code"] == "context_length_exceeded"
