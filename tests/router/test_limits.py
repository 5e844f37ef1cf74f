"""Limits in Redis: the decisions of the ledger in memory, shared by gateways, and what holds while Redis is away."""

import asyncio
import json
import shutil
import socket
import subprocess
import time
from unittest import mock

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import ConnectionError as RedisConnectionError

from config import Key, RouterConfig
from config.keys import digest, generate
from router.errors import QuotaError, UnavailableError
from router.ledger import LedgerError, MemoryLedger
from router.limits import Limits
from router.metrics import Metrics
from router.quota import Usage, refusal
from router.redis_ledger import RedisLedger
from tests.router.live import eventually

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


class RedisServer:
    def __init__(self, directory):
        assert shutil.which("redis-server"), "Debian's redis-server is not installed"
        self._directory = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self._port}"

    def start(self):
        flags = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = ["redis-server", *flags, "--dir", str(self._directory)]
        self._popen = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        eventually(self._answers, 10)

    def stop(self):
        self._popen.terminate()
        self._popen.wait(10)

    def pause(self, milliseconds):
        with Redis.from_url(self.url) as client:
            client.execute_command("CLIENT", "PAUSE", milliseconds, "ALL")

    def flush(self):
        with Redis.from_url(self.url) as client:
            client.flushall()

    def _answers(self):
        try:
            with Redis.from_url(self.url) as client:
                return client.ping()
        except RedisConnectionError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    yield running
    running.stop()


@pytest.fixture
def redis(server):
    server.flush()
    return server


def key(**limits):
    return Key(name="a", sha256="a" * 64, **limits)


@pytest.fixture
def key_file(tmp_path):
    def write(**limits):
        secret = generate()
        lines = ["[[keys]]", 'name = "alice"', f'sha256 = "{digest(secret)}"']
        path = tmp_path / "keys.toml"
        path.write_text("\n".join(lines + [f"{name} = {json.dumps(value)}" for name, value in limits.items()]))
        return path, {"authorization": f"Bearer {secret}"}

    return write


LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "requests_per_minute": st.integers(1, 5),
        "prompt_tokens_per_minute": st.integers(1, 300),
        "tokens_per_day": st.integers(1, 2000),
        "concurrent_requests": st.integers(1, 3),
    },
)
ADMISSIONS = st.tuples(st.integers(0, 400), st.sampled_from([None, "c", "d"]))
USAGES = st.one_of(
    st.none(), st.builds(Usage, st.integers(0, 400), st.one_of(st.none(), st.integers(0, 100)), st.integers(0, 90))
)
SETTLEMENTS = st.tuples(st.integers(0, 3), USAGES, st.booleans())


async def outcome(ledger, *admission):
    """What can be compared: the refusal, or what was charged and is left."""
    try:
        grant = await ledger.admit(*admission)
    except QuotaError as error:
        return str(error), None
    left = grant.balance
    levels = [level for level in (left.requests, left.tokens) if level is not None]
    return (grant.tokens, left.num_running, left.day_tokens, levels), grant


async def compare(url, limits, steps):
    """Asks the ledger in memory at the instants of Redis' own clock."""
    shared, now, refused_at = RedisLedger(url), 0.0, []
    own = MemoryLedger(lambda: now)
    running = []

    def noted(key, balance, tokens):
        refused_at.append(balance.at_s)
        return refusal(key, balance, tokens)

    try:
        for number, step in enumerate(steps):
            if len(step) == 2:
                # the limits of a key change in mid-run
                admission = (key(**limits[number > 7]), *step)
                with mock.patch("router.redis_ledger.refusal", noted):
                    theirs, grant = await outcome(shared, *admission)
                now = grant.balance.at_s if grant else refused_at[-1]
                ours, own_grant = await outcome(own, *admission)
                assert (grant is None) == (own_grant is None), (theirs, ours)
                if grant is None:
                    assert theirs == ours
                else:
                    assert theirs[:3] == ours[:3] and theirs[3] == pytest.approx(ours[3], abs=1)
                    running.append((grant, own_grant))
            elif running:
                grant, own_grant = running.pop(step[0] % len(running))
                await shared.settle(grant, *step[1:])
                now = await redis_time(url)
                await own.settle(own_grant, *step[1:])
    finally:
        await shared.aclose()


async def redis_time(url):
    async with AsyncRedis.from_url(url) as client:
        seconds, microseconds = await client.time()
    return seconds + microseconds / 1e6


@pytest.mark.real
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limits=st.tuples(LIMITS, LIMITS), steps=st.lists(st.one_of(ADMISSIONS, SETTLEMENTS), max_size=14))
@example(limits=({"tokens_per_day": 50}, {}), steps=[(50, None), (1, None)])
@example(limits=({"concurrent_requests": 1}, {}), steps=[(1, None), (1, None), (0, None, False), (1, None)])
def test_both_ledgers_decide_alike(redis, limits, steps):
    redis.flush()
    asyncio.run(compare(redis.url, limits, steps))


@pytest.mark.real
def test_two_gateways_share_one_limit(redis, gateway, upstream, client, key_file):
    async def answer(received, connection):
        await connection.answer(200, {"usage": {"prompt_tokens": 10, "completion_tokens": 5}})

    path, headers = key_file(requests_per_minute=3)
    long = upstream(answer=answer)
    first, second = (gateway(long=long, keys_file=path, redis_url=redis.url).url + CHAT for _ in range(2))
    told = [client.post(url, json=BODY, headers=headers) for url in (first, second, first, second, first)]
    assert [one.status_code for one in told] == [200, 200, 200, 429, 429]
    assert [one.headers["x-ratelimit-remaining-requests"] for one in told[:3]] == ["2", "1", "0"]
    assert len(long.requests) == 3


