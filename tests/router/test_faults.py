"""Faults of both sides that need a real process or a real socket; whatever happens, nothing stays open."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from config import ConfigError, RouterConfig, Upstream, load
from config.listen import MOST_HEAD_BYTES
from router.exchange import SLOWEST_BODY_BYTES_PER_S
from tests.bench.programs import free_port, wait_ready
from tests.router.live import echo, eventually

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def process():
    """An upstream in a process of its own, and its address."""
    port = free_port()
    running = subprocess.Popen([sys.executable, "-m", "tests.bench.upstream", str(port)])
    wait_ready(f"http://127.0.0.1:{port}")
    yield running, f"http://127.0.0.1:{port}"
    running.kill()
    running.wait(10)


def settles(running):
    eventually(lambda: running.num_in_flight == running.num_open == 0)
    for metric in running.app.metrics.in_flight.collect():
        assert all(sample.value == 0 for sample in metric.samples)


def test_frozen_upstream_is_left_and_taken_back(gateway, upstream, client, process):
    frozen, url = process
    spare = upstream()
    here = Upstream(name="frozen", url=url, lane="short")
    running = gateway(long=spare, more=[here], connect_timeout_s=0.3, answer_timeout_s=0.5, first_byte_timeout_s=0.5)
    assert client.post(running.url + CHAT, json=BODY).json()["choices"]
    os.kill(frozen.pid, signal.SIGSTOP)
    # its kernel still takes connections and bytes, so only time tells
    late = client.post(running.url + "/chat" + CHAT, json=BODY)
    assert late.status_code in (503, 504) and "frozen" in late.text
    eventually(lambda: not running.app.workers["frozen"].healthy)
    # what comes now loses no time
    started = time.monotonic()
    assert client.post(running.url + CHAT, json=BODY).json()["path"] == CHAT
    assert time.monotonic() - started < 0.3 and len(spare.requests) == 1
    os.kill(frozen.pid, signal.SIGCONT)
    eventually(lambda: running.app.workers["frozen"].healthy)
    assert client.post(running.url + "/chat" + CHAT, json=BODY).json()["choices"]
    settles(running)


def test_killed_upstream_ends_its_streams_with_an_error(gateway, client, process):
    killed, url = process
    running = gateway(more=[Upstream(name="killed", url=url, lane="long")])
    body = BODY | {"stream": True, "rate": 50, "seconds": 60}
    with client.stream("POST", running.url + CHAT, json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        os.kill(killed.pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "upstream_error" in rest[-1] and "killed" in rest[-1]
    assert "data: [DONE]" not in rest
    settles(running)
    eventually(lambda: not running.app.is_ready())
    refused = client.post(running.url + CHAT, json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
    assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("status", [502, 500, 403])
def test_page_of_a_proxy_is_no_answer(gateway, upstream, client, status):
    async def html(received, connection):
        await connection.answer(status, b"<html>Bad Gateway</html>", "", "text/html")

    running = gateway(long=upstream(answer=html))
    response = client.post(running.url + CHAT, json=BODY)
    if status >= 500:
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")
        assert "without a JSON body" in response.text
    else:
        assert response.status_code == status
    settles(running)


def connect(running):
    return socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=20)


def read_all(connection):
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(10_000):
            received += data
    return received


@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nx-big: ", b"GET /", b"\r\n" * 10])
def test_head_of_ten_megabytes_is_refused_at_once(gateway, upstream, client, start):
    running = gateway(long=upstream())
    before = resident_bytes()
    with connect(running) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(start)
            for _ in range(160):
                connection.sendall(b"x" * 65_536)
        answer = read_all(connection)
    # a reset may overtake the answer
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert resident_bytes() - before < 5_000_000
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    settles(running)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_too_large_a_head_is_told_and_a_large_one_passes(gateway, upstream):
    running = gateway(long=upstream())
    for size, status in ((MOST_HEAD_BYTES - 1000, b"200"), (MOST_HEAD_BYTES + 1000, b"431")):
        with connect(running) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-big: " + b"x" * size)
            time.sleep(0.2)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"\r\n\r\n")
            assert read_all(connection).split(b" ")[1] == status
    settles(running)


def test_large_body_in_one_piece_with_its_head_is_no_large_head(gateway, upstream):
    long = upstream()
    running = gateway(long=long)
    body = b'{"model":"tiny","messages":"' + b"x" * (3 * MOST_HEAD_BYTES) + b'"}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with connect(running) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert long.requests[0].body == body


def test_body_that_dribbles_is_left(gateway, upstream):
    long = upstream()
    running = gateway(long=long, request_timeout_s=0.5)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
    with connect(running) as connection:
        connection.sendall(head.encode() + b'{"model":"tiny","x":"')
        started = time.monotonic()
        # never silent for long, and never done
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 5:
                connection.sendall(b"x")
                time.sleep(0.1)
        assert time.monotonic() - started < 3
        answer = read_all(connection)
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 408") and b"less than 16384 a second" in answer)
    assert long.requests == []
    settles(running)


def test_body_that_comes_slowly_but_steadily_is_waited_for(gateway, upstream):
    long = upstream()
    running = gateway(long=long, request_timeout_s=0.3)
    body = b'{"model":"tiny","messages":"' + b"x" * 2 * SLOWEST_BODY_BYTES_PER_S + b'"}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with connect(running) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        # a third faster than it has to be
        for at in range(0, len(body), 2048):
            connection.sendall(body[at : at + 2048])
            time.sleep(0.09)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    assert long.requests[0].body == body


def test_bodies_share_a_limit_and_give_it_back(gateway, upstream, client):
    """Whatever ends a request: its answer, a client that left, an upstream that broke."""

    async def waits(received, connection):
        await connection.closed()

    long = upstream(answer=waits)
    running = gateway(long=long, max_body_bytes=100_000, max_held_body_bytes=150_000)
    large = BODY | {"messages": [{"role": "user", "content": "x" * 90_000}]}
    with client.stream("POST", running.url + "/v1/models", json=large) as refused:
        # what takes no body holds none
        assert refused.status_code == 405 and running.app._bodies.num_bytes == 0
    with connect(running) as connection:
        text = json.dumps(large).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        eventually(lambda: len(long.requests) == 1)
        second = client.post(running.url + CHAT, json=large)
        assert second.status_code == 503 and "max_held_body_bytes" in second.text
        assert int(second.headers["retry-after"]) >= 1
    settles(running)
    assert running.app._bodies.num_bytes == 0
    long.answer = echo
    assert [client.post(running.url + CHAT, json=large).status_code for _ in range(3)] == [200] * 3
    assert client.post(running.url + CHAT, content=b"{" * 90_000, headers=JSON).status_code == 400
    settles(running)
    assert running.app._bodies.num_bytes == 0


def test_limit_of_all_bodies_has_room_for_one():
    with pytest.raises(ConfigError, match="one body has to fit"):
        load({"router": RouterConfig}, ["--max-held-body-bytes", "2048"], {})


def test_many_clients_that_never_finish_a_head_disturb_nobody(gateway, upstream, client):
    running = gateway(long=upstream(), request_timeout_s=1.0)
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(running)) for _ in range(200)]
        for connection in slow:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
        assert client.post(running.url + CHAT, json=BODY).status_code == 200
        assert all(read_all(connection) == b"" for connection in slow)
    settles(running)
