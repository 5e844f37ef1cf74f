"""Time and disconnects, over real sockets."""

import asyncio
import http.client
import json
import socket
import struct
import threading
import time

import pytest

from config.listen import KEEP_ALIVE_S
from server.sse import EventStream
from server.tokens import TextEncoder
from tests.server.live import NAME, events, running
from tests.server.test_chat import TOOLS, ask

SUCCESS = "vllm:request_success_total"


def connect(live, body: dict) -> socket.socket:
    """A raw client that has sent its request."""
    raw = json.dumps(body).encode()
    client = socket.create_connection(("127.0.0.1", live.port), timeout=10)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return client


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def is_idle(live) -> bool:
    stats = live.engine.stats
    return stats.num_running == stats.num_waiting == 0


def read_until(client: socket.socket, marker: bytes) -> bytes:
    received = b""
    while marker not in received:
        part = client.recv(65536)
        assert part, received
        received += part
    return received


def test_headers_forbid_buffering(live):
    with live.http.stream("POST", "/v1/chat/completions", json=ask("hi", stream=True)) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        assert "content-encoding" not in answer.headers


def test_headers_come_at_once_and_heartbeats_while_nothing_else_does(live):
    client = connect(live, ask("think long first", stream=True))
    started = time.monotonic()
    head = read_until(client, b"\r\n\r\n")
    assert time.monotonic() - started < 0.5
    assert b"200 OK" in head
    received = head + read_until(client, b"[DONE]")
    assert received.count(b": heartbeat\n\n") >= 2
    assert b"\r\n\r\n:" not in received.partition(b"\r\n\r\n")[2]
    client.close()


def test_heartbeats_go_on_while_a_call_is_withheld(checkpoint, tmp_path):
    value = "[" + "1, " * 60 + "1]"
    output = (
        f"</think><tool_call>\n<function=edit>\n<parameter=edits>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    with running(checkpoint, [{"output": output, "token_ms": 8}], tmp_path, heartbeat_s=0.2) as slow:
        text = slow.post(ask("x", stream=True, tools=TOOLS)).text
    assert text.count(": heartbeat") >= 3
    assert events(text)[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_events_are_separated_by_line_feeds_alone(live):
    with live.http.stream("POST", "/v1/chat/completions", json=ask("hi", stream=True)) as answer:
        raw = b"".join(answer.iter_raw())
    assert b"\r" not in raw
    parts = raw.split(b"\n\n")
    assert parts[-1] == b""
    assert all(part.startswith((b"data: ", b": ")) for part in parts[:-1])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["count slowly", "prefill forever"])
def test_a_client_that_leaves_stops_its_generation(live, text, stream):
    aborted = live.engine.stats.num_aborted
    client = connect(live, ask(text, stream=stream))
    live.wait_until(lambda: live.engine.stats.num_running == 1)
    if stream and text == "count slowly":
        read_until(client, b"tick")
    reset(client)
    live.wait_until(lambda: is_idle(live), 1.0)
    assert live.engine.stats.num_aborted == aborted + 1


def test_every_choice_of_a_request_stops(live):
    client = connect(live, ask("count slowly", stream=True, n=3))
    live.wait_until(lambda: live.engine.stats.num_running == 3)
    reset(client)
    live.wait_until(lambda: is_idle(live), 1.0)


def test_a_stop_string_stops_the_generation_too(live):
    aborted = live.engine.stats.num_aborted
    endings = {reason: live.metric(SUCCESS, finished_reason=reason) for reason in ("stop", "abort", "error")}
    for stream in (False, True):
        answer = live.post(ask("count slowly", stop=["tick tick"], stream=stream))
        assert answer.status_code == 200
    live.wait_until(lambda: is_idle(live), 1.0)
    assert live.engine.stats.num_aborted == aborted + 2
    endings["stop"] += 2
    assert endings == {reason: live.metric(SUCCESS, finished_reason=reason) for reason in endings}


def test_start_then_abort_leaves_nothing_behind(live):
    for number in range(100):
        client = connect(live, ask("count slowly", stream=bool(number % 2)))
        if number % 3 == 0:
            # some leave before the server has looked at them
            live.wait_until(lambda: not is_idle(live))
        reset(client)
    # of those that it has not looked at yet, so many may come at once that others are sent away meanwhile
    live.wait_until(lambda: is_idle(live) and live.post(ask("hi")).status_code == 200, 5.0)
    live.wait_until(lambda: is_idle(live), 5.0)
    assert live.metric("vllm:num_requests_running") == 0
    assert live.metric("vllm:num_requests_waiting") == 0


def test_a_client_that_takes_nothing_is_cut(live, caplog):
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(10)
    client.connect(("127.0.0.1", live.port))
    raw = json.dumps(ask("flood", stream=True, n=16)).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    try:
        # the system buffers megabytes before a send has to wait
        live.wait_until(lambda: "took no byte" in caplog.text, 60)
        live.wait_until(lambda: is_idle(live), 2)
    finally:
        client.close()


def test_pooled_connections_outlive_a_client_s_pool(live):
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
    for _ in range(3):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"alive"}'
    connection.close()
    assert KEEP_ALIVE_S > 30


