"""One request and its answer on the client's side: the ASGI callables, and what the log will say."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from config import RouterConfig
from router.errors import (
    BodyTooLargeError,
    ClientGoneError,
    GatewayError,
    RequestError,
    SlowRequestError,
    UnavailableError,
    error_response,
)
from router.retries import Open
from router.route import api_of
from router.trace import UNTRACED, Trace

# less over all is as good as silence
SLOWEST_BODY_BYTES_PER_S = 16 * 1024
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class HeldBodies:
    """Bytes of all bodies that requests in flight hold, from the first byte to the end of their answer."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, num_bytes: int, most: int) -> None:
        """raises UnavailableError"""
        if self.num_bytes + num_bytes > most:
            raise UnavailableError("the gateway holds as many bytes of requests as it may (max_held_body_bytes)")
        self.num_bytes += num_bytes


class Exchange:
    """Reads the request's body once, writes one response, and remembers what happened."""

    def __init__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.api = api_of(self.path)
        self.request_id = self._request_id()
        self.started_at = time.perf_counter()
        self.first_byte_at: float | None = None
        self.status: int | None = None
        self.is_answered = False
        self.has_ended = False
        self.is_left = False
        self.bytes_in = 0
        self._bodies: HeldBodies | None = None
        self._bytes_held = 0
        self.bytes_out = 0
        self.extra_headers: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.on_finish: Callable[[], Awaitable[None]] | None = None
        self.opened: Open | None = None
        self.model: str | None = None
        self.trace: Trace = UNTRACED
        self.notes: dict[str, Any] = {}

    async def read_body(self, config: RouterConfig, bodies: HeldBodies) -> bytes:
        """Takes its size of `bodies` until it finishes.

        raises  BodyTooLargeError while the body is still coming, SlowRequestError, UnavailableError, ClientGoneError
        """
        too_large = BodyTooLargeError(f"the body is larger than {config.max_body_bytes} bytes")
        if _declared(self.headers.get("content-length")) > config.max_body_bytes:
            raise too_large
        parts, started, is_more = [], time.monotonic(), True
        while is_more:
            message = await self._receive_part(started, config.request_timeout_s)
            part, is_more = message.get("body", b""), message.get("more_body", False)
            self.bytes_in += len(part)
            if self.bytes_in > config.max_body_bytes:
                raise too_large
            bodies.take(len(part), config.max_held_body_bytes)
            self._bodies, self._bytes_held = bodies, self._bytes_held + len(part)
            parts.append(part)
        return b"".join(parts)

    async def _receive_part(self, started: float, silence_s: float) -> Mapping[str, Any]:
        # some bytes now and then would keep a connection and its memory for ever
        left_s = started + silence_s + self.bytes_in / SLOWEST_BODY_BYTES_PER_S - time.monotonic()
        try:
            async with asyncio.timeout(min(silence_s, left_s)):
                message = await self._receive()
        except TimeoutError as error:
            raise SlowRequestError(
                f"no byte of the body came for {silence_s:g} s, "
                f"or less than {SLOWEST_BODY_BYTES_PER_S} a second over all"
            ) from error
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message

    async def disconnected(self) -> None:
        """Returns when the client is gone. Only after the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_left = True

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        self.first_byte_at = time.perf_counter()
        fields = {**headers, **self.extra_headers, "x-request-id": self.request_id}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, body: bytes) -> None:
        self.bytes_out += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self) -> None:
        """Settles accounts, once. Before the last bytes leave: a client may send its next request as they arrive."""
        self.is_answered = True
        if self._bodies is not None:
            self._bodies.num_bytes -= self._bytes_held
            self._bytes_held = 0
        settle, self.on_finish = self.on_finish, None
        if settle is not None:
            await settle()

    async def end(self, body: bytes = b"") -> None:
        await self.finish()
        self.bytes_out += len(body)
        self.has_ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        await self.start(status, {**headers, "content-length": str(len(body))})
        await self.end(body)

    async def refuse(self, error: GatewayError) -> None:
        self.notes["error"] = error.code or error.type
        await self.respond(*error_response(error, self.api, self.request_id))

    def _request_id(self) -> str:
        given = self.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _declared(length: str | None) -> int:
    if length is None:
        return 0
    if not length.isdecimal():
        raise RequestError("content-length is not a number")
    return int(length)
