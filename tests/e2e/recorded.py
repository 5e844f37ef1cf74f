"""The whole stack over a scripted engine, with every request and answer taken down on both sides of the gateway."""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.recorder import Exchange, Recorder
from tests.e2e.stack import Stack, end, free_port, start_stack, wait_for

MODEL = "scripted"


@dataclasses.dataclass
class Recorded:
    """Clients talk to `url`; `front` saw what they said and were told, `behind` what the gateway made of it."""

    stack: Stack
    front: Recorder
    behind: Recorder
    _taken_at: float = 0.0

    @property
    def url(self) -> str:
        return self.front.url

    def wait_idle(self) -> None:
        def idle() -> bool:
            text = httpx.get(f"{self.stack.server_url}/metrics", timeout=10).text
            gauges = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
            return all(line.endswith(" 0.0") for line in text.splitlines() if line.startswith(gauges))

        wait_for(idle, 5.0, "no request is left in the engine")

    def take(self, path: str) -> list[Exchange]:
        """What went to a path since the last time. Fails where the gateway changed a body on its way."""
        self.wait_idle()
        since, self._taken_at = self._taken_at, time.monotonic()
        front, behind = posts(self.front.exchanges(since)), posts(self.behind.exchanges(since))
        # two connections may change places on their way
        assert sorted(one.request.body for one in front) == sorted(one.request.body for one in behind)
        return [one for one in front if one.path.partition("?")[0] == path]


def posts(exchanges: list[Exchange]) -> list[Exchange]:
    """Without the gateway's own looks at the server."""
    return [one for one in exchanges if one.request.line.startswith("POST ")]


@contextlib.contextmanager
def recorded_stack(script: Path, *flags: str) -> Iterator[Recorded]:
    server_port = free_port()
    flags = ("--engine", "scripted", "--script", str(script), "--served-model-name", MODEL, *flags)
    stack = start_stack(*flags, "--long-url", f"http://127.0.0.1:{server_port}")
    try:
        with Recorder(stack.server_port, server_port) as behind:
            stack.wait_ready()
            with Recorder(stack.gateway_port) as front:
                yield Recorded(stack, front, behind)
    finally:
        end(stack)


def write_script(path: Path, *parts: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, itertools.chain(*parts))))
    return path
