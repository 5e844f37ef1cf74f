"""Real sockets for the tests: one event loop in a thread, upstreams that obey to the byte, gateways in front."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import uvloop

from config import RouterConfig, Upstream
from config.listen import bind
from router.app import Gateway
from router.listen import http_server
from router.trace import Tracing


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Seconds until the condition held."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < within_s, "the condition never came true"
        time.sleep(0.005)
    return time.monotonic() - started


class LoopThread:
    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Awaitable, timeout_s: float = 20.0):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class Received:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Connection:
    """The upstream's end of one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def peer(self) -> tuple[str, int]:
        return self._writer.get_extra_info("peername")

    async def send(self, data: bytes) -> None:
        if self._writer.is_closing():
            raise ConnectionError("the other side is gone")
        self._writer.write(data)
        await self._writer.drain()

    async def closed(self) -> None:
        """Returns when the other side has closed."""
        with contextlib.suppress(ConnectionError):
            await self._reader.read()

    def reset(self) -> None:
        self._writer.transport.abort()

    async def answer(self, status: int, value, headers: str = "", media_type: str = "application/json") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {media_type}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.send(head.encode() + body)

    async def start_stream(self, headers: str = "") -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        await self.send(f"{head}{headers}\r\n".encode())

    async def chunk(self, data: bytes) -> None:
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def stream(self, *chunks: bytes, pause_s: float = 0.0) -> None:
        await self.start_stream()
        for data in chunks:
            await self.chunk(data)
            await asyncio.sleep(pause_s)
        await self.send(b"0\r\n\r\n")


Answer = Callable[[Received, Connection], Awaitable[None]]


async def echo(received: Received, connection: Connection) -> None:
    await connection.answer(200, {"path": received.target, "headers": received.headers, "size": len(received.body)})


@dataclass
class ScriptedUpstream:
    """An HTTP server whose every byte the test chooses. Health and models are answered unless `answer` is `raw`."""

    threads: LoopThread | None
    models: dict[str, int] = field(default_factory=lambda: {"tiny": 4096})
    answer: Answer = echo
    ready: int = 200
    requests: list[Received] = field(default_factory=list)
    num_closed: int = 0
    port: int = 0

    def start(self, port: int = 0) -> "ScriptedUpstream":
        self.threads.run(self.listen(port))
        return self

    async def listen(self, port: int) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        async def close() -> None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()

        self.threads.run(close())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while (received := await _read(reader)) is not None:
                await self._respond(received, Connection(reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_closed += 1
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _respond(self, received: Received, connection: Connection) -> None:
        if received.target == "/ready":
            await connection.answer(self.ready, {"status": "ready" if self.ready == 200 else "engine is restarting"})
        elif received.target == "/v1/models":
            cards = [{"id": name, "object": "model", "max_model_len": n} for name, n in self.models.items()]
            await connection.answer(200, {"object": "list", "data": cards})
        else:
            self.requests.append(received)
            await self.answer(received, connection)


async def _read(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method, target, headers, body)


@dataclass
class RunningGateway:
    url: str
    app: Gateway

    @property
    def num_open(self) -> float:
        return self.app.metrics.open_requests._value.get()

    @property
    def num_in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.app.workers.values())


@contextlib.contextmanager
def running_gateway(
    threads: LoopThread, *upstreams: Upstream, wait: bool = True, tracing: Tracing | None = None, **settings
) -> Iterator[RunningGateway]:
    """wait: until every upstream was checked once."""
    config = RouterConfig(port=0, upstreams=upstreams, **({"health_interval_s": 0.1} | settings))
    listener = bind(config.host, config.port, "--port")
    app = Gateway(config, tracing)
    server = http_server(config, app, "on")
    task = asyncio.run_coroutine_threadsafe(server.serve([listener]), threads.loop)
    try:
        eventually(lambda: server.started)
        if wait:
            eventually(lambda: all(worker.health.healthy is not None for worker in app.workers.values()))
        yield RunningGateway(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
    finally:
        server.should_exit = True
        task.result(20)
