"""A second upstream is tried only before the first one's headers, and only for what may be repeated."""

import asyncio
import socket
import time

import pytest

from config import RouterConfig, Upstream
from router.health import LATER_S, SOON_S
from router.transport import Transport, UnreachableError
from tests.router.live import echo, eventually

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SLOW_CHECKS = {"health_interval_s": 60}


def answers(status, value, headers="", media_type="application/json"):
    async def answer(received, connection):
        await connection.answer(status, value, headers, media_type)

    return answer


async def resets(received, connection):
    connection.reset()
    raise ConnectionError


async def talks_nonsense(received, connection):
    await connection.send(b"SSH-2.0-OpenSSH\r\n\r\n")
    raise ConnectionError


async def sends_a_huge_header(received, connection):
    await connection.send(b"HTTP/1.1 200 OK\r\nx-big: " + b"x" * 10_000_000 + b"\r\n\r\n")
    raise ConnectionError


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "answer", [resets, answers(502, {}), answers(503, {}), answers(502, b"<html>", "", "text/html")]
)
def test_another_candidate_answers(gateway, upstream, client, answer):
    long, short = upstream(), upstream(answer=answer)
    running = gateway(long=long, short=short, **SLOW_CHECKS)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    assert (len(short.requests), len(long.requests)) == (1, 1)
    assert long.requests[0].body == short.requests[0].body
    eventually(lambda: running.num_in_flight == 0)


@pytest.mark.parametrize("fields", [{"store": True}, {"previous_response_id": "resp_1"}])
def test_what_may_not_be_repeated_is_sent_once(gateway, upstream, client, fields):
    long, short = upstream(), upstream(answer=answers(503, {"error": {"message": "its own"}}))
    url = gateway(long=long, short=short, **SLOW_CHECKS).url
    response = client.post(url + "/v1/responses", json={"model": "tiny", "input": "hi"} | fields)
    assert (response.status_code, response.json()) == (503, {"error": {"message": "its own"}})
    short.answer = resets
    assert client.post(url + "/v1/responses", json={"model": "tiny", "input": "hi"} | fields).status_code == 502
    assert long.requests == []


def test_explicit_path_stays_in_its_lane(gateway, upstream, client):
    long, short = upstream(), upstream(answer=resets)
    response = client.post(gateway(long=long, short=short, **SLOW_CHECKS).url + "/chat" + CHAT, json=BODY)
    assert response.status_code == 502
    assert "vllm" in response.json()["error"]["message"]
    assert long.requests == []


def test_length_refusal_of_the_short_lane_goes_to_the_long_lane(gateway, upstream, client):
    refusal = {"error": {"message": "This model's maximum context length is 64 tokens.", "type": "BadRequestError"}}
    long, short = upstream(), upstream(answer=answers(400, refusal))
    running = gateway(long=long, short=short)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    assert (len(short.requests), len(long.requests)) == (1, 1)
    # the path says short, so the refusal is the answer
    assert client.post(running.url + "/chat" + CHAT, json=BODY).json() == refusal


def test_other_refusals_are_the_answer(gateway, upstream, client):
    long, short = upstream(), upstream(answer=answers(400, {"error": {"message": "bad temperature"}}))
    assert client.post(gateway(long=long, short=short).url + CHAT, json=BODY).status_code == 400
    assert long.requests == []


def test_everything_down(gateway, upstream, client):
    nobody = Upstream(name="lost", url=f"http://127.0.0.1:{free_port()}", lane="long")
    url = gateway(more=[nobody]).url
    response = client.post(url + CHAT, json=BODY)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (503, "server_is_overloaded")
    assert "lost" in error["message"]
    assert 1 <= int(response.headers["retry-after"]) <= 60
    assert int(response.headers["retry-after-ms"]) == 1000 * int(response.headers["retry-after"])
    anthropic = client.post(url + "/v1/messages", json=BODY)
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (529, "overloaded_error")


def test_upstream_goes_and_comes_back(gateway, upstream, client):
    long = upstream()
    running = gateway(long=long)
    url = running.url + CHAT
    assert client.post(url, json=BODY).status_code == 200
    long.stop()
    assert client.post(url, json=BODY).status_code in (502, 503)
    eventually(lambda: not running.app.is_ready())
    assert client.post(url, json=BODY).status_code == 503
    long.start(long.port)
    eventually(running.app.is_ready)
    assert client.post(url, json=BODY).status_code == 200


def test_killed_upstream_serves_again_within_a_second(gateway, upstream, client):
    """With the interval between checks that gateways have, of which several would pass."""
    long = upstream()
    running = gateway(long=long, health_interval_s=RouterConfig().health_interval_s)
    url = running.url + CHAT
    assert client.post(url, json=BODY).status_code == 200
    long.stop()
    # the request itself makes the next check come at once
    client.post(url, json=BODY)
    assert eventually(lambda: not running.app.is_ready()) < 1
    time.sleep(2)
    long.start(long.port)
    assert eventually(lambda: client.post(url, json=BODY).status_code == 200) < LATER_S + SOON_S + 0.5


def test_upstream_that_loads_after_its_port_is_open_is_asked_often(gateway, upstream, client):
    long = upstream(ready=503)
    running = gateway(long=long, health_interval_s=60)
    assert client.post(running.url + CHAT, json=BODY).status_code == 503
    time.sleep(1)
    long.ready = 200
    assert eventually(running.app.is_ready) < LATER_S + SOON_S + 0.5


def test_away_lane_hands_over_before_anything_is_sent(gateway, upstream, client):
    long, short = upstream(), upstream()
    running = gateway(long=long, short=short)
    short.ready = 503
    eventually(lambda: not running.app.workers["vllm"].healthy)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    assert (len(short.requests), len(long.requests)) == (0, 1)


