"""Answers as server-sent events, and what happens to the work behind them when the client goes."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from config import ServerConfig
from server.answer import Answer
from server.protocol import to_json

logger = logging.getLogger(__name__)

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
COMMENT = b": heartbeat\n\n"
# a clock may wake a little early
SHORTEST_WAIT_S = 0.001


def named(event: str, value: Any) -> bytes:
    return f"event: {event}\n".encode() + data(value)


def data(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


class EventStream:
    """ASGI callable: sends events, a heartbeat after every silence of `heartbeat_s`, and releases the work whatever
    happens. It ends early when the client leaves or takes no byte for `send_timeout_s`.

    One task writes and one watches the clock, so that an event costs no more than the sending of it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        release: Callable[[], Awaitable[None]],
        *,
        heartbeat_s: float,
        send_timeout_s: float,
        heartbeat: Callable[[], bytes] = lambda: COMMENT,
    ) -> None:
        self._events = events
        self._release = release
        self._heartbeat_s = heartbeat_s
        self._send_timeout_s = send_timeout_s
        self._heartbeat = heartbeat
        self._last_sent = time.monotonic()
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        finally:
            await self._release()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        send = scope.get("state", {}).get("send_body", send)
        writing = asyncio.ensure_future(self._write(send))
        work = {writing, asyncio.ensure_future(self._watch(send)), asyncio.ensure_future(until_left(receive))}
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in work:
                part.cancel()
            await asyncio.wait(work)
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event)
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, send: Send) -> None:
        """Returns when the client takes nothing."""
        try:
            while self._sending_since is None or time.monotonic() < self._due():
                await asyncio.sleep(max(SHORTEST_WAIT_S, self._due() - time.monotonic()))
                if self._sending_since is None and time.monotonic() >= self._due():
                    async with asyncio.timeout(self._send_timeout_s):
                        await self._send(send, self._heartbeat())
        except TimeoutError:
            # a heartbeat waits like an event
            pass
        logger.warning("a client took no byte of its stream for too long; the stream was cut")

    def _due(self) -> float:
        """When the silence, or the wait for the client, has lasted too long."""
        if self._sending_since is not None:
            return self._sending_since + self._send_timeout_s
        return self._last_sent + self._heartbeat_s

    async def _send(self, send: Send, data: bytes) -> None:
        self._last_sent = self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since = None


def event_stream(
    config: ServerConfig,
    events: AsyncGenerator[bytes],
    answer: Answer,
    heartbeat: Callable[[], bytes] = lambda: COMMENT,
) -> EventStream:
    """The stream of one answer, which ends with it."""
    return EventStream(
        events, answer.close, heartbeat_s=config.heartbeat_s, send_timeout_s=config.send_timeout_s, heartbeat=heartbeat
    )


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves. raises ClientDisconnect"""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_left(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
