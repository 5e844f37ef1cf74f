"""`python -m tests.bench.server`: what the API server costs for each token, and how late it makes them.

The engine behind it is a process that makes one token of every stream every 10 ms and notes the time; all else is
real: messages between the processes, parsers, protocol, HTTP. Streams are read by this program over plain sockets. A
token's latency is the time from when it was made to when it was read here, so a busy reader or machine adds to it.
Every load is run with the server's own writer of events and with sse-starlette in its place.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.bench.gateway import cpu_seconds
from tests.bench.programs import free_port, machine, percentile, program, wait_ready
from tests.bench.server_engine import BEGINNINGS, STAMPS, STEP_S, WORD
from tests.bench.server_process import NAME

KINDS = {"content": 0, "thought": 1, "tool call": 2}
TOOL = {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
# texts with words of the engine, in whatever field; tokens that wait for a busy server come together
TEXTS = re.compile(rb'"(?:content|reasoning_content|arguments)":"((?:[^"\\]|\\.)*)"')
ANSWER_ID = re.compile(rb'"id":"([^"]+)"')


@dataclass
class Stream(asyncio.Protocol):
    """Sends one request and notes when each of its words comes."""

    request: bytes
    done: asyncio.Future
    answer_id: str = ""
    times: list[int] = field(default_factory=list)
    num_events: int = 0
    tail: bytes = b""

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        *events, self.tail = (self.tail + data).split(b"\n\n")
        for event in events:
            if not self.answer_id and (found := ANSWER_ID.search(event)):
                self.answer_id = found[1].decode()
            words = [text.count(WORD.encode()) for text in TEXTS.findall(event)]
            if any(words):
                self.times += [now] * sum(words)
                self.num_events += 1
            elif b"data: [DONE]" in event and not self.done.done():
                self.done.set_result(None)
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError(f"the stream broke: {self.tail[:300]!r}"))


@dataclass(frozen=True)
class Load:
    writer: str
    kind: str
    num_streams: int


@dataclass(frozen=True)
class Result:
    cpu_us: float
    cores: float
    tokens_per_event: float
    latencies_ms: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--writers", nargs="+", default=["own", "sse-starlette"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, load average {os.getloadavg()[0]:.1f}")
    print("| writer | text | streams | CPU a token | server's cores | tokens an event | p50 | p99 | load average |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        for writer in arguments.writers:
            measure(writer, arguments, Path(name) / f"{writer}.jsonl")


def measure(writer: str, arguments: argparse.Namespace, stamps: Path) -> None:
    os.environ[STAMPS] = str(stamps)
    port = free_port()
    with program("tests.bench.server_process", port, writer) as running:
        wait_ready(f"http://127.0.0.1:{port}")
        for kind in arguments.kinds:
            # the first requests pay for imports and caches
            uvloop.run(run(port, running.pid, Load(writer, kind, 2), 0.5, stamps))
            for count in arguments.streams:
                load = Load(writer, kind, count)
                show(load, uvloop.run(run(port, running.pid, load, arguments.seconds, stamps)))


async def run(port: int, pid: int, load: Load, seconds: float, stamps: Path) -> Result:
    request = http_request(load.kind, int(seconds / STEP_S))
    loop = asyncio.get_running_loop()
    streams = [Stream(request, loop.create_future()) for _ in range(load.num_streams)]
    started, before = time.monotonic(), cpu_seconds(pid)
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)
    await asyncio.gather(*(stream.done for stream in streams))
    used, wall = cpu_seconds(pid) - before, time.monotonic() - started
    made = read_stamps(stamps)
    latencies: list[float] = []
    for stream in streams:
        times = made[f"{stream.answer_id}-0"]
        assert len(times) == len(stream.times), f"{len(times)} tokens were made, {len(stream.times)} came"
        latencies += [(came - at) / 1e6 for at, came in zip(times, stream.times, strict=True)]
    num_events = sum(stream.num_events for stream in streams)
    return Result(1e6 * used / len(latencies), used / wall, len(latencies) / num_events, latencies)


def read_stamps(path: Path) -> dict[str, list[int]]:
    return {line["id"]: line["times"] for line in map(json.loads, path.read_text().splitlines())}


def http_request(kind: str, num_words: int) -> bytes:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "go"}],
        "stream": True,
        "seed": KINDS[kind],
        # room for the beginning, which is no part of the count
        "max_tokens": num_words + len(BEGINNINGS[KINDS[kind]]),
        "tools": [{"type": "function", "function": TOOL}],
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def show(load: Load, result: Result) -> None:
    p50, p99 = (percentile(result.latencies_ms, share) for share in (0.5, 0.99))
    print(
        f"| {load.writer} | {load.kind} | {load.num_streams} | {result.cpu_us:.0f} µs | {result.cores:.2f} "
        f"| {result.tokens_per_event:.2f} | {p50:.2f} ms | {p99:.2f} ms | {os.getloadavg()[0]:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
