"""Answers as server-sent events, and what happens to the work behind them when the client goes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from config import ServerConfig
from server.answer import Answer
from server.protocol import to_json

logger = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}


def named(event: str, value: Any) -> bytes:
    return f"event: {event}\n".encode() + data(value)


def data(value: Any) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


class EventStream:
    """ASGI callable: sends events, a heartbeat comment every `heartbeat_s`, and releases the work whatever happens.

    sse-starlette stops the events when the client leaves or takes no byte for `send_timeout_s`; the release stands
    outside of its cancelled scope, where it may still wait.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        release: Callable[[], Awaitable[None]],
        *,
        heartbeat_s: float,
        send_timeout_s: float,
        heartbeat: Callable[[], ServerSentEvent] | None = None,
    ) -> None:
        self._release = release
        self._response = EventSourceResponse(
            events,
            headers=HEADERS,
            sep="\n",
            ping=heartbeat_s,
            ping_message_factory=heartbeat or _comment,
            send_timeout=send_timeout_s,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        except SendTimeoutError:
            logger.warning("a client took no byte of its stream for too long; the stream was cut")
        finally:
            await self._release()


def event_stream(
    config: ServerConfig,
    events: AsyncIterator[bytes],
    answer: Answer,
    heartbeat: Callable[[], ServerSentEvent] | None = None,
) -> EventStream:
    """The stream of one answer, which ends with it."""
    return EventStream(
        events, answer.close, heartbeat_s=config.heartbeat_s, send_timeout_s=config.send_timeout_s, heartbeat=heartbeat
    )


def _comment() -> ServerSentEvent:
    return ServerSentEvent(comment="heartbeat", sep="\n")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of `work`, which is cancelled when the client leaves. raises ClientDisconnect"""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