def test_five_at_once(live):
    answers: list[str] = []

    def talk() -> None:
        answer = live.openai.chat.completions.create(**ask("stop here"), stream=True)
        answers.append("".join(chunk.choices[0].delta.content or "" for chunk in answer))

    threads = [threading.Thread(target=talk) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["The quick brown fox jumps"] * 5


def test_leaving_costs_no_reading_of_the_prompt(live, monkeypatch):
    """Long prompts that leave together would hold everybody up."""
    read = []
    encode = TextEncoder._encode
    monkeypatch.setattr(TextEncoder, "_encode", lambda self, *parts: read.append(1) or encode(self, *parts))
    rest = "word " * 3000
    clients = [connect(live, ask(f"{rest} prefill forever", stream=True)) for _ in range(8)]
    for client in clients:
        read_until(client, b"assistant")
    count = len(read)
    assert count >= len(clients)
    for client in clients:
        reset(client)
    live.wait_until(lambda: is_idle(live))
    assert len(read) == count


def test_metrics_tell_what_happened(live):
    before = live.metric("vllm:generation_tokens_total")
    live.post(ask("hi"))
    assert live.metric("vllm:generation_tokens_total") == before + 7
    assert live.metric("vllm:e2e_request_latency_seconds_count", model_name=NAME, engine="0") >= 1
    assert live.metric("vllm:time_to_first_token_seconds_count") >= 1
    assert live.metric("http_requests_total", handler="/v1/chat/completions", method="POST", status="200") >= 1
    assert live.metric("vllm:prompt_tokens_total") > 0
    text = live.http.get("/metrics").text
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:num_requests_swapped"):
        assert f'{name}{{engine="0",model_name="{NAME}"}}' in text


def stream_of(events, released: list, **options) -> EventStream:
    async def release() -> None:
        released.append(True)

    return EventStream(events, release, **{"heartbeat_s": 0.05, "send_timeout_s": 0.2} | options)


async def nothing():
    await asyncio.Event().wait()
    yield b""


async def words():
    for word in (b"a", b"b"):
        yield word


async def broken():
    yield b"a"
    raise ZeroDivisionError


async def never_left():
    await asyncio.Event().wait()


async def left_soon():
    await asyncio.sleep(0.02)
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("events", [nothing, words])
def test_neither_an_event_nor_a_heartbeat_waits_for_ever(events, caplog):
    """The headers are taken, and no byte after them."""
    released, sent = [], []

    async def send(message) -> None:
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def run() -> None:
        await asyncio.wait_for(stream_of(events(), released)({}, never_left, send), 5)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert "took no byte" in caplog.text
    assert (len(released), len(sent)) == (1, 2)


@pytest.mark.parametrize("events", [nothing, words, broken])
@pytest.mark.parametrize("receive", [never_left, left_soon])
def test_the_work_is_released_however_a_stream_ends(events, receive):
    if (events, receive) == (nothing, never_left):
        return
    released, sent = [], []

    async def send(message) -> None:
        sent.append(message.get("body"))

    async def run() -> None:
        await asyncio.wait_for(stream_of(events(), released)({}, receive, send), 5)

    if events is broken:
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert len(released) == 1
    assert sent[1:] == {nothing: [], words: [b"a", b"b", b""], broken: [b"a"]}[events]


def test_a_cancelled_stream_releases_its_work():
    released = []

    async def send(message) -> None: ...

    async def run() -> None:
        serving = asyncio.ensure_future(stream_of(nothing(), released)({}, never_left, send))
        await asyncio.sleep(0.02)
        serving.cancel()
        await asyncio.wait({serving})
        assert serving.cancelled()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert len(released) == 1
