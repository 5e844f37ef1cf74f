"""`python -m tests.bench.server_process PORT WRITER`: the real server over the engine of `server_engine`.

WRITER is `sse-starlette`, as the server has it, or `own`: the same duties in few lines, to see what the library costs.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from prometheus_client import CollectorRegistry

import server.responses
import server.sse
from config import EngineConfig, ServerConfig
from engine import EngineClient
from server.__main__ import DrainingServer, listen, run, uvicorn_config
from server.app import build_app
from server.auth import AccessControl
from server.metrics import EngineCollector, ServerMetrics
from server.serving import Serving
from tests.bench.programs import CHECKPOINT

NAME = "bench"
CHECK_S = 1.0


class OwnStream:
    """A stream with heartbeats, a watch over the client and a limit on its silence, on one task and one timer."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        release: Callable[[], Awaitable[None]],
        *,
        heartbeat_s: float,
        send_timeout_s: float,
        heartbeat: Callable | None = None,
    ) -> None:
        self._events = events
        self._release = release
        self._heartbeat_s = heartbeat_s
        self._send_timeout_s = send_timeout_s
        self._heartbeat = heartbeat or (lambda: None)
        self._sending_since: float | None = None
        self._last_sent = time.monotonic()

    async def __call__(self, scope, receive, send) -> None:
        headers = [(name.lower().encode(), value.encode()) for name, value in server.sse.HEADERS.items()]
        headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        work = [asyncio.ensure_future(part) for part in (self._write(send), self._watch(send), _left(receive))]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in work:
                part.cancel()
            await asyncio.wait(work)
            await self._release()

    async def _write(self, send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send, data: bytes) -> None:
        self._sending_since = self._last_sent = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since = None

    async def _watch(self, send) -> None:
        while True:
            await asyncio.sleep(min(CHECK_S, self._heartbeat_s))
            now = time.monotonic()
            if self._sending_since is not None:
                if now - self._sending_since > self._send_timeout_s:
                    return
            elif now - self._last_sent >= self._heartbeat_s:
                event = self._heartbeat()
                await self._send(send, event.encode() if event else b": heartbeat\n\n")


async def _left(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def main(port: int, writer: str) -> None:
    if writer == "own":
        server.sse.EventStream = server.responses.EventStream = OwnStream
    config = ServerConfig(port=port, log_level="warning")
    engine_config = EngineConfig(model=str(CHECKPOINT), device="cpu", max_num_requests=64)
    engine = EngineClient(engine_config, module="tests.bench.server_engine")
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, NAME))
    serving = Serving(config, engine, NAME, ServerMetrics(registry, NAME))
    app = build_app(serving, AccessControl(config, None))
    run(DrainingServer(uvicorn_config(app, config), serving), listen(config.host, port))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
