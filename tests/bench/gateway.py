"""`python -m tests.bench.gateway`: what the gateway adds, with keys, limits and accounts on.

The same load goes to a scripted upstream directly and through the gateway, one after the other: short calls at a fixed
rate, whether or not earlier ones have been answered; then streams whose events carry the time at which they were sent,
beside idle streams that carry heartbeats only; idle ones begin over the time between two heartbeats, the others after
them over a second. What is added is the difference of two percentiles.
"""

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop

from config import Key
from config.keys import digest, generate, write_keys
from tests.bench.programs import free_port, gateway, machine, percentile, program, wait_ready
from tests.bench.upstream import HEARTBEAT_S

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Say ok."}]
PLENTY = {"requests_per_minute": 10**6, "prompt_tokens_per_minute": 10**9, "concurrent_requests": 10**5}


@dataclass(frozen=True)
class Target:
    """Where the load goes. pid: of the process that is looked at, the gateway's in both cases."""

    url: str
    headers: dict[str, str]
    pid: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--streams", type=int, default=150)
    parser.add_argument("--events", type=float, default=50.0)
    parser.add_argument("--idle", type=int, default=1000)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}")
    secret, port = generate(), free_port()
    with tempfile.TemporaryDirectory() as name, program("tests.bench.upstream", port):
        direct = f"http://127.0.0.1:{port}"
        wait_ready(direct)
        keys = Path(name) / "keys.toml"
        write_keys(keys, [Key(name="bench", sha256=digest(secret), **PLENTY)])
        with gateway(Path(name), [direct], keys_file=str(keys), gateway_secret="of the bench") as (url, pid):
            headers = {"authorization": f"Bearer {secret}"}
            uvloop.run(measure(Target(direct, headers, pid), Target(url, headers, pid), arguments))


async def measure(direct: Target, through: Target, arguments: argparse.Namespace) -> None:
    for word, load in (("short calls", short_calls), ("streams", streams)):
        # the first requests pay for connections and imports
        await load(through, argparse.Namespace(**vars(arguments) | {"seconds": 1.0, "idle": 0}))
        without, _ = await watched(direct, load, arguments)
        times, cores = await watched(through, load, arguments)
        print(f"{word}: {len(times)} measured, the gateway took {cores:.2f} cores, {resident_mb(through.pid):.0f} MB")
        for share in (0.5, 0.99, 1.0):
            alone, both = percentile(without, share), percentile(times, share)
            print(f"  p{100 * share:g}: direct {alone:.2f} ms, through {both:.2f} ms, added {both - alone:.2f} ms")


async def watched(
    target: Target, load: Callable[[Target, argparse.Namespace], Awaitable[list[float]]], arguments: argparse.Namespace
) -> tuple[list[float], float]:
    """The times in ms, and the processor time that the gateway took for each second."""
    started, before = time.monotonic(), cpu_seconds(target.pid)
    times = await load(target, arguments)
    return times, (cpu_seconds(target.pid) - before) / (time.monotonic() - started)


async def short_calls(target: Target, arguments: argparse.Namespace) -> list[float]:
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "max_tokens": 3}).encode()
    async with session(target) as client:
        started = time.monotonic()
        calls = []
        for number in range(int(arguments.rate * arguments.seconds)):
            await asyncio.sleep(max(0.0, started + number / arguments.rate - time.monotonic()))
            calls.append(asyncio.ensure_future(call(client, target.url, body)))
        return await asyncio.gather(*calls)


async def call(client: aiohttp.ClientSession, url: str, body: bytes) -> float:
    started = time.monotonic()
    async with client.post(url + CHAT, data=body) as response:
        await response.read()
        response.raise_for_status()
    return 1000 * (time.monotonic() - started)


async def streams(target: Target, arguments: argparse.Namespace) -> list[float]:
    async with session(target) as client:
        # as they come, not all at once: a thousand that begin together measure how fast streams begin
        ramp_s = HEARTBEAT_S if arguments.idle else 0.0
        idle = [
            stream(client, target.url, 0, ramp_s + arguments.seconds, ramp_s * place / arguments.idle)
            for place in range(arguments.idle)
        ]
        busy = [
            stream(client, target.url, arguments.events, arguments.seconds, ramp_s + place / arguments.streams)
            for place in range(arguments.streams)
        ]
        found = await asyncio.gather(*idle, *busy)
    return [milliseconds for times in found for milliseconds in times]


async def stream(client: aiohttp.ClientSession, url: str, rate: float, seconds: float, delay_s: float) -> list[float]:
    """From the moment that the upstream wrote an event to the one that it was read, for each event."""
    await asyncio.sleep(delay_s)
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "rate": rate, "seconds": seconds}
    times, is_whole = [], False
    async with client.post(url + CHAT, data=json.dumps(body).encode()) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times += _age_ms(json.loads(line[6:]))
            is_whole |= line.startswith(b"data: [DONE]")
    assert is_whole, "a stream did not end as it should"
    return times


def _age_ms(chunk: dict) -> list[float]:
    sent = [choice["delta"].get("content") for choice in chunk["choices"]]
    return [(time.monotonic_ns() - int(at)) / 1e6 for at in sent if at]


def session(target: Target) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=target.headers | {"content-type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=None),
    )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
