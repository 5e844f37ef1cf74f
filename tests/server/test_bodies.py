"""Bodies that are slow, large, or many at once."""

import json
import socket
import time

import pytest

from config import ConfigError, ServerConfig
from config.load import load
from tests.server.live import running
from tests.server.test_chat import ask
from tests.server.test_errors import refusal
from tests.server.test_streams import reset

TIMEOUT_S = 0.6
MAX_HELD = 100_000


@pytest.fixture(scope="module")
def small(checkpoint, tmp_path_factory):
    script = [
        {"when": "slow", "output": "</think>" + "tick " * 500, "token_ms": 20},
        {"output": "</think>\n\nHello"},
    ]
    limits = {"max_body_bytes": 64_000, "max_held_body_bytes": MAX_HELD, "request_timeout_s": TIMEOUT_S}
    with running(checkpoint, script, tmp_path_factory.mktemp("bodies"), **limits) as live:
        yield live


def begin(live, length: int, sent: bytes, path: str = "/v1/chat/completions") -> socket.socket:
    """A client in the middle of its body."""
    client = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + sent)
    return client


def received(client: socket.socket) -> bytes:
    """All until the server closes."""
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def test_bodies_of_all_connections_together_are_limited(small):
    clients = [begin(small, 45_001, b" " * 45_000) for _ in "ab"]
    small.wait_until(lambda: small.serving.held.num_bytes == 90_000)
    answer = small.post(ask("x" * 20_000))
    error = refusal(answer, 503)
    assert (error["code"], int(answer.headers["retry-after"])) == ("server_is_overloaded", 5)
    assert "max_held_body_bytes" in error["message"]
    assert small.post(ask("x" * 20_000), "/v1/messages").status_code == 529
    assert small.http.get("/health").status_code == 200
    # what fits is still taken
    assert small.post(ask("hi")).status_code == 200
    for client in clients:
        reset(client)
    small.wait_until(lambda: small.serving.held.num_bytes == 0)
    assert small.post(ask("x" * 20_000)).status_code == 200


def test_a_body_without_a_length_is_counted_as_it_comes(small):
    def chunks():
        for _ in range(5):
            yield b" " * 10_000

    blockers = [begin(small, 50_000, b" " * 35_000) for _ in "ab"]
    small.wait_until(lambda: small.serving.held.num_bytes == 70_000)
    headers = {"content-type": "application/json"}
    refusal(small.http.post("/v1/chat/completions", content=chunks(), headers=headers), 503)
    for blocker in blockers:
        reset(blocker)
    small.wait_until(lambda: small.serving.held.num_bytes == 0)


def test_a_body_is_held_until_its_answer_ends(small):
    body = ask("slow" + " " * 5_000, stream=True)
    with small.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        assert small.serving.held.num_bytes > 5_000
    small.wait_until(lambda: small.serving.held.num_bytes == 0)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/compl", b"POST / HTTP/1.1\r\nHost: localhost\r\nX-A: "])
def test_an_unfinished_head_is_left(small, sent):
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", small.port), timeout=10) as client:
        client.sendall(sent)
        received(client)
    assert TIMEOUT_S * 0.9 < time.monotonic() - started < TIMEOUT_S + 2


@pytest.mark.parametrize("pause_s", [10, 0.1])
def test_a_slow_body_is_left_with_a_word(small, pause_s):
    """Silent, or never silent and yet too slow."""
    raw = json.dumps(ask("hi")).encode()
    started = time.monotonic()
    with begin(small, len(raw) + 100, raw) as client:
        client.settimeout(pause_s)
        answer = b""
        while b"request_timeout" not in answer:
            assert time.monotonic() - started < TIMEOUT_S + 2
            try:
                answer += client.recv(65536)
            except TimeoutError:
                client.sendall(b" ")
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"connection: close" in answer
        client.settimeout(10)
        assert received(client) == b""
    assert time.monotonic() - started > TIMEOUT_S * 0.9
    assert small.serving.held.num_bytes == 0


def test_a_large_body_may_take_as_long_as_its_pace_allows(small):
    raw = json.dumps(ask("hi")).encode()
    with begin(small, 60_000, raw + b" " * (30_000 - len(raw))) as client:
        time.sleep(TIMEOUT_S * 0.8)
        client.sendall(b" " * 15_000)
        time.sleep(TIMEOUT_S * 0.8)
        client.sendall(b" " * 15_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_the_limit_of_all_bodies_takes_the_largest():
    with pytest.raises(ConfigError, match="max_held_body_bytes 100000 is less than max_body_bytes"):
        load({"server": ServerConfig}, ["--max-held-body-bytes", "100000"], {})
