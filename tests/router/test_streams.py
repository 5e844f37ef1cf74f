"""What passes through a stream, and how it ends."""

import asyncio
import json
import socket
import time

import httpx
import pytest

from config import RouterConfig, Upstream
from config.keys import digest, generate
from router.exchange import Exchange
from router.relay import HEARTBEAT, Relay, SlowClientError
from router.sse import HELD_BYTES
from tests.router.live import eventually

CHAT = "/v1/chat/completions"
STREAM = (
    b'data: {"choices":[{"delta":{"content":"a\\u2028\xe2\x80\xa8b"}}]}\n\n'
    b": comment\n\n"
    b'event: x\r\ndata: {"n":1}\r\n\r\n'
    b"data: [DONE]\n\n"
)


def ask(client, gateway, path=CHAT, **body):
    return client.post(gateway.url + path, json={"model": "tiny", "messages": [], "stream": True, **body})


def sends(*chunks, pause_s=0.0):
    async def answer(received, connection):
        await connection.stream(*chunks, pause_s=pause_s)

    return answer


def breaks_after(*chunks):
    async def answer(received, connection):
        await connection.start_stream()
        for data in chunks:
            await connection.chunk(data)
        await asyncio.sleep(0.1)
        connection.reset()

    return answer


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_bytes_are_identical_wherever_the_upstream_cuts(gateway, upstream, client, size):
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    response = ask(client, gateway(long=upstream(answer=sends(*chunks, pause_s=0.001))))
    assert response.content == STREAM
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["cache-control"] == "no-cache, no-transform"


def test_two_gateways_in_a_row_add_nothing(gateway, upstream, client, threads):
    inner = gateway(long=upstream(answer=sends(STREAM[:40], STREAM[40:], pause_s=0.01)))

    class Inner:
        url = inner.url

    outer = gateway(long=Inner)
    response = ask(client, outer)
    assert response.content == STREAM
    assert response.headers.get_list("cache-control") == ["no-cache, no-transform"]


