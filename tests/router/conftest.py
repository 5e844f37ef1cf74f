import contextlib

import httpx
import pytest

from config import Upstream
from tests.router.live import LoopThread, ScriptedUpstream, running_gateway


@pytest.fixture(scope="session")
def threads():
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture
def upstream(threads):
    """Makes upstreams: ``upstream(answer=..., models=...)``."""
    started = []

    def start(**fields):
        started.append(ScriptedUpstream(threads, **fields).start())
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def gateway(threads):
    """Makes gateways: ``gateway(long=upstream, short=upstream, **settings)``."""
    with contextlib.ExitStack() as stack:

        def start(long=None, short=None, more=(), heartbeats=False, wait=True, **settings):
            upstreams = [Upstream(name="engine", url=long.url, lane="long", key="sk-upstream")] if long else []
            if short:
                upstreams.append(Upstream(name="vllm", url=short.url, lane="short", heartbeats=heartbeats))
            return stack.enter_context(running_gateway(threads, *upstreams, *more, wait=wait, **settings))

        yield start


@pytest.fixture
def client():
    with httpx.Client(timeout=20, trust_env=False) as http:
        yield http
