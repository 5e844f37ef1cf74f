"""A wire with an ear: passes TCP on byte for byte and takes down the HTTP that went through."""

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools

from tests.e2e.stack import free_port


@dataclass
class Message:
    """A request, whose `line` is method and target, or a response, whose `line` is the status."""

    begun_at: float
    line: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def events(self) -> list[Any]:
        """Data of an event stream, parsed; the marker of its end stays a string."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class Exchange:
    request: Message
    response: Message

    @property
    def path(self) -> str:
        return self.request.line.partition(" ")[2]

    @property
    def status(self) -> int:
        return int(self.response.line or 0)


class _Ear:
    """Callbacks of an httptools parser; `messages` grows by one with each that begins."""

    def __init__(self, parser_type: type) -> None:
        self.messages: list[Message] = []
        self._parser = parser_type(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.messages.append(Message(time.monotonic()))

    def on_url(self, url: bytes) -> None:
        self.messages[-1].line += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.messages[-1].headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        message = self.messages[-1]
        if isinstance(self._parser, httptools.HttpRequestParser):
            message.line = f"{self._parser.get_method().decode()} {message.line}"
        else:
            message.line = str(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        self.messages[-1].body += body

    def on_message_complete(self) -> None:
        self.messages[-1].is_whole = True


class Recorder:
    """Listens on `url` and passes everything on to a port of this machine."""

    def __init__(self, target_port: int, port: int | None = None) -> None:
        self.target_port = target_port
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ears: list[tuple[_Ear, _Ear]] = []
        self._faults: list[Exception] = []
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        assert self._started.wait(10), "the recorder did not start"
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the recorder did not stop"
        assert not self._faults, self._faults

    def exchanges(self, since: float = 0.0) -> list[Exchange]:
        """Of requests that began after `since`, on the monotonic clock, in their order."""
        pairs = [
            Exchange(request, response)
            for asked, answered in self._ears
            for request, response in zip(asked.messages, answered.messages, strict=False)
        ]
        late = [pair for pair in pairs if pair.request.begun_at > since]
        return sorted(late, key=lambda pair: pair.request.begun_at)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        connections: set[asyncio.Task] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.add(asyncio.ensure_future(self._connect(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", self.port)
        self._started.set()
        await self._stop.wait()
        server.close()
        for connection in connections:
            connection.cancel()
        ended = await asyncio.gather(*connections, return_exceptions=True)
        self._faults = [end for end in ended if isinstance(end, Exception)]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ears = _Ear(httptools.HttpRequestParser), _Ear(httptools.HttpResponseParser)
        self._ears.append(ears)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pass(reader, far_writer, ears[0]), _pass(far_reader, writer, ears[1]))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ear: _Ear) -> None:
    with contextlib.closing(writer), contextlib.suppress(ConnectionError):
        while data := await reader.read(65_536):
            ear.feed(data)
            writer.write(data)
            await writer.drain()


def write_trace(folder: Path, exchanges: list[Exchange]) -> None:
    """For reading: a file for each request and each response."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, exchange in enumerate(exchanges):
        head = {"line": exchange.request.line, "status": exchange.status, "headers": exchange.request.headers}
        text = json.dumps([head, exchange.request.json], indent=1, ensure_ascii=False)
        (folder / f"{number:03}-request.json").write_text(text)
        (folder / f"{number:03}-response.txt").write_bytes(exchange.response.body)
