"""`python -m tests.bench.server_process PORT WRITER`: the real server over the engine of `server_engine`.

WRITER is `own`, the server's, or `sse-starlette`, to see what the library would cost.
"""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable

from prometheus_client import CollectorRegistry
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

import server.responses
import server.sse
from config import EngineConfig, ServerConfig
from engine import EngineClient
from server.__main__ import DrainingServer, keep_loaded, listen, run, uvicorn_config
from server.app import build_app
from server.auth import AccessControl
from server.metrics import EngineCollector, ServerMetrics
from server.serving import Serving
from tests.bench.programs import CHECKPOINT

NAME = "bench"


class LibraryStream:
    """The server's `EventStream` as sse-starlette does it."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        release: Callable[[], Awaitable[None]],
        *,
        heartbeat_s: float,
        send_timeout_s: float,
        heartbeat: Callable[[], bytes] | None = None,
    ) -> None:
        self._release = release
        self._response = EventSourceResponse(
            events, headers=server.sse.HEADERS, sep="\n", ping=heartbeat_s, send_timeout=send_timeout_s
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            await self._release()


def main(port: int, writer: str) -> None:
    if writer == "sse-starlette":
        server.sse.EventStream = server.responses.EventStream = LibraryStream
    config = ServerConfig(port=port, log_level="warning")
    engine_config = EngineConfig(model=str(CHECKPOINT), device="cpu", max_num_requests=64)
    engine = EngineClient(engine_config, module="tests.bench.server_engine")
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, NAME))
    serving = Serving(config, engine, NAME, ServerMetrics(registry, NAME), on_ready=lambda model: keep_loaded())
    app = build_app(serving, AccessControl(config, None))
    run(DrainingServer(uvicorn_config(app, config), serving), listen(config.host, port))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