def test_events_pass_when_they_come(gateway, upstream, client):
    running = gateway(long=upstream(answer=sends(b"data: 1\n\n", b"data: [DONE]\n\n", pause_s=0.5)))
    arrived = []
    body = {"model": "tiny", "stream": True}
    with client.stream("POST", running.url + CHAT, json=body) as response:
        arrived = [(time.monotonic(), chunk) for chunk in response.iter_raw()]
    assert [chunk for _, chunk in arrived] == [b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert arrived[1][0] - arrived[0][0] > 0.3


def test_upstream_dies_in_mid_stream(gateway, upstream, client):
    running = gateway(long=upstream(answer=breaks_after(b'data: {"n":1}\n\ndata: {"ha')))
    response = ask(client, running)
    first, second = response.content.split(b"\n\n")[:2]
    assert first == b'data: {"n":1}'
    error = json.loads(second.removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_error"
    assert "engine" in error["message"]
    assert b"[DONE]" not in response.content
    eventually(lambda: running.num_in_flight == running.num_open == 0)


def test_end_without_marker_is_no_end(gateway, upstream, client):
    response = ask(client, gateway(long=upstream(answer=sends(b'data: {"n":1}\n\n'))))
    assert b"ended the stream without finishing it" in response.content


def test_error_event_of_the_upstream_is_the_only_one(gateway, upstream, client):
    stream = b'data: {"n":1}\n\ndata: {"error":{"message":"engine died"}}\n\n'
    assert ask(client, gateway(long=upstream(answer=sends(stream)))).content == stream


def test_reset_after_the_marker_is_an_end(gateway, upstream, client):
    stream = b"data: [DONE]\n\n"
    assert ask(client, gateway(long=upstream(answer=breaks_after(stream)))).content == stream


def test_failure_takes_the_shape_of_the_messages_api(gateway, upstream, client):
    start = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    response = ask(client, gateway(long=upstream(answer=sends(start))), "/v1/messages")
    event, data = response.content.removeprefix(start).decode().strip().split("\n")
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"


def test_failure_takes_the_shape_of_the_responses_api(gateway, upstream, client):
    start = b'event: response.created\ndata: {"type":"response.created","sequence_number":4,"response":{"id":"r"}}\n\n'
    response = ask(client, gateway(long=upstream(answer=sends(start))), "/v1/responses")
    event, data = response.content.removeprefix(start).decode().strip().split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert event == "event: response.failed"
    assert (failed["sequence_number"], failed["response"]["id"], failed["response"]["status"]) == (5, "r", "failed")


def test_event_larger_than_the_gateway_holds(gateway, upstream, client):
    chunks = [b"data: " + b"x" * 1000] + [b"x" * 65536] * (HELD_BYTES // 65536)
    response = ask(client, gateway(long=upstream(answer=sends(*chunks))))
    assert b"larger than" in response.content
    assert len(response.content) < 1000


def test_silence_in_mid_stream_ends_it(gateway, upstream, client):
    async def answer(received, connection):
        await connection.start_stream()
        await connection.chunk(b"data: 1\n\n")
        await connection.closed()
        raise ConnectionError

    long = upstream(answer=answer)
    response = ask(client, gateway(long=long, idle_timeout_s=0.3))
    assert b"was silent for 0.3 s" in response.content
    assert b"upstream_timeout" in response.content
    eventually(lambda: long.num_closed == 1)


def test_heartbeats_stand_between_events_and_only_where_asked_for(gateway, upstream, client):
    slow = sends(b"data: 1\n\ndata:", b" 2\n\n", b"data: [DONE]\n\n", pause_s=0.35)
    whole = b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    marked = gateway(long=upstream(), short=upstream(answer=slow), heartbeats=True, heartbeat_s=0.1)
    content = ask(client, marked).content
    assert content.count(HEARTBEAT) >= 4
    assert content.replace(HEARTBEAT, b"") == whole
    assert ask(client, gateway(long=upstream(answer=slow), heartbeat_s=0.1)).content == whole


def test_upstream_is_asked_for_no_compression_and_a_compressed_stream_is_refused(gateway, upstream, client):
    async def answer(received, connection):
        await connection.start_stream("content-encoding: gzip\r\n")

    long = upstream(answer=answer)
    response = ask(client, gateway(long=long))
    assert response.status_code == 502
    assert long.requests[0].headers["accept-encoding"] == "identity"


def read_some(url, body, size=200, more_head=""):
    """Opens a stream with a bare socket, reads its first bytes and returns the socket."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{more_head}"
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    if size:
        connection.recv(size)
    return connection


async def never_ends(received, connection):
    await connection.start_stream()
    await connection.chunk(b"data: 1\n\n")
    await connection.closed()
    raise ConnectionError


async def never_starts(received, connection):
    await connection.closed()
    raise ConnectionError


@pytest.mark.parametrize("answer", [never_ends, never_starts])
def test_cancel_reaches_the_upstream_within_a_second(gateway, upstream, answer):
    long = upstream(answer=answer)
    running = gateway(long=long)
    connection = read_some(running.url, b'{"model":"tiny"}', 200 if answer is never_ends else 0)
    eventually(lambda: len(long.requests) == 1)
    connection.close()
    assert eventually(lambda: long.num_closed == 1) < 1
    eventually(lambda: running.num_in_flight == running.num_open == 0)


def test_hundred_aborts_leave_nothing_open(gateway, upstream, client):
    long = upstream(answer=never_ends)
    running = gateway(long=long)
    for number in range(100):
        connection = read_some(running.url, b'{"model":"tiny"}', 100 * (number % 2))
        # half of them leave with a reset
        if number % 4 < 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    eventually(lambda: running.num_in_flight == running.num_open == 0)
    assert running.app.metrics.client_gone._value.get() == 100
    assert running.app.metrics.in_flight.labels("engine")._value.get() == 0
    eventually(lambda: long.num_closed == len(long.requests))
    long.answer = sends(STREAM)
    assert ask(client, running).content == STREAM


def test_reset_right_after_the_request_holds_no_place(gateway, upstream, client, tmp_path):
    secret = generate()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest(secret)}"\nconcurrent_requests = 1')
    long = upstream(answer=never_starts)
    running = gateway(long=long, keys_file=path)
    head = f"authorization: Bearer {secret}\r\n"
    for _ in range(50):
        connection = read_some(running.url, b'{"model":"tiny"}', 0, head)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    eventually(lambda: running.num_in_flight == running.num_open == 0)
    long.answer = sends(STREAM)
    headers = {"authorization": f"Bearer {secret}"}
    # the last of them may be accepted after all others are gone
    eventually(lambda: client.post(running.url + CHAT, json={"model": "tiny"}, headers=headers).content == STREAM)


def test_client_that_closes_at_the_end_marker_is_not_gone(gateway, upstream):
    async def answer(received, connection):
        await connection.start_stream()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.closed()
        raise ConnectionError

    running = gateway(long=upstream(answer=answer))
    connection = read_some(running.url, b'{"model":"tiny"}', 0)
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(1000)
    connection.close()
    eventually(lambda: running.num_open == 0)
    assert running.app.metrics.client_gone._value.get() == 0


def test_client_that_leaves_in_mid_body_reaches_no_upstream(gateway, upstream):
    long = upstream()
    running = gateway(long=long)
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    connection.sendall(head.encode() + b'{"model"')
    eventually(lambda: running.num_open == 1)
    connection.close()
    eventually(lambda: running.num_open == 0)
    assert long.requests == []


def test_client_that_reads_nothing_is_left(gateway, upstream):
    async def answer(received, connection):
        await connection.start_stream()
        while True:
            await connection.chunk(b"data: " + b"x" * 60_000 + b"\n\n")

    long = upstream(answer=answer)
    running = gateway(long=long, send_timeout_s=0.3)
    connection = read_some(running.url, b'{"model":"tiny"}', 10)
    eventually(lambda: long.num_closed == 1)
    eventually(lambda: running.num_open == 0)
    connection.close()


def test_unfinished_json_answer_is_an_error_not_half_an_answer(gateway, upstream, client):
    async def answer(received, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        connection.reset()

    response = ask(client, gateway(long=upstream(answer=answer)), stream=False)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_error"


def test_unfinished_large_answer_stays_unfinished(gateway, upstream, client):
    async def answer(received, connection):
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 100\r\n\r\nx")
        await asyncio.sleep(0.05)
        connection.reset()

    running = gateway(long=upstream(answer=answer))
    with pytest.raises(httpx.RemoteProtocolError):
        ask(client, running)
    eventually(lambda: running.num_open == 0)


def test_large_json_answer_passes_whole(gateway, upstream, client):
    value = {"text": "x" * (3 * HELD_BYTES)}

    async def answer(received, connection):
        await connection.answer(200, value)

    response = ask(client, gateway(long=upstream(answer=answer)), stream=False)
    assert response.json() == value


@pytest.mark.parametrize("chunks", [(), (b"data: 1\n\n",)])
def test_client_that_takes_neither_heartbeat_nor_end_is_left(chunks):
    async def takes_nothing(message):
        if message["type"] == "http.response.body" and message["body"] != b"data: 1\n\n":
            await asyncio.Future()

    async def upstream():
        for chunk in chunks:
            yield chunk
        if not chunks:
            await asyncio.Future()

    async def run():
        scope = {"method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        exchange = Exchange(scope, None, takes_nothing)
        config = RouterConfig(send_timeout_s=0.2, heartbeat_s=0.1)
        source = Upstream(name="v", url="http://x", lane="short", heartbeats=True)
        async with asyncio.timeout(5):
            await Relay(exchange, source, upstream(), config).events()

    with pytest.raises(SlowClientError):
        asyncio.run(run())
