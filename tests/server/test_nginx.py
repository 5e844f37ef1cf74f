"""Streams through a real nginx that buffers, packs and loses patience, as it stands in front of many servers."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise

import httpx
import pytest

from tests.server.live import NAME, running
from tests.server.test_chat import ask

pytestmark = pytest.mark.real

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
TOKEN_MS = 150
NUM_TICKS = 8
PATIENCE_S = 1
SILENCE_S = 3
SCRIPT = [
    {"when": "silent", "output": "</think>\n\ndone", "prefill_ms": SILENCE_S * 1000},
    {"output": "</think>" + "tick " * NUM_TICKS, "token_ms": TOKEN_MS},
]
STREAMS = {
    "/v1/chat/completions": ask("go", stream=True),
    "/v1/completions": {"model": NAME, "prompt": "go", "stream": True},
    "/v1/messages": ask("go", stream=True, max_tokens=100),
    "/v1/responses": {"model": NAME, "input": "go", "stream": True},
}
CONFIG = """
daemon off;
{user}
pid {directory}/nginx.pid;
error_log {directory}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    gzip on;
    gzip_proxied any;
    gzip_types text/event-stream application/json;
    gzip_min_length 1;
    proxy_http_version 1.1;
    proxy_buffering on;
    proxy_read_timeout {patience}s;
    proxy_set_header Host localhost;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
        location /deaf/ {{
            proxy_ignore_headers X-Accel-Buffering;
            proxy_pass http://127.0.0.1:{upstream}/;
        }}
    }}
}}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module", params=[0.3, 10.0], ids=["heartbeats", "rare heartbeats"])
def heartbeat_s(request) -> float:
    return request.param


@pytest.fixture(scope="module")
def through_nginx(checkpoint, tmp_path_factory, heartbeat_s) -> Iterator[httpx.Client]:
    assert os.access(NGINX, os.X_OK), "nginx is missing: apt install nginx-light"
    directory = tmp_path_factory.mktemp("nginx")
    port = free_port()
    with running(checkpoint, SCRIPT, directory, heartbeat_s=heartbeat_s) as live:
        user = "user root;" if os.geteuid() == 0 else ""
        text = CONFIG.format(user=user, directory=directory, patience=PATIENCE_S, port=port, upstream=live.port)
        (directory / "nginx.conf").write_text(text)
        process = subprocess.Popen([NGINX, "-p", directory, "-c", directory / "nginx.conf"], stderr=subprocess.DEVNULL)
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, headers={"accept-encoding": "gzip"})
        try:
            live.wait_until(lambda: is_listening(port), 10)
            yield client
        finally:
            client.close()
            process.terminate()
            process.wait(10)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def arrivals(client: httpx.Client, path: str, body: dict) -> tuple[list[float], str]:
    """When each part of the text with a tick came, in seconds from the first; and the text."""
    times: list[float] = []
    parts: list[str] = []
    with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for part in answer.iter_text():
            parts.append(part)
            if "tick" in part:
                times.append(time.monotonic())
    return [moment - times[0] for moment in times], "".join(parts)


@pytest.mark.parametrize("path", STREAMS)
def test_each_event_comes_through_when_it_is_sent(through_nginx, path):
    times, text = arrivals(through_nginx, path, STREAMS[path])
    assert text.count("tick") >= NUM_TICKS
    # responses repeat the text at the end
    assert len(times) >= NUM_TICKS
    gaps = [after - before for before, after in pairwise(times[:NUM_TICKS])]
    assert min(gaps) > TOKEN_MS / 1000 * 0.2, gaps
    assert times[NUM_TICKS - 1] > (NUM_TICKS - 1) * TOKEN_MS / 1000 * 0.8


def test_it_is_the_header_that_does_it(through_nginx):
    """The same nginx, told to ignore the header, holds everything back to the end."""
    times, text = arrivals(through_nginx, "/deaf/v1/chat/completions", STREAMS["/v1/chat/completions"])
    assert text.count("tick") == NUM_TICKS
    assert times[-1] < TOKEN_MS / 1000


@pytest.mark.parametrize("path", STREAMS)
def test_heartbeats_outlast_its_patience(through_nginx, heartbeat_s, path):
    body = STREAMS[path] | ({"prompt": "silent"} if path == "/v1/completions" else {})
    body |= {"input": "silent"} if path == "/v1/responses" else {}
    body |= {"messages": ask("silent")["messages"]} if "messages" in body else {}
    started = time.monotonic()
    if heartbeat_s < PATIENCE_S:
        text = text_of(through_nginx, path, body)
        assert "done" in text
        assert time.monotonic() - started > SILENCE_S
    else:
        # and without them it is lost
        with pytest.raises(httpx.RemoteProtocolError):
            text_of(through_nginx, path, body)
        assert time.monotonic() - started < SILENCE_S


def text_of(client: httpx.Client, path: str, body: dict) -> str:
    with client.stream("POST", path, json=body) as answer:
        return "".join(answer.iter_text())
