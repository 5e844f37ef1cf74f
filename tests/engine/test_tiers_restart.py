"""The tiers through the real engine process: killed under its parent, and started anew as a service."""

import asyncio
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import EngineClient
from engine.cache.host_slab import FRONT, Geometry, HostSlab, Layout
from engine.checkpoint_dir import EMBEDDED_DIR
from tests.engine.runtime import Output, engine, generate, request, settings

ROOT = Path(__file__).parent.parent.parent
# no more than one of the prompts below fits the device
SMALL = {"max_model_len": 512, "kv_cache_tokens": 512, "host_cache_bytes": 256 * 2**20}


@pytest.fixture(scope="module")
def prompts():
    return [random.Random(seed).choices(range(256), k=400) for seed in range(3)]


@pytest.fixture(scope="module")
def cold(prompts):
    return generate(engine(EMBEDDED_DIR, prefix_caching=False, max_model_len=512), *requests(prompts))


def requests(prompts):
    return [request(f"r{i}", prompt, max_tokens=8) for i, prompt in enumerate(prompts)]


async def ask(client, each):
    output = Output()
    await client.submit(each)
    async for event in client.stream(each.request_id):
        output.add(event)
    return output


async def ask_all(client, prompts):
    return [await ask(client, each) for each in requests(prompts)]


async def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.02)


def slab_of(client):
    """The parent's own view of the memory that it lends to its engine."""
    _, num_blocks, num_states, *sizes, _ = FRONT.unpack(os.pread(client._host_file, FRONT.size, 0))
    layout = Layout(Geometry(*sizes), num_blocks, num_states)
    return HostSlab(layout, mmap.mmap(client._host_file, layout.num_bytes))


def states_in(client):
    return sum(record.is_state for record, _ in slab_of(client).records())


def run(scenario, **changes):
    async def main():
        client = EngineClient(settings(EMBEDDED_DIR, **SMALL | changes))
        await client.start()
        try:
            await scenario(client)
        finally:
            await client.close()

    asyncio.run(main())


async def kill(client):
    killed = client.pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: client.state == "ready" and client.pid not in (None, killed))


def test_a_killed_engine_leaves_its_cache_to_the_next_one(prompts, cold):
    async def scenario(client):
        outputs = await ask_all(client, prompts)
        assert [output.token_ids for output in outputs] == cold
        await until(lambda: states_in(client) >= len(prompts))
        await kill(client)
        outputs = await ask_all(client, prompts)
        assert [output.token_ids for output in outputs] == cold
        assert [output.num_cached_tokens for output in outputs] == [384] * len(prompts)
        # once more, now that the second has written beside what the first had left, and with a byte that is not
        # what it was wherever a state lies
        await until(lambda: states_in(client) >= len(prompts))
        slab = slab_of(client)
        for record, cell in slab.records():
            if record.is_state:
                slab.memory[slab.layout.state(cell)] ^= 1
        await kill(client)
        outputs = await ask_all(client, prompts)
        assert [output.token_ids for output in outputs] == cold
        assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
        assert client.stats.num_host_damaged >= len(prompts)

    run(scenario)


def test_a_service_that_starts_anew_goes_on_with_what_lies_on_disk(prompts, cold, tmp_path):
    changes = {"disk_cache_dir": str(tmp_path)}

    async def first(client):
        outputs = await ask_all(client, prompts)
        assert [output.token_ids for output in outputs] == cold
        # at each prompt's end, and at its answer's
        await until(lambda: len(list(tmp_path.rglob("*.state"))) >= len(prompts))
        await until(lambda: len(list(tmp_path.rglob("*.kv"))) >= 6 * len(prompts))

    async def second(client):
        outputs = await ask_all(client, prompts)
        assert [output.token_ids for output in outputs] == cold
        assert [output.num_cached_tokens for output in outputs] == [384] * len(prompts)
        assert client.stats.num_disk_tokens == 384 * len(prompts)

    run(first, **changes)
    run(second, **changes)


def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio\n"
        "from config import EngineConfig\n"
        "from engine import EngineClient\n"
        "async def main():\n"
        "    client = EngineClient(EngineConfig(device='cpu', max_model_len=512, host_cache_bytes=2**26))\n"
        "    await client.start()\n"
        "    print(client.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        child = int(parent.stdout.readline())
        assert all(num_slabs(pid) for pid in (parent.pid, child))
        parent.kill()
    asyncio.run(until(lambda: not num_slabs(child), timeout_s=5))
    assert not list(Path("/dev/shm").glob("*longlane*"))


def num_slabs(pid):
    """Descriptors of such memory that a process has open."""
    try:
        return sum("longlane-host-cache" in os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return 0


def test_a_closed_client_holds_no_memory(prompts):
    files = []

    async def scenario(client):
        files.append(client._host_file)
        assert is_slab(files[0])

    run(scenario)
    assert not is_slab(files[0])


def is_slab(file):
    try:
        return "longlane-host-cache" in os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:
        return False
