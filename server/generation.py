"""The choices of one request while the engine works on them."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from engine import Engine, Request, TokenEvent, join
from server.metrics import ServerMetrics

Arrival = tuple[int, TokenEvent]


class Generation:
    """Submits n requests, joins their events, and ends them all when it is closed.

    The engine hands events over as they come, without a task for each request between; what arrives while the reader
    is busy waits together, so a slow reader gets few large batches.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], metrics: ServerMetrics) -> None:
        self._engine = engine
        self._requests = requests
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._arrivals: list[Arrival] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._timings = [Timing(metrics) for _ in requests]
        # those that the engine still works on
        self._running: set[int] = set()

    async def submit(self) -> None:
        """Returns once all are admitted or queued. raises what the engine raises; then none of them runs"""
        try:
            for index, request in enumerate(self._requests):
                await self._engine.submit(request)
                self._running.add(index)
                self._engine.follow(request.request_id, partial(self._arrive, index))
        except BaseException:
            await self.close()
            raise
        self._count_admission()

    async def next(self) -> list[Arrival]:
        """The events since the last call with the index of their choice: at least one, or none when every choice has
        finished or was ended.

        raises  EngineDiedError, behind the events that came before it
        """
        while not self._arrivals:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                return []
            self._waiter = self._loop.create_future()
            await self._waiter
        arrivals, self._arrivals = self._arrivals, []
        return arrivals if len(arrivals) == 1 else _joined(arrivals)

    def fail(self, error: Exception) -> None:
        """Ends all choices: `next` raises the error."""
        self._failure = error
        self._wake()

    async def end(self, index: int) -> None:
        """Stops one choice whose answer is complete before the engine thinks so."""
        if index not in self._running:
            return
        self._running.remove(index)
        self._timings[index].observe_end("stop")
        await self._engine.abort(self._requests[index].request_id)

    async def close(self) -> None:
        """Ends whatever still runs. May be called any number of times."""
        while self._running:
            self._metrics.finished("abort")
            await self._engine.abort(self._requests[self._running.pop()].request_id)

    def _arrive(self, index: int, item: TokenEvent | Exception) -> None:
        if index not in self._running:
            return
        if isinstance(item, TokenEvent):
            self._timings[index].observe(item)
            self._arrivals.append((index, item))
            is_last = item.finish_reason is not None
        else:
            self._metrics.finished("error")
            self._failure, is_last = item, True
        if is_last:
            self._running.remove(index)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _count_admission(self) -> None:
        for request in self._requests:
            count = len(request.prompt_token_ids)
            self._metrics.prompt_tokens.inc(count)
            self._metrics.request_prompt.observe(count)
            self._metrics.request_limit.observe(request.sampling.max_tokens)
            for queries in self._metrics.cache_queries:
                queries.inc(count)
        self._metrics.choices.observe(len(self._requests))


def _joined(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """One event for each choice."""
    events: dict[int, list[TokenEvent]] = {}
    for index, event in arrivals:
        events.setdefault(index, []).append(event)
    return [(index, join(of_one)) for index, of_one in events.items()]


class Timing:
    """Times of one choice, on the clock that never jumps."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last = self._start
        self._num_tokens = 0

    def observe(self, event: TokenEvent) -> None:
        if count := len(event.token_ids):
            self._observe_tokens(count, event.num_cached_tokens)
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
            self._metrics.tokens.observe_gap((now - self._last) / count)
        self._last = now
        self._num_tokens += count
        self._metrics.tokens.count(count)

    def observe_end(self, reason: str) -> None:
        now = time.perf_counter()
        self._metrics.finished(reason)
        self._metrics.latency.observe(now - self._start)
        self._metrics.request_output.observe(self._num_tokens)
        if self._first is not None:
            self._metrics.decode_time.observe(now - self._first)
        if self._num_tokens > 1:
            self._metrics.mean_token_gap.observe((self._last - self._first) / (self._num_tokens - 1))
