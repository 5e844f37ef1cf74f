import time

import pytest

from config import Upstream
from router.breaker import BREAKS_AFTER, OPEN_S, WITHIN_S, Breaker
from router.worker import Health, Worker
from tests.router.live import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def after(*times):
    breaker = Breaker()
    for at in times:
        breaker = breaker.after_failure(at)
    return breaker


def test_five_failures_within_thirty_seconds_open_it():
    assert (BREAKS_AFTER, WITHIN_S) == (5, 30.0)
    assert after(0, 1, 2, 3).state(3) == "closed"
    assert after(0, 1, 2, 3, 29.9).state(29.9) == "open"
    assert after(0, 1, 2, 3, 30.1).state(30.1) == "closed"
    assert after(0, 1, 2, 3).after_success(3).after_failure(4).state(4) == "closed"


def test_half_open_lets_one_try_decide():
    breaker = after(0, 1, 2, 3, 4)
    later = 4 + OPEN_S
    assert not breaker.admits(later - 1)
    assert breaker.admits(later) and breaker.state(later) == "half-open"
    assert breaker.after_failure(later).state(later + OPEN_S - 1) == "open"
    assert breaker.after_success(later) == Breaker()
    # what was sent before it opened decides nothing
    assert breaker.after_success(5) == breaker.after_failure(5) == breaker


def test_one_try_at_a_time_and_a_client_that_leaves_decides_nothing():
    worker = Worker(Upstream(name="a", url="http://x", lane="long"), Health(True), breaker=after(0, 1, 2, 3, 4))
    later = 4 + OPEN_S
    assert worker.obstacle(5) == "failed 5 requests in a row"
    with worker.lease():
        assert worker.obstacle(later) is not None
    assert worker.obstacle(later) is None
    with worker.lease():
        worker.note_success(later)
    assert worker.breaker == Breaker()
    worker.is_draining = True
    assert worker.obstacle(later) == "is draining"


async def breaks_off(received, connection):
    await connection.start_stream()
    await connection.chunk(b'data: {"n":1}\n\n')
    connection.reset()
    raise ConnectionError


async def never_answers(received, connection):
    await connection.closed()
    raise ConnectionError


@pytest.mark.parametrize("answer", [breaks_off, never_answers])
def test_upstream_that_fails_while_its_checks_succeed_gets_no_more(gateway, upstream, client, answer):
    long, short = upstream(), upstream(answer=answer)
    running = gateway(long=long, short=short, first_byte_timeout_s=0.2)
    worker = running.app.workers["vllm"]
    for _ in range(BREAKS_AFTER):
        client.post(running.url + "/chat" + CHAT, json=BODY | {"stream": True})
    assert len(short.requests) == BREAKS_AFTER and worker.healthy
    refused = client.post(running.url + "/chat" + CHAT, json=BODY)
    assert (refused.status_code, "failed 5 requests in a row" in refused.text) == (503, True)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    assert (len(short.requests), len(long.requests)) == (BREAKS_AFTER, 1)
    eventually(lambda: running.app.metrics.breaker_open.labels("vllm")._value.get() == 1)
    # half a minute later one request may try
    worker.breaker = Breaker(worker.breaker.failures, time.monotonic() - OPEN_S)
    long.answer, short.answer = answer, long.answer
    assert client.post(running.url + "/chat" + CHAT, json=BODY).status_code == 200
    assert worker.breaker == Breaker()