@pytest.mark.real
def test_place_held_at_one_gateway_is_taken_at_the_other(redis, gateway, upstream, client, key_file):
    async def never(received, connection):
        await connection.start_stream()
        await connection.chunk(b"data: 1\n\n")
        await connection.closed()
        raise ConnectionError

    path, headers = key_file(concurrent_requests=1)
    long = upstream(answer=never)
    first, second = (gateway(long=long, keys_file=path, redis_url=redis.url) for _ in range(2))
    with client.stream("POST", first.url + CHAT, json=BODY, headers=headers) as response:
        # a forgotten iterator would close the response
        events = response.iter_raw()
        next(events)
        refused = client.post(second.url + CHAT, json=BODY, headers=headers)
        assert (refused.status_code, "concurrent_requests" in refused.text) == (429, True)
    eventually(lambda: first.num_open == 0)
    # the client is gone, and its place with it
    with client.stream("POST", second.url + CHAT, json=BODY, headers=headers) as response:
        assert response.status_code == 200


@pytest.mark.real
def test_places_of_a_gateway_that_died_expire_unless_renewed(redis):
    async def run():
        one = key(concurrent_requests=1)
        dead, alive = RedisLedger(redis.url, lease_s=1.0), RedisLedger(redis.url, lease_s=1.0)
        try:
            await dead.admit(one, 1, None)
            with pytest.raises(QuotaError):
                await alive.admit(one, 1, None)
            await asyncio.sleep(1.1)
            grant = await alive.admit(one, 1, None)
            await alive.renew()
            await asyncio.sleep(1.1)
            with pytest.raises(QuotaError):
                await dead.admit(one, 1, None)
            await alive.settle(grant, None, False)
            await alive.renew()
            await dead.admit(one, 1, None)
        finally:
            await dead.aclose()
            await alive.aclose()

    asyncio.run(run())


@pytest.mark.real
def test_renewal_brings_no_place_back_that_was_given_back(redis):
    async def run():
        one = key(concurrent_requests=1)
        ledger = RedisLedger(redis.url)
        try:
            grant = await ledger.admit(one, 1, None)
            await ledger.settle(grant, None, False)
            # as in a renewal that was on its way meanwhile
            ledger._leases[one.name].add(grant.lease)
            await ledger.renew()
            await ledger.admit(one, 1, None)
        finally:
            await ledger.aclose()

    asyncio.run(run())


@pytest.mark.real
def test_redis_goes_and_comes_back(tmp_path, gateway, upstream, client, key_file, caplog):
    redis = RedisServer(tmp_path)
    path, headers = key_file(requests_per_minute=2)
    caplog.set_level("INFO", "longlane.router")
    running = gateway(long=upstream(), keys_file=path, redis_url=redis.url)
    url = running.url + CHAT

    def away():
        return running.app.metrics.shared_limits_away._value.get()

    try:
        assert client.post(url, json=BODY, headers=headers).headers["x-ratelimit-remaining-requests"] == "1"
        assert away() == 0
        redis.stop()
        # this gateway's own buckets are full, and hold as well
        statuses = [client.post(url, json=BODY, headers=headers).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert away() == 1
        assert caplog.text.count("Redis is away, until it is back this gateway's own limits hold") == 1
        redis.start()
        time.sleep(1.1)
        assert client.post(url, json=BODY, headers=headers).status_code == 200
        assert away() == 0 and "Redis is back" in caplog.text
    finally:
        redis.stop()


@pytest.mark.real
def test_frozen_redis_delays_one_request_only(redis, gateway, upstream, client, key_file):
    path, headers = key_file(requests_per_minute=100)
    url = gateway(long=upstream(), keys_file=path, redis_url=redis.url).url + CHAT
    assert client.post(url, json=BODY, headers=headers).status_code == 200
    redis.pause(3000)
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        assert client.post(url, json=BODY, headers=headers).status_code == 200
        seconds.append(time.monotonic() - started)
    assert seconds[0] > 0.4 and max(seconds[1:]) < 0.4


def limits(**fields):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}"
    return Limits(RouterConfig(redis_url=url, **fields), Metrics())


def test_without_redis_the_own_limits_hold():
    async def run():
        ours = limits()
        one = key(requests_per_minute=1)
        await ours.settle(await ours.admit(one, 1, None), None, False)
        with pytest.raises(QuotaError):
            await ours.admit(one, 1, None)
        await ours.aclose()

    asyncio.run(run())


def test_without_redis_a_closed_gateway_refuses():
    async def run():
        ours = limits(limits_without_redis="closed")
        for _ in range(2):
            with pytest.raises(UnavailableError, match="cannot be checked"):
                await ours.admit(key(), 1, None)
        await ours.aclose()

    asyncio.run(run())


def test_unreachable_redis_is_a_ledger_error():
    async def run():
        ledger = RedisLedger("redis://127.0.0.1:1")
        with pytest.raises(LedgerError, match="ConnectionError"):
            await ledger.admit(key(), 1, None)
        await ledger.aclose()

    asyncio.run(run())


def test_address_of_redis_is_checked():
    with pytest.raises(ValueError, match="redis://"):
        RouterConfig(redis_url="http://x")


def test_password_of_redis_is_not_shown():
    assert "hidden" not in repr(RouterConfig(redis_url="redis://:hidden@x"))