def test_silent_upstream(gateway, upstream, client):
    async def silent(received, connection):
        await connection.closed()
        raise ConnectionError

    long = upstream(answer=silent)
    at_once = {"slowest_prefill_tokens_per_s": 1e9}
    running = gateway(long=long, first_byte_timeout_s=0.3, answer_timeout_s=0.6, **at_once)
    streamed = client.post(running.url + CHAT, json=BODY | {"stream": True})
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (504, "upstream_timeout")
    whole = client.post(running.url + CHAT, json=BODY)
    assert "within 0.6 s" in whole.json()["error"]["message"]
    eventually(lambda: long.num_closed == 2)


def test_long_prompt_is_given_the_time_that_it_takes(gateway, upstream, client):
    async def slow(received, connection):
        await asyncio.sleep(0.6)
        await connection.answer(200, {})

    long = upstream(answer=slow)
    url = gateway(long=long, first_byte_timeout_s=0.2, slowest_prefill_tokens_per_s=1000).url + CHAT
    body = BODY | {"stream": True}
    assert client.post(url, json=body).status_code == 504
    # about 2,000 tokens
    body["messages"] = [{"role": "user", "content": "word " * 1600}]
    assert client.post(url, json=body).status_code == 200


@pytest.mark.parametrize("answer", [talks_nonsense, sends_a_huge_header, answers(500, b"<html>", "", "text/html")])
def test_no_proper_answer_is_a_502_that_names_the_upstream(gateway, upstream, client, answer):
    running = gateway(long=upstream(answer=answer), **SLOW_CHECKS)
    response = client.post(running.url + CHAT, json=BODY)
    assert response.status_code == 502
    assert "engine" in response.json()["error"]["message"]
    eventually(lambda: running.num_in_flight == running.num_open == 0)


def test_refused_key_of_the_gateway_is_not_the_clients_fault(gateway, upstream, client):
    response = client.post(gateway(long=upstream(answer=answers(401, {"error": {}}))).url + CHAT, json=BODY)
    assert response.status_code == 502
    assert "gateway's own key" in response.json()["error"]["message"]


def test_redirects_are_not_followed(gateway, upstream, client):
    elsewhere = upstream(answer=echo)
    long = upstream(answer=answers(307, {}, f"location: {elsewhere.url}/v1/x\r\n"))
    response = client.post(gateway(long=long).url + CHAT, json=BODY)
    assert response.status_code == 502
    assert elsewhere.requests == []


def test_dropped_idle_connection_harms_no_request(gateway, upstream, client):
    async def answer_and_close(received, connection):
        await connection.answer(200, {}, "connection: close\r\n")
        connection.reset()

    url = gateway(long=upstream(answer=answer_and_close)).url + CHAT
    assert [client.post(url, json=BODY).status_code for _ in range(20)] == [200] * 20


def test_connection_idle_for_long_is_not_used_again(gateway, upstream, client):
    """A server drops idle connections; a request that meets one of them may not be sent twice."""
    last = {}

    async def drops_idle_connections(received, connection):
        before, last[connection.peer] = last.get(connection.peer), time.monotonic()
        if before is not None and time.monotonic() - before > 0.4:
            await resets(received, connection)
        await connection.answer(200, {})

    once = BODY | {"store": True}
    url = gateway(long=upstream(answer=drops_idle_connections), pool_idle_s=0.2, **SLOW_CHECKS).url + CHAT
    for _ in range(3):
        assert client.post(url, json=once).status_code == 200
        time.sleep(0.6)
    # common servers drop theirs after five seconds
    assert RouterConfig().pool_idle_s < 5


def test_refused_connection_is_told_as_such(gateway, client):
    url = f"http://127.0.0.1:{free_port()}"
    lost = Upstream(name="lost", url=url, lane="long", models=("tiny",))
    response = client.post(gateway(more=[lost], wait=False, **SLOW_CHECKS).url + CHAT, json=BODY)
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    message = response.json()["error"]["message"]
    assert url in message and ("not reachable" in message)


def test_refused_connection_is_told_by_the_request_that_meets_it(threads):
    async def run():
        transport = Transport(RouterConfig())
        try:
            await transport.open("lost", "GET", f"http://127.0.0.1:{free_port()}/ready", {}, b"", 5.0)
        finally:
            await transport.aclose()

    with pytest.raises(UnreachableError, match=r"^upstream lost is not reachable: no connection to http://127"):
        threads.run(run())


def test_what_no_upstream_can_be_asked_is_the_clients_fault(gateway, upstream, client):
    long = upstream()
    running = gateway(long=long, **SLOW_CHECKS)
    response = client.post(running.url + CHAT + "?" + "x" * 60_000, json=BODY)
    assert response.status_code == 200
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
        connection.settimeout(10)
        head = f"POST {CHAT}?{'x' * 65_505} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += "content-type: application/json\r\ncontent-length: 16\r\n\r\n"
        connection.sendall(head.encode() + b'{"model":"tiny"}')
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert answer.startswith(b"HTTP/1.1 400") and b"invalid_request_error" in answer
    assert running.app.workers["engine"].obstacle(time.monotonic()) is None


@pytest.mark.parametrize("value", [b"caf\xe9", "caf\u00e9".encode()])
def test_header_values_need_not_be_ascii(gateway, upstream, client, value):
    long = upstream()
    response = client.post(gateway(long=long).url + CHAT, json=BODY, headers={"user-agent": value})
    assert response.status_code == 200
    assert long.requests[0].headers["user-agent"].encode("latin-1").decode() == "caf\u00e9"
