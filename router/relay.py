"""Passes one upstream response on: whole events unchanged, an end that is told apart from a break."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from config import RouterConfig, Upstream
from router.errors import ClientGoneError, UnavailableError, UpstreamError, UpstreamTimeoutError, error_event
from router.exchange import Exchange
from router.guard import guarded
from router.large import UsageScanner
from router.sse import EventSplitter, EventTooLargeError, StreamScanner
from router.usage import without_usage_comment

HEARTBEAT = b": heartbeat\n\n"
LAST_WORD_S = 1.0


class SlowClientError(ClientGoneError):
    """The client has taken no byte for too long."""


class Relay:
    """One response on its way. The headers are already sent; from here on every failure is an event or a break.

    edit  takes out of whole events what the gateway itself had asked for
    keep  is told the name of a response before its client is
    """

    def __init__(
        self,
        exchange: Exchange,
        upstream: Upstream,
        chunks: AsyncIterator[bytes],
        config: RouterConfig,
        edit: Callable[[bytes], bytes] | None = None,
        keep: Callable[[str], None] | None = None,
    ) -> None:
        self._exchange = exchange
        self._upstream = upstream
        self._chunks = chunks
        self._config = config
        self._edit = edit
        self._keep = keep
        # the engine's server appends it to the marker, though not always within one read
        self._awaits_usage = edit is without_usage_comment
        self._held = b""
        self._scanner = StreamScanner(exchange.api)
        exchange.counts = self._scanner.counts
        self._is_waiting = True
        self._since = self._sent_at = time.monotonic()

    async def events(self) -> UpstreamError | None:
        """Passes a stream of events; returns the failure that its last event tells of, if any."""
        try:
            failure = await self._run(self._pump_events(), self._upstream.heartbeats)
        except asyncio.CancelledError:
            if not self._exchange.is_left:
                # the drain time is over
                await self._break_off()
            raise
        if self._held:
            await self._exchange.finish()
            await self._taken(self._exchange.send(self._held))
        if self._scanner.is_whole():
            failure = None
        elif failure is None:
            failure = UpstreamError(f"upstream {self._upstream.name} ended the stream without finishing it")
        if failure is not None:
            last = self._scanner.last_data()
            event = error_event(failure, self._exchange.api, self._exchange.request_id, last)
            await self._taken(self._exchange.send(event))
        await self._taken(self._exchange.end())
        return failure

    async def _break_off(self) -> None:
        error = UnavailableError("the gateway is shutting down before the answer is complete; send the request again")
        event = error_event(error, self._exchange.api, self._exchange.request_id, self._scanner.last_data())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await self._exchange.send(event)
                await self._exchange.end()

    async def body(self, held: bytes, is_json: bool = False) -> UpstreamError | None:
        """Passes bytes as they come, `held` first. After a failure the response stays unfinished, as it was."""
        failure = await self._run(self._pump_body(held, UsageScanner() if is_json else None), has_heartbeats=False)
        if failure is None:
            await self._taken(self._exchange.end())
        return failure

    async def _run(self, pump, has_heartbeats: bool) -> UpstreamError | None:
        try:
            await guarded(pump, self._watch(has_heartbeats))
        except UpstreamError as error:
            return error
        return None

    async def _pump_events(self) -> None:
        splitter = EventSplitter()
        async for chunk in self._chunks:
            try:
                events = splitter.feed(chunk)
            except EventTooLargeError as error:
                raise UpstreamError(f"upstream {self._upstream.name}: {error}") from error
            await self._pass_events(events)
        await self._pass_events(splitter.finish())

    async def _pass_events(self, events: bytes) -> None:
        self._mark(is_waiting=True)
        if not events:
            return
        self._scanner.note(events)
        self._tell_id()
        kept, self._held = self._held + (self._edit(events) if self._edit else events), b""
        if self._scanner.has_marker:
            if self._awaits_usage and "prompt" not in self._scanner.counts:
                # accounts are settled before the client may see the end
                self._held = kept
                return
            await self._exchange.finish()
        if kept:
            await self._send(kept)

    def _tell_id(self) -> None:
        if self._keep is not None and self._scanner.response_id is not None:
            self._keep(self._scanner.response_id)
            self._keep = None

    async def _pump_body(self, held: bytes, scanner: UsageScanner | None) -> None:
        await self._pass_bytes(held, scanner)
        async for chunk in self._chunks:
            await self._pass_bytes(chunk, scanner)

    async def _pass_bytes(self, data: bytes, scanner: UsageScanner | None) -> None:
        if scanner is not None:
            scanner.note(data)
            self._exchange.counts |= scanner.counts
            if "prompt" in scanner.counts:
                # before the client may see the end
                await self._exchange.finish()
        await self._send(data)

    async def _send(self, data: bytes) -> None:
        self._mark(is_waiting=False)
        await self._exchange.send(data)
        self._mark(is_waiting=True)
        self._sent_at = self._since

    def _mark(self, is_waiting: bool) -> None:
        self._is_waiting, self._since = is_waiting, time.monotonic()

    async def _watch(self, has_heartbeats: bool) -> None:
        """Watches both sides by the wall clock; puts heartbeats where the upstream has none."""
        config = self._config
        step = min(1.0, config.heartbeat_s / 2, config.idle_timeout_s / 2, config.send_timeout_s / 2)
        while True:
            await asyncio.sleep(step)
            now = time.monotonic()
            waited = now - self._since
            if not self._is_waiting and waited > config.send_timeout_s:
                raise SlowClientError
            if self._is_waiting and waited > config.idle_timeout_s:
                raise UpstreamTimeoutError(f"upstream {self._upstream.name} was silent for {config.idle_timeout_s:g} s")
            if has_heartbeats and self._is_waiting and now + step - self._sent_at > config.heartbeat_s:
                # only whole events are ever sent, so this stands between two
                self._sent_at = now
                await self._taken(self._exchange.send(HEARTBEAT))

    async def _taken(self, sending: Awaitable[None]) -> None:
        """What is sent while nobody watches the client; raises SlowClientError."""
        try:
            async with asyncio.timeout(self._config.send_timeout_s):
                await sending
        except TimeoutError as error:
            raise SlowClientError from error
