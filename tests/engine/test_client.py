"""The engine process as its parent sees it: through all it can die of."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    EngineClient,
    EngineDiedError,
    QueueFullError,
    RequestError,
    SamplingError,
)
from engine.errors import EngineError
from engine.messages import Abort, Answer, Stepped, Submit
from engine.request import Constraint, EngineInfo, EngineStats, TokenEvent, TokenLogprob
from engine.token_stream import TokenStream
from tests.engine.checkpoints import DENSE, Geometry, write_checkpoint
from tests.engine.runtime import engine, generate, request, settings

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), DENSE, Geometry())


def run(scenario, config):
    """Runs a scenario with a started client and closes it."""

    async def main():
        client = EngineClient(config)
        await client.start()
        try:
            await scenario(client)
        finally:
            await client.close()

    asyncio.run(main())


async def collect(client, each):
    await client.submit(each)
    return [token_id async for event in client.stream(each.request_id) for token_id in event.token_ids]


async def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_life(checkpoint_dir):
    """Start, serve, refuse, abort, leave, close: one process for all, since starting one takes seconds."""
    requests = [request(f"r{i}", range(1, 20 + i), max_tokens=20) for i in range(5)]
    expected = generate(engine(checkpoint_dir), *requests)

    async def scenario(client):
        assert client.state == "ready"
        assert client.info.max_model_len == 1024
        assert client.info.num_drafts == 3
        assert client.info.max_queued_requests == 1
        assert await asyncio.gather(*(collect(client, each) for each in requests)) == expected
        await until(lambda: client.stats.num_running == 0)
        assert client.stats.num_output_tokens == 100
        assert client.stats.num_free_kv_blocks == client.stats.num_kv_blocks
        await refuses_bad_requests(client)
        await aborts(client)
        await stops_when_the_reader_leaves(client)
        await holds_what_is_not_read(client)
        await hands_events_to_a_follower(client)
        await fills_its_queue(client)
        pid = client.pid
        await client.close()
        assert not is_alive(pid)
        assert client.state == "closed"
        with pytest.raises(EngineDiedError, match="closed"):
            await client.submit(request("late", [1]))

    run(scenario, settings(checkpoint_dir, max_model_len=1024, max_queued_requests=1, max_num_requests=5))


async def refuses_bad_requests(client):
    with pytest.raises(ContextLengthError):
        await client.submit(request("long", [1] * 1000, max_tokens=25))
    with pytest.raises(SamplingError, match="temperature"):
        await client.submit(request("hot", [1], temperature=-1.0))
    # the grammar is sound, but only the engine's process learns that this checkpoint spells no tokens
    for grammar, reason in (("start: nowhere\n", "unknown name"), ('start: "a"\n', r"tokenizer\.json")):
        constraint = Constraint(grammar, "response_format")
        with pytest.raises(SamplingError, match=reason) as caught:
            await client.submit(request("bound", [1], constraint=constraint, stop_token_ids=(2,)))
        assert caught.value.param == "response_format"
    with pytest.raises(RequestError, match="got 320"):
        await client.submit(request("foreign", [320]))
    await client.submit(request("twice", [1]))
    with pytest.raises(RequestError, match="in use"):
        await client.submit(request("twice", [1]))
    assert [event async for event in client.stream("twice")][-1].finish_reason == "length"
    with pytest.raises(RequestError, match="not submitted"):
        await anext(client.stream("twice"))


async def aborts(client):
    await client.submit(request("aborted", [1, 2], max_tokens=900))
    reasons = []
    async for event in client.stream("aborted"):
        reasons.append(event.finish_reason)
        await client.abort("aborted")
    assert reasons[-1] == "abort"
    await client.submit(request("again", [1, 2], max_tokens=900))
    await client.abort("again")
    await client.submit(request("again", [1, 2], max_tokens=3))
    events = [event async for event in client.stream("again")]
    assert (sum(len(event.token_ids) for event in events), events[-1].finish_reason) == (3, "length")
    assert len(reasons) < 20
    await client.abort("aborted")
    await client.abort("unknown")


async def stops_when_the_reader_leaves(client):
    aborted = client.stats.num_aborted
    await client.submit(request("left", [1, 2], max_tokens=900))
    stream = client.stream("left")
    await anext(stream)
    await stream.aclose()
    await until(lambda: client.stats.num_aborted == aborted + 1)
    assert client.stats.num_free_kv_blocks == client.stats.num_kv_blocks


async def holds_what_is_not_read(client):
    end = client.stats.num_output_tokens + 30
    await client.submit(request("unread", [1, 2], max_tokens=30, logprobs=1))
    await until(lambda: client.stats.num_output_tokens == end)
    (event,) = [event async for event in client.stream("unread")]
    assert len(event.token_ids) == len(event.logprobs) == 30
    assert event.finish_reason == "length"


async def hands_events_to_a_follower(client):
    """What came before it followed too, and nothing after it has ended the request."""
    end = client.stats.num_output_tokens + 20
    await client.submit(request("followed", [1, 2], max_tokens=20))
    await until(lambda: client.stats.num_output_tokens == end)
    events = []
    client.follow("followed", events.append)
    assert [(len(event.token_ids), event.finish_reason) for event in events] == [(20, "length")]
    await client.submit(request("followed", [1, 2], max_tokens=900))
    events.clear()
    client.follow("followed", events.append)
    with pytest.raises(RequestError, match="already read"):
        client.follow("followed", events.append)
    await until(lambda: len(events) > 2)
    aborted = client.stats.num_aborted
    await client.abort("followed")
    count = len(events)
    await until(lambda: client.stats.num_aborted == aborted + 1)
    assert len(events) == count
    assert not client._streams


async def fills_its_queue(client):
    names = [f"q{i}" for i in range(3)]
    for name in names[:2]:
        await client.submit(request(name, [1, 2], max_tokens=700))
    with pytest.raises(QueueFullError, match="try again"):
        await client.submit(request(names[2], [1, 2], max_tokens=700))
    aborted = client.stats.num_aborted
    for name in names[:2]:
        await client.abort(name)
    # nobody reads them, so nothing else would forget them
    assert not client._streams
    await until(lambda: client.stats.num_aborted == aborted + 2)


class Child:
    """A process that says nothing of its own accord."""

    def __init__(self, error=None):
        self.sent, self.error = [], error

    async def send(self, message):
        if self.error is not None:
            raise self.error
        self.sent.append(message)


def ready_client(child):
    client = EngineClient(settings(ROOT))
    client._child, client._state = child, "ready"
    client._info = EngineInfo("", 100, 100, "cpu", 0, 8, 6400)
    return client


def test_an_answer_that_nobody_waits_for_is_not_that_of_the_next_request():
    async def scenario():
        client = ready_client(Child())
        cancelled = asyncio.create_task(client.submit(request("a", [1], max_tokens=9)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        submitted = asyncio.create_task(client.submit(request("a", [2], max_tokens=1)))
        await asyncio.sleep(0)
        assert [type(message) for message in client._child.sent] == [Submit, Abort, Submit]
        # in the order in which an engine says it
        client._receive(Answer("a"))
        client._receive(Stepped([TokenEvent("a", (7,))], EngineStats()))
        await asyncio.sleep(0)
        assert not submitted.done()
        client._receive(Answer("a"))
        await submitted
        client._receive(Stepped([TokenEvent("a", (8,), (), "length")], EngineStats()))
        assert [event.token_ids async for event in client.stream("a")] == [(8,)]
        assert not client._streams and not client._unheard

    asyncio.run(scenario())


def test_what_cannot_be_sent_is_forgotten():
    async def scenario():
        client = ready_client(Child(OverflowError("too large")))
        for _ in range(2):
            with pytest.raises(OverflowError):
                await client.submit(request("a", [1]))
        assert not client._streams

    asyncio.run(scenario())


def test_kill_under_load_fails_the_requests_and_the_engine_comes_back(checkpoint_dir):
    async def scenario(client):
        expected = await collect(client, request("before", [1, 2, 3]))
        for index in range(5):
            await client.submit(request(f"r{index}", [1, 2, 3], max_tokens=1500))
        streams = [client.stream(f"r{index}") for index in range(5)]
        for stream in streams:
            await anext(stream)
        killed = client.pid
        os.kill(killed, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDiedError, match=r"died while it worked on this request: .*SIGKILL") as caught:
                [event async for event in stream]
            assert caught.value.retry_after_s >= 1
        assert client.state == "restarting"
        assert client.stats.num_running == 0
        with pytest.raises(EngineDiedError, match="restarting"):
            await client.submit(request("meanwhile", [1]))
        await until(lambda: client.state == "ready")
        assert client.pid != killed
        assert await collect(client, request("after", [1, 2, 3])) == expected

    run(scenario, settings(checkpoint_dir, kv_cache_tokens=8192))


def test_a_hang_is_noticed_and_ctrl_c_is_left_to_the_parent(checkpoint_dir):
    async def scenario(client):
        os.kill(client.pid, signal.SIGINT)
        assert len(await collect(client, request("a", [1]))) == 16
        await asyncio.sleep(2.3)
        assert client.state == "ready", "an idle engine makes no step and is not hung"
        hung = client.pid
        os.kill(hung, signal.SIGSTOP)
        with pytest.raises(EngineDiedError, match="no step"):
            await collect(client, request("b", [1]))
        await until(lambda: client.state == "ready")
        assert not is_alive(hung)

    run(scenario, settings(checkpoint_dir, hang_timeout_s=2.0))


def test_an_exception_in_a_step_reaches_the_log(checkpoint_dir, caplog, monkeypatch, tmp_path):
    """The process is told to fail by a module that it imports first."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'engine.process' in sys.orig_argv:\n"
        "    from engine.scheduler import Scheduler\n"
        "    def schedule(self):\n"
        "        raise ZeroDivisionError('deliberate')\n"
        "    Scheduler.schedule = schedule\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")

    async def scenario(client):
        with pytest.raises(EngineDiedError, match="ZeroDivisionError: deliberate"):
            await collect(client, request("a", [1]))

    run(scenario, settings(checkpoint_dir))
    assert "in schedule" in caplog.text


