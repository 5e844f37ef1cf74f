"""One request and its answer on the client's side: the ASGI callables, and what the log will say."""

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from router.errors import (
    BodyTooLargeError,
    ClientGoneError,
    GatewayError,
    RequestError,
    SlowRequestError,
    error_response,
)
from router.retries import Open
from router.route import api_of
from router.trace import UNTRACED, Trace

SLOWEST_BODY_BYTES_PER_S = 1024
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


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
        self.bytes_out = 0
        self.extra_headers: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self.on_finish: Callable[[], Awaitable[None]] | None = None
        self.opened: Open | None = None
        self.model: str | None = None
        self.trace: Trace = UNTRACED
        self.notes: dict[str, Any] = {}

    async def read_body(self, max_bytes: int, silence_s: float) -> bytes:
        """Raises BodyTooLargeError while the body is still coming, SlowRequestError, ClientGoneError."""
        too_large = BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
        if _declared(self.headers.get("content-length")) > max_bytes:
            raise too_large
        parts = []
        started = time.monotonic()
        while True:
            # some bytes now and then would keep a connection and its memory for ever
            left_s = started + silence_s + self.bytes_in / SLOWEST_BODY_BYTES_PER_S - time.monotonic()
            try:
                async with asyncio.timeout(min(silence_s, left_s)):
                    message = await self._receive()
            except TimeoutError as error:
                if left_s < silence_s:
                    raise SlowRequestError(f"the body came slower than {SLOWEST_BODY_BYTES_PER_S} bytes/s") from error
                raise SlowRequestError(f"no byte of the body came for {silence_s:g} s") from error
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            self.bytes_in += len(parts[-1])
            if self.bytes_in > max_bytes:
                raise too_large
            if not message.get("more_body"):
                return b"".join(parts)

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
