"""A client's own retry and the request that it gave up."""

import asyncio
import threading
import time

import pytest

from config.keys import digest, generate
from router.retries import WAIT_S, OpenRequests, is_retry
from tests.router.live import echo, eventually
from tests.router.test_streams import never_ends

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("count", "is_one"), [("0", False), ("1", True), ("02", True), ("", False), ("x", False), ("-1", False)]
)
def test_count(count, is_one):
    assert is_retry({"x-stainless-retry-count": count}) is is_one
    assert not is_retry({})


def test_only_equal_requests_of_the_same_key_are_waited_for():
    async def run():
        requests = OpenRequests()
        older = requests.begin("a", "/x", b"1")
        others = [requests.begin("b", "/x", b"1"), requests.begin("a", "/y", b"1"), requests.begin("a", "/x", b"2")]
        started = time.monotonic()
        assert await requests.older_ended(requests.begin("c", "/x", b"1")) == 0
        assert time.monotonic() - started < WAIT_S / 2
        asyncio.get_running_loop().call_later(0.05, requests.end, older)
        retry = requests.begin("a", "/x", b"1")
        assert await requests.older_ended(retry) == 1
        # one that goes on is left alone, after a short wait
        assert await requests.older_ended(requests.begin("a", "/x", b"1")) == 0
        assert time.monotonic() - started > WAIT_S
        assert not any(one.ended.is_set() for one in others)

    asyncio.run(run())


@pytest.fixture
def one_place(gateway, upstream, tmp_path):
    """A gateway with one place for its key, and an upstream that never ends its first answer."""
    secret = generate()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest(secret)}"\nconcurrent_requests = 1')
    long = upstream(answer=never_ends)
    return gateway(long=long, keys_file=path), long, {"authorization": f"Bearer {secret}"}


def test_retry_waits_for_the_request_that_its_client_gave_up(one_place, client):
    running, long, headers = one_place
    with client.stream("POST", running.url + CHAT, json=BODY, headers=headers) as older:
        events = older.iter_raw()
        next(events)
        long.answer = echo
        # the connection closes a moment after the retry is there, as it does behind a proxy
        threading.Timer(0.15, older.close).start()
        retry = client.post(running.url + CHAT, json=BODY, headers=headers | {"x-stainless-retry-count": "1"})
    assert retry.status_code == 200
    assert running.app.metrics.replaced._value.get() == 1
    eventually(lambda: running.num_open == running.num_in_flight == 0)
    assert running.app._open._open == {}


def test_without_a_retry_count_or_a_client_that_left_nothing_is_joined(one_place, client):
    running, long, headers = one_place
    with client.stream("POST", running.url + CHAT, json=BODY, headers=headers) as older:
        events = older.iter_raw()
        next(events)
        assert client.post(running.url + CHAT, json=BODY, headers=headers).status_code == 429
        again = headers | {"x-stainless-retry-count": "1"}
        assert client.post(running.url + CHAT, json=BODY, headers=again).status_code == 429
        assert long.num_closed == 0 and running.num_in_flight == 1
    assert running.app.metrics.replaced._value.get() == 0
    eventually(lambda: running.num_open == 0)
