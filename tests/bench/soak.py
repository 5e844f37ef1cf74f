"""`python -m tests.bench.soak`: does the gateway stay as it was over 100,000 requests and 10,000 aborted streams?

Short calls of one key with every limit on, in turn from many conversations; its memory after the first fifth is
compared with that at the end. The same with streams whose clients leave after the first event, every other one with a
reset, while the key has places for few more than run at once: one that leaked would turn the rest away. At the end
every gauge has to be back at zero, and the gateway has to hold no more descriptors than before. Ends with 1 where
something did not hold.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import uvloop

from config import Key
from config.keys import digest, generate, write_keys
from tests.bench.gateway import CHAT, PLENTY, Target, resident_mb, session
from tests.bench.programs import free_port, gateway, machine, program, wait_ready

GAUGES = ("longlane_router_in_flight", "longlane_router_open_requests")
RESET = b"\1\0\0\0\0\0\0\0"
SETTLES_S = 20.0


@dataclass
class Soak:
    """problems  what did not hold"""

    target: Target
    admin: str
    arguments: argparse.Namespace
    problems: list[str] = field(default_factory=list)

    async def run(self) -> None:
        before = self._descriptors()
        await self._stay("short calls", self.arguments.requests, self._calls)
        await self._stay("aborted streams", self.arguments.aborts, self._aborts)
        await self._settle(before)

    async def _stay(self, what: str, count: int, work: Callable[[int, int], Awaitable[None]]) -> None:
        early = count // 5
        await self._timed(what, early, work(0, early))
        warm_mb = resident_mb(self.target.pid)
        await self._timed(what, count - early, work(early, count))
        self._compare_memory(early, warm_mb)

    async def _timed(self, what: str, count: int, work: Awaitable[None]) -> None:
        started = time.monotonic()
        await work
        seconds, size = time.monotonic() - started, resident_mb(self.target.pid)
        print(f"{count:,} {what} in {seconds:.0f} s ({count / seconds:.0f}/s), then {size:.1f} MB", flush=True)

    async def _calls(self, first: int, end: int) -> None:
        async with session(self.target) as client:

            async def call(number: int) -> None:
                body = self._body(number % self.arguments.conversations)
                async with client.post(self.target.url + CHAT, data=body) as response:
                    text = await response.text()
                    if response.status != 200:
                        raise RuntimeError(f"call {number} was answered {response.status}: {text[:500]}")

            await self._at_once(call, range(first, end))

    async def _aborts(self, first: int, end: int) -> None:
        body = self._body(0, stream=True, rate=10, seconds=60)
        host = self.target.url.removeprefix("http://")
        head = [f"POST {CHAT} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in self.target.headers.items()]
        request = "\r\n".join([*head, "content-type: application/json", "", ""]).encode() + body

        async def abort(number: int) -> None:
            address, port = host.split(":")
            reader, writer = await asyncio.open_connection(address, int(port))
            writer.write(request)
            received = await reader.readuntil(b"data: {")
            if not received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a stream was answered {received[:200]!r}")
            if number % 2:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.close()

        await self._at_once(abort, range(first, end))

    async def _at_once(self, one: Callable[[int], Awaitable[None]], numbers: range) -> None:
        turns = iter(numbers)

        async def worker() -> None:
            for number in turns:
                await one(number)

        await asyncio.gather(*(worker() for _ in range(self.arguments.at_once)))

    def _body(self, conversation: int, **fields: object) -> bytes:
        messages = [{"role": "user", "content": f"Conversation {conversation}: say ok."}]
        return json.dumps({"model": "tiny", "messages": messages, "max_tokens": 3, **fields}).encode()

    def _compare_memory(self, early: int, warm_mb: float) -> None:
        grown = resident_mb(self.target.pid) - warm_mb
        print(f"memory grew by {grown:.1f} MB after the first {early:,} (at most {self.arguments.tolerance_mb:g})")
        if grown > self.arguments.tolerance_mb:
            self.problems.append(f"memory grew by {grown:.1f} MB")

    async def _settle(self, descriptors: int) -> None:
        """Waits until nothing is left of what was aborted."""
        deadline = time.monotonic() + SETTLES_S
        # the gauges are those of another process
        while (left := self._left(descriptors)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.problems += left
        print("gauges: " + (", ".join(left) or "all at zero, no descriptor more than before"))

    def _left(self, descriptors: int) -> list[str]:
        text = httpx.get(f"{self.admin}/metrics").text
        values = {
            line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line[:1] not in ("#", "")
        }
        left = [f"{name} is {value:g}" for name, value in values.items() if name.split("{")[0] in GAUGES and value]
        gone = values["longlane_router_client_gone_total"]
        if gone != self.arguments.aborts:
            left.append(f"{gone:g} clients are counted as gone")
        # connections to the upstream that wait for their next request
        more = self._descriptors() - descriptors - self.arguments.at_once
        return left + ([f"{more} descriptors too many"] if more > 0 else [])

    def _descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.target.pid}/fd").iterdir()))


def soak(arguments: argparse.Namespace) -> list[str]:
    """What did not hold."""
    secret, port, admin = generate(), free_port(), free_port()
    limits = PLENTY | {"concurrent_requests": 2 * arguments.at_once, "tokens_per_day": 10**12}
    with tempfile.TemporaryDirectory() as name, program("tests.bench.upstream", port):
        direct = f"http://127.0.0.1:{port}"
        wait_ready(direct)
        write_keys(Path(name) / "keys.toml", [Key(name="bench", sha256=digest(secret), **limits)])
        settings = {"keys_file": f"{name}/keys.toml", "admin_port": admin, "gateway_secret": "of the bench"}
        # on a busy machine the programs wait for a processor, which is not what is asked here
        settings |= {"connect_timeout_s": 120.0}
        with gateway(Path(name), [direct], **settings) as (url, pid):
            target = Target(url, {"authorization": f"Bearer {secret}"}, pid)
            one = Soak(target, f"http://127.0.0.1:{admin}", arguments)
            uvloop.run(one.run())
            return one.problems


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--requests", type=int, default=100_000)
    words.add_argument("--aborts", type=int, default=10_000)
    words.add_argument("--conversations", type=int, default=10_000)
    words.add_argument("--at-once", type=int, default=32)
    words.add_argument("--tolerance-mb", type=float, default=4.0)
    return words


def main() -> int:
    arguments = parser().parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}")
    problems = soak(arguments)
    print("\n".join(problems) or "held")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
