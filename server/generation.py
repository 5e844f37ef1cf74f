"""The choices of one request while the engine works on them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from engine import Engine, Request, TokenEvent
from server.metrics import ServerMetrics

Arrival = tuple[int, TokenEvent | Exception]


class Generation:
    """Submits n requests, joins their events, and ends them all when it is closed.

    Events that arrive while the reader is busy wait together, so a slow reader gets few large batches.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], metrics: ServerMetrics) -> None:
        self._engine = engine
        self._requests = requests
        self._metrics = metrics
        self._pumps: list[asyncio.Task[None]] = []
        self._arrivals: list[Arrival] = []
        self._arrived = asyncio.Event()
        self._num_open = len(requests)
        self._timings = [Timing(metrics) for _ in requests]
        self._ended: set[int] = set()
        self._is_closed = False

    async def submit(self) -> None:
        """Returns once all are admitted or queued. raises what the engine raises; then none of them runs"""
        try:
            for index, request in enumerate(self._requests):
                await self._engine.submit(request)
                self._pumps.append(asyncio.create_task(self._pump(index, request.request_id)))
        except BaseException:
            await self.close()
            raise
        self._count_admission()

    async def batches(self) -> AsyncIterator[list[tuple[int, TokenEvent]]]:
        """Events with the index of their choice, until every choice has finished or was ended.

        raises  EngineDiedError
        """
        while self._num_open or self._arrivals:
            await self._arrived.wait()
            self._arrived.clear()
            arrivals, self._arrivals = self._arrivals, []
            if failure := next((item for _, item in arrivals if isinstance(item, Exception)), None):
                raise failure
            yield arrivals

    def fail(self, error: Exception) -> None:
        """Ends all choices: `batches` raises the error."""
        self._num_open = 0
        self._arrive(0, error, is_last=False)

    async def end(self, index: int) -> None:
        """Stops one choice whose answer is complete before the engine thinks so."""
        if self._pumps[index].done() or index in self._ended:
            return
        self._ended.add(index)
        self._num_open -= 1
        self._arrived.set()
        self._timings[index].observe_end("stop")
        await self._engine.abort(self._requests[index].request_id)

    async def close(self) -> None:
        """Ends whatever still runs. May be called any number of times."""
        if self._is_closed:
            return
        self._is_closed = True
        for pump in self._pumps:
            pump.cancel()
        if self._pumps:
            await asyncio.wait(self._pumps)
        for index, pump in enumerate(self._pumps):
            if pump.cancelled():
                await self._engine.abort(self._requests[index].request_id)
                if index not in self._ended:
                    self._metrics.finished("abort")

    async def _pump(self, index: int, request_id: str) -> None:
        timing = self._timings[index]
        try:
            # a stream that is left early ends its request when it is closed, not when it is collected
            async with contextlib.aclosing(self._engine.stream(request_id)) as events:
                async for event in events:
                    if index in self._ended:
                        return
                    timing.observe(event)
                    self._arrive(index, event, is_last=event.finish_reason is not None)
        except Exception as error:
            if index in self._ended:
                return
            self._metrics.finished("error")
            self._arrive(index, error, is_last=True)

    def _arrive(self, index: int, item: TokenEvent | Exception, is_last: bool) -> None:
        self._arrivals.append((index, item))
        self._num_open -= is_last
        self._arrived.set()

    def _count_admission(self) -> None:
        for request in self._requests:
            count = len(request.prompt_token_ids)
            self._metrics.prompt_tokens.inc(count)
            self._metrics.request_prompt.observe(count)
            self._metrics.request_limit.observe(request.sampling.max_tokens)
            for queries in self._metrics.cache_queries:
                queries.inc(count)
        self._metrics.choices.observe(len(self._requests))


class Timing:
    """Times of one choice, on the clock that never jumps."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens = 0

    def observe(self, event: TokenEvent) -> None:
        if event.token_ids:
            self._observe_tokens(len(event.token_ids), event.num_cached_tokens)
        if event.finish_reason is not None:
            self.observe_end(event.finish_reason)

    def _observe_tokens(self, count: int, num_cached_tokens: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._start)
            self._metrics.prefill_time.observe(now - self._start)
            self._metrics.cached_tokens.inc(num_cached_tokens)
            for hits in self._metrics.cache_hits:
                hits.inc(num_cached_tokens)
        else:
            for gaps in self._metrics.token_gaps:
                gaps.observe((now - self._last) / count)
        self._last = now
        self._num_tokens += count
        self._metrics.generation_tokens.inc(count)

    def observe_end(self, reason: str) -> None:
        now = time.perf_counter()
        self._metrics.finished(reason)
        self._metrics.latency.observe(now - self._start)
        self._metrics.request_output.observe(self._num_tokens)
        if self._first is not None:
            self._metrics.decode_time.observe(now - self._first)
        if self._num_tokens > 1:
            self._metrics.mean_token_gap.observe((self._last - self._first) / (self._num_tokens - 1))
