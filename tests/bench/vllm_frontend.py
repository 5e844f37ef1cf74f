"""`python -m tests.bench.vllm_frontend`: what vLLM's API server costs for each streamed token.

vLLM's CPU build (`python -m tests.e2e.vllm` prepares it) serves the embedded checkpoint. Its API server and its engine
are processes of their own, so the first one's processor time is the frontend's: HTTP, tokens to text, parsers of
thoughts and tool calls, and the messages of the engine. The engine sets the pace.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from tests.bench.gateway import cpu_seconds
from tests.bench.programs import CHECKPOINT, machine
from tests.e2e.vllm import MODEL, VERSION, running, write_bfloat16

PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "qwen3_xml", "--reasoning-parser", "qwen3")
TOOL = {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}


@dataclass(frozen=True)
class Seen:
    num_tokens: int
    num_events: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 16, 64])
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}, vLLM {VERSION}")
    print("| streams | CPU a token | tokens an event | tokens/s | load average |\n|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / "checkpoint"
        write_bfloat16(CHECKPOINT, checkpoint)
        more = ("--max-num-seqs", str(max(arguments.streams)), *PARSERS)
        with running(checkpoint, Path(name) / "vllm.log", *more) as url:
            address = urlsplit(url)
            pid = listener(address.port)
            # the first requests pay for imports and caches
            uvloop.run(measure(address, 2, 20))
            for count in arguments.streams:
                before, started = cpu_seconds(pid), time.monotonic()
                seen = uvloop.run(measure(address, count, arguments.tokens))
                used, wall = cpu_seconds(pid) - before, time.monotonic() - started
                print(
                    f"| {count} | {1e6 * used / seen.num_tokens:.0f} µs | {seen.num_tokens / seen.num_events:.2f} "
                    f"| {seen.num_tokens / wall:.0f} | {os.getloadavg()[0]:.1f} |",
                    flush=True,
                )


def listener(port: int) -> int:
    """The process that listens on a port: the API server, whatever else it has started."""
    inodes = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if is_listening(line, port)
    }
    for process in Path("/proc").glob("[0-9]*"):
        try:
            held = {os.readlink(file) for file in (process / "fd").iterdir()}
        except OSError:
            # it has ended, or is another user's
            continue
        if any(f"socket:[{inode}]" in held for inode in inodes):
            return int(process.name)
    raise RuntimeError(f"nobody listens on port {port}")


def is_listening(line: str, port: int) -> bool:
    _, local, _, state = line.split()[:4]
    return state == "0A" and int(local.rpartition(":")[2], 16) == port


async def measure(address, count: int, num_tokens: int) -> Seen:
    seen = await asyncio.gather(*(stream(address.hostname, address.port, num_tokens) for _ in range(count)))
    return Seen(sum(one.num_tokens for one in seen), sum(one.num_events for one in seen))


async def stream(host: str, port: int, num_tokens: int) -> Seen:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "tools": [{"type": "function", "function": TOOL}],
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    answer = await reader.read()
    writer.close()
    events = [json.loads(part) for part in _data(answer)]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return Seen(usage["completion_tokens"], sum(bool(event["choices"]) for event in events))


def _data(answer: bytes) -> list[bytes]:
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    assert lines, answer[:500]
    return [line.removeprefix(b"data: ").rstrip(b"\r") for line in lines]


if __name__ == "__main__":
    main()
