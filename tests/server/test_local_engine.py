"""The server over the real engine and the checkpoint that comes with the project."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry

from config import EngineConfig
from engine import EngineClient, Request, SamplingError, SamplingParams
from server.generation import Generation
from server.metrics import ServerMetrics
from tests.server.conftest import ROOT
from tests.server.live import NAME, running
from tests.server.test_chat import ask, joined, message_of
from tests.server.test_streams import connect, is_idle, reset

EMBEDDED = ROOT / "engine" / "embedded" / "checkpoint"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
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


def test_a_server_whose_engine_cannot_start_again_ends(tmp_path):
    directory = tmp_path / "checkpoint"
    shutil.copytree(EMBEDDED, directory)
    flags = ["--port", "0", "--model", str(directory), "--device", "cpu", "--max-model-len", "512"]
    process = subprocess.Popen(
        [sys.executable, "-m", "server", *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert "serving" in process.stdout.readline()
        (directory / "config.json").unlink()
        os.kill(child_of(process.pid), signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "there is no engine to serve: the engine is closed: " in errors
    assert "config.json is missing" in errors.splitlines()[-1]


def child_of(pid: int) -> int:
    (child,) = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return int(child)


def test_choices_that_are_refused_take_the_others_along(local):
    """The first choice is admitted, the second one is refused before anything of the first was read."""
    metrics = ServerMetrics(CollectorRegistry(), NAME)
    sampling = [SamplingParams(1000, seed=0), SamplingParams(1000, seed=2**63)]

    async def scenario() -> None:
        client = EngineClient(EngineConfig(model=str(EMBEDDED), device="cpu", max_model_len=2048, num_threads=1))
        await client.start()
        try:
            requests = [Request(f"choice-{number}", (1, 2), params) for number, params in enumerate(sampling)]
            for _ in range(2):
                with pytest.raises(SamplingError, match="seed"):
                    await Generation(client, requests, metrics).submit()
            assert not client._streams
        finally:
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, 2**64 - 1])
def test_any_seed_has_choices(local, seed):
    answer = local.post(ask("Hello", seed=seed, n=3, max_tokens=2))
    assert (answer.status_code, len(answer.json().get("choices", ()))) == (200, 3), answer.text
    assert not local.engine._streams
