"""What is in flight when the server ends: it may finish, and is told when it may not."""

import threading
import time

import anthropic
import httpx
import openai
import pytest

from tests.server.live import NAME, running
from tests.server.test_chat import ask

DRAIN_S = 0.3
SCRIPT = [
    {"when": "short", "output": "</think>" + "tick " * 12, "token_ms": 10},
    {"output": "</think>" + "tick " * 3000, "token_ms": 10},
]
PATHS = {
    "/v1/chat/completions": ask("long"),
    "/v1/completions": {"model": NAME, "prompt": "long"},
    "/v1/messages": ask("long", max_tokens=4000),
    "/v1/responses": {"model": NAME, "input": "long"},
}


@pytest.fixture
def ending(checkpoint, tmp_path):
    with running(checkpoint, SCRIPT, tmp_path, drain_s=DRAIN_S) as live:
        yield live


def answers(live, requests: list[tuple[str, dict]]) -> list[httpx.Response]:
    """Of requests that run while the server is told to end."""
    found: dict[int, httpx.Response] = {}

    def ask_for(index: int, path: str, body: dict) -> None:
        with httpx.Client(base_url=live.url, timeout=30) as client:
            found[index] = client.post(path, json=body)

    threads = [threading.Thread(target=ask_for, args=(index, *request)) for index, request in enumerate(requests)]
    for thread in threads:
        thread.start()
    live.wait_until(lambda: live.engine.stats.num_running == len(requests))
    # headers and a few tokens
    time.sleep(0.05)
    live.server.should_exit = True
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(requests))]


def test_each_api_is_told_in_its_own_words(ending):
    streams = [(path, {**body, "stream": True}) for path, body in PATHS.items()]
    chat, completions, messages, responses = (answer.text for answer in answers(ending, streams))
    for text in (chat, completions):
        last = text.rstrip("\n").rpartition("\n\n")[2]
        assert last.startswith('data: {"error":{"message":"the server is shutting down'), text[-300:]
        assert '"code":"server_is_overloaded"' in last
        assert "[DONE]" not in text
        assert '"finish_reason":"' not in text
    last = messages.rstrip("\n").rpartition("\n\n")[2]
    assert last.startswith('event: error\ndata: {"type":"error","error":{"type":"overloaded_error"')
    assert "message_stop" not in messages
    last = responses.rstrip("\n").rpartition("\n\n")[2]
    assert last.startswith('event: response.failed\ndata: {"type":"response.failed"')
    assert '"code":"server_is_overloaded"' in last


def test_whole_answers_become_errors(ending):
    for path, answer in zip(PATHS, answers(ending, list(PATHS.items())), strict=True):
        assert answer.status_code == (529 if path == "/v1/messages" else 503)
        assert int(answer.headers["retry-after"]) >= 1
        assert "shutting down" in answer.text


def test_what_ends_in_time_ends_as_ever(ending):
    (answer,) = answers(ending, [("/v1/chat/completions", ask("short", stream=True))])
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_sdks_raise(checkpoint, tmp_path):
    with running(checkpoint, SCRIPT, tmp_path, drain_s=DRAIN_S) as live:
        stream = live.openai.chat.completions.create(**ask("long"), stream=True)
        client = anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0)
        messages = client.messages.create(
            model=NAME, max_tokens=4000, messages=[{"role": "user", "content": "long"}], stream=True
        )
        next(iter(stream)), next(iter(messages))
        live.server.should_exit = True
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(anthropic.APIStatusError, match="shutting down"):
            list(messages)
        client.close()
