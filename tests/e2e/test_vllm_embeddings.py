"""Embeddings, which the engine has none of, through the gateway from a real vLLM."""

import math

import httpx
import openai
import pytest

from config import Upstream
from engine import resolve_checkpoint
from tests.e2e import vllm
from tests.router.live import LoopThread, running_gateway

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory):
    assert vllm.is_prepared(), "no vLLM here: python -m tests.e2e.vllm prepares it"
    folder = tmp_path_factory.mktemp("vllm")
    vllm.write_bfloat16(resolve_checkpoint("longlane-tiny"), folder / "checkpoint")
    with vllm.running(folder / "checkpoint", folder / "log", "--runner", "pooling", "--convert", "embed") as url:
        yield url


@pytest.fixture(scope="module")
def gateway_url(vllm_url):
    threads = LoopThread()
    with running_gateway(threads, Upstream(name="vllm", url=vllm_url, lane="short")) as running:
        yield running.url
    threads.stop()


def test_embeddings_pass_unchanged(gateway_url, vllm_url):
    body = {"model": vllm.MODEL, "input": ["the weather in Rome", "a function that sorts a list"]}
    direct, through = (
        httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json() for url in (vllm_url, gateway_url)
    )
    assert through["data"] == direct["data"] and through["usage"] == direct["usage"]


def test_the_sdk_reads_them(gateway_url):
    with openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="any", max_retries=0) as client:
        # vLLM's CPU build (0.32.0) dies of a step that has a single token
        texts = ["one two three", "one two three", "another text"]
        reply = client.embeddings.create(model=vllm.MODEL, input=texts)
    first, second, third = (one.embedding for one in reply.data)
    assert math.dist(first, second) < 1e-3 < math.dist(first, third)
    assert reply.usage.prompt_tokens > 0
