"""`python -m router` as a process: ports, signals, the admin port, the log."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.router.live import eventually

BODY = {"model": "tiny", "messages": []}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    def __init__(self, *flags, **environ):
        self.port, self.admin_port = free_port(), free_port()
        flags = ("--port", str(self.port), "--admin-port", str(self.admin_port), *flags)
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "router", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"LONGLANE_ROUTER_HEALTH_INTERVAL_S": "0.1"} | environ,
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.popen.stderr))
        self._reader.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_url(self):
        return f"http://127.0.0.1:{self.admin_port}"

    def answers(self):
        assert self.popen.poll() is None, self.lines
        try:
            return httpx.get(self.url + "/ready").status_code == 200
        except httpx.TransportError:
            return False

    def end(self):
        if self.popen.poll() is None:
            self.popen.terminate()
        code = self.popen.wait(timeout=20)
        self._reader.join()
        self.popen.stderr.close()
        return code

    def logged(self):
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def process():
    started = []

    def start(*flags, **environ):
        started.append(Process(*flags, **environ))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_a_run_from_start_to_end(process, upstream):
    running = process("--long-url", upstream().url)
    eventually(running.answers, 20)
    answer = httpx.post(running.url + "/v1/chat/completions", json=BODY)
    assert answer.status_code == 200
    assert httpx.get(running.url + "/metrics").status_code == 404
    assert httpx.get(running.admin_url + "/metrics", headers={"host": "evil.example"}).status_code == 403
    metrics = httpx.get(running.admin_url + "/metrics").text
    assert 'longlane_router_requests_total{api="chat",lane="short",status="200"} 1.0' in metrics
    assert 'longlane_router_upstream_healthy{lane="long",upstream="engine"} 1.0' in metrics
    assert running.end() == 0
    logged = running.logged()
    assert sum("the short lane has no upstream of its own" in line["message"] for line in logged) == 1
    request = next(line for line in logged if line["message"] == "request" and line["path"].startswith("/v1/chat"))
    assert (request["status"], request["lane"], request["upstream"]) == (200, "short", "engine")
    assert request["request_id"] == answer.headers["x-request-id"]


def test_vllm_address_makes_a_short_lane(process, upstream):
    long, short = upstream(), upstream(models={"small": 2048})
    running = process("--long-url", long.url, "--vllm-url", short.url + "/v1")
    eventually(lambda: running.answers() and len(httpx.get(running.url + "/v1/models").json()["data"]) == 2, 20)
    httpx.post(running.url + "/v1/chat/completions", json=BODY | {"model": "small"})
    assert len(short.requests) == 1
    running.end()
    assert not any("falls back" in line["message"] for line in running.logged())


@pytest.mark.parametrize("times", [1, 2])
def test_sigterm_lets_a_stream_finish(process, upstream, times):
    """A parent that dies sends it again for each of its threads."""

    async def answer(received, connection):
        await connection.stream(b"data: 1\n\n", b"data: [DONE]\n\n", pause_s=1.0)

    running = process("--long-url", upstream(answer=answer).url)
    eventually(running.answers, 20)
    with httpx.stream("POST", running.url + "/v1/chat/completions", json=BODY) as response:
        events = response.iter_raw()
        next(events)
        for _ in range(times):
            running.popen.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert b"".join(events) == b"data: [DONE]\n\n"
    assert running.popen.wait(timeout=10) == 0


def test_stream_past_the_drain_time_ends_with_an_error(process, upstream):
    async def answer(received, connection):
        await connection.start_stream()
        await connection.chunk(b"data: 1\n\n")
        await asyncio.sleep(30)

    running = process("--long-url", upstream(answer=answer).url, "--drain-s", "1")
    eventually(running.answers, 20)
    with httpx.stream("POST", running.url + "/v1/chat/completions", json=BODY) as response:
        events = response.iter_raw()
        next(events)
        running.popen.send_signal(signal.SIGTERM)
        rest = b"".join(events)
    assert rest.startswith(b'data: {"error"') and b"shutting down" in rest and b"[DONE]" not in rest
    assert running.popen.wait(timeout=10) == 0
    assert not any("Exception in ASGI" in line["message"] for line in running.logged())


def test_admin_token(process, upstream):
    running = process("--long-url", upstream().url, LONGLANE_ROUTER_ADMIN_TOKEN="t0ken")
    eventually(running.answers, 20)
    assert httpx.get(running.admin_url + "/metrics").status_code == 401
    bearer = {"authorization": "Bearer t0ken"}
    assert httpx.get(running.admin_url + "/metrics", headers=bearer).status_code == 200
    state = httpx.get(running.admin_url + "/state", headers=bearer).json()["upstreams"][0]
    assert (state["name"], state["healthy"], state["models"]) == ("engine", True, ["tiny"])
    assert httpx.get(running.admin_url + "/health").status_code == 200
    page = httpx.get(running.admin_url + "/ui")
    assert page.headers["content-type"].startswith("text/html") and "/state" in page.text
    # nothing from elsewhere
    assert "://" not in page.text


def run(*flags):
    return subprocess.run([sys.executable, "-m", "router", *flags], capture_output=True, text=True, timeout=30)


def test_taken_port_is_one_line_with_the_flag():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flags, flag in (
            (("--port", port, "--admin-port", "0"), "--port"),
            (("--port", "0", "--admin-port", port), "--admin-port"),
        ):
            done = run(*flags)
            assert done.returncode == 1
            told = [line for line in done.stderr.splitlines() if line]
            assert len(told) == 1 and f"port {port}" in told[0] and f"{flag} PORT" in told[0]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prot", "1"), "did you mean --port?"),
        (("--keys-file", "/nowhere"), "keys file /nowhere: No such file"),
        (("--host", "0.0.0.0"), "set keys_file"),
    ],
)
def test_wrong_settings_are_told_without_a_traceback(flags, words):
    done = run(*flags)
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr


def test_help():
    done = run("--help")
    assert done.returncode == 0
    assert "--vllm-url" in done.stdout and "An external vLLM" in done.stdout