@pytest.mark.parametrize(
    "changes, error, says",
    [
        ({"model": "/nowhere"}, CheckpointError, "config.json is missing"),
        ({"kv_cache_tokens": 10**12}, CapacityError, "or less"),
    ],
)
def test_what_can_never_start_is_said_once_and_at_once(checkpoint_dir, changes, error, says):
    async def scenario():
        client = EngineClient(settings(checkpoint_dir, **changes))
        with pytest.raises(error, match=says):
            await client.start()
        assert client.state == "closed"
        assert client.pid is None

    asyncio.run(scenario())


def test_three_deaths_while_starting_are_enough(checkpoint_dir, monkeypatch, tmp_path, caplog):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'engine.process' in sys.orig_argv: os.abort()\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scenario():
        client = EngineClient(settings(checkpoint_dir))
        with pytest.raises(EngineDiedError, match=r"3 times while starting: .*SIGABRT"):
            await client.start()
        assert client.state == "closed"

    asyncio.run(scenario())
    assert caplog.text.count("died while starting") == 3


def test_the_engine_ends_with_its_parent(checkpoint_dir, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from config import EngineConfig\n"
        "from engine import EngineClient\n"
        "async def main():\n"
        "    client = EngineClient(EngineConfig(model=sys.argv[1], device='cpu', max_model_len=512))\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, script, checkpoint_dir], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    asyncio.run(until(lambda: not is_alive(child), timeout_s=5))


def test_a_stream_joins_what_was_not_read():
    async def scenario():
        stream = TokenStream()
        stream.put(TokenEvent("a", (1, 2), (TokenLogprob(-1.0), TokenLogprob(-2.0)), num_cached_tokens=64))
        stream.put(TokenEvent("a", (3,), (TokenLogprob(-3.0),), "length"))
        joined = await stream.get()
        assert joined == TokenEvent(
            "a", (1, 2, 3), (TokenLogprob(-1.0), TokenLogprob(-2.0), TokenLogprob(-3.0)), "length", 64
        )

    asyncio.run(scenario())


def test_a_follower_gets_what_waited_and_then_the_error():
    async def scenario():
        stream, got = TokenStream(), []
        stream.put(TokenEvent("a", (1,)))
        stream.put(TokenEvent("a", (2,)))
        stream.follow(got.append)
        stream.put(TokenEvent("a", (3,)))
        stream.fail(EngineDiedError("gone"))
        assert [event.token_ids for event in got[:2]] == [(1, 2), (3,)]
        assert isinstance(got[2], EngineDiedError)
        late = []
        failed = TokenStream()
        failed.admit()
        failed.fail(EngineDiedError("gone"))
        failed.follow(late.append)
        assert len(late) == 1

    asyncio.run(scenario())


def test_a_failed_stream_gives_what_it_had_first():
    async def scenario():
        stream = TokenStream()
        stream.admit()
        stream.put(TokenEvent("a", (1,)))
        stream.fail(EngineDiedError("gone"))
        assert (await stream.get()).token_ids == (1,)
        with pytest.raises(EngineError, match="gone"):
            await stream.get()

    asyncio.run(scenario())


def test_low_memory_at_a_restart_is_waited_for_until_it_lasts(checkpoint_dir, monkeypatch, tmp_path, caplog):
    """Processes that are not to start find a file, which says how many of them there are."""
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, sys, types\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "if 'engine.process' in sys.orig_argv and count.exists():\n"
        "    left = int(count.read_text()) - 1\n"
        "    count.write_text(str(left)) if left else count.unlink()\n"
        "    def load_engine(config):\n"
        "        from engine.errors import CapacityError\n"
        "        raise CapacityError('memory is low')\n"
        "    sys.modules['engine.loading'] = types.SimpleNamespace(load_engine=load_engine)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def scenario(client):
        (tmp_path / "count").write_text("1")
        first = client.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: client.state == "ready" and client.pid not in (None, first))
        assert caplog.text.count("memory is low") == 1
        waits = []
        (tmp_path / "count").write_text("3")
        os.kill(client.pid, signal.SIGKILL)
        await until(lambda: client.state == "restarting")
        with pytest.raises(EngineDiedError) as caught:
            await client.submit(request("a", [1]))
        waits.append(caught.value.retry_after_s)
        with pytest.raises(EngineDiedError, match="3 times while starting: memory is low"):
            await asyncio.wait_for(client.gone(), 30)
        assert client.state == "closed"
        # the fourth start in a row follows 2 s of waiting; a load alone says less
        assert waits[0] >= client._load_s + 1

    run(scenario, settings(checkpoint_dir, kv_cache_tokens=8192))


def test_closing_ends_a_start_that_goes_on(checkpoint_dir):
    async def scenario():
        client = EngineClient(settings(checkpoint_dir))
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(EngineDiedError, match="was closed"):
            await asyncio.wait_for(starting, 5)
        await client.gone()

    asyncio.run(scenario())
