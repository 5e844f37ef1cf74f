"""The loop's body: schedule, launch, update."""

import secrets
import time
from dataclasses import replace

from engine.constraint import Constraints
from engine.errors import QueueFullError
from engine.model_runner import Runner
from engine.peak_memory import PeakMemory
from engine.request import EngineInfo, EngineStats, Request, TokenEvent
from engine.schedule import Schedule
from engine.scheduler import Scheduler

# a step without work looks for new requests again after this
TIER_WAIT_S = 0.005


class EngineCore:
    """Requests in, events out, one step at a time. Lives in the engine process, on one thread."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        constraints: Constraints,
        memory: PeakMemory | None = None,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._constraints = constraints
        self._memory = memory
        self._aborted: list[TokenEvent] = []
        self._in_flight: Schedule | None = None
        self._launched_s = self._collected_s = 0.0

    @property
    def is_idle(self) -> bool:
        is_waited_for = self._scheduler.has_requests or self._scheduler.has_stores
        return not is_waited_for and not self._aborted and self._in_flight is None

    def add(self, request: Request) -> None:
        """Takes a request that check_request has passed. raises QueueFullError, SamplingError"""
        seed = request.sampling.seed
        self._constraints.add(request)
        try:
            self._scheduler.add(request, secrets.randbits(63) if seed is None else seed)
        except QueueFullError:
            self._constraints.remove(request.request_id)
            raise
        # whoever gives an id again has no ear for what it stood for before
        self._aborted = [event for event in self._aborted if event.request_id != request.request_id]

    def abort(self, request_id: str) -> None:
        """What the request held is free at once; its last event comes with the next step."""
        if event := self._scheduler.abort(request_id):
            self._aborted.append(event)
            self._constraints.remove(request_id)

    def step(self) -> list[TokenEvent]:
        """At most one chunk of prompt tokens, and one round of tokens for every request that decodes.

        A runner that is ahead has its next pass before the outcomes of the last one are looked at, so that it never
        waits for the host; its events come one step later.
        """
        events, self._aborted = self._aborted, []
        schedule = self._scheduler.schedule()
        began_s = time.monotonic()
        self._runner.launch_copies(schedule)
        if not schedule.is_empty:
            self._runner.launch_forward(schedule)
        if self._in_flight is not None:
            events += self._collect(self._in_flight)
        self._in_flight, self._launched_s = None if schedule.is_empty else schedule, began_s
        if self._in_flight is not None:
            self._runner.launch_sampling()
            if not self._runner.is_ahead:
                events += self._collect(self._in_flight)
                self._in_flight = None
        elif self._scheduler.has_requests and not events:
            self._scheduler.wait_for_tiers(TIER_WAIT_S)
        return events

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        return stats if self._memory is None else replace(stats, peak_bytes=self._memory.num_bytes())

    def check_integrity(self) -> None:
        """Asserts that nothing is held by a request that is gone."""
        self._scheduler.check_integrity()
        assert self._scheduler.has_requests or not len(self._constraints), "a constraint outlived its request"

    def _collect(self, schedule: Schedule) -> list[TokenEvent]:
        events = [self._closed(event) for event in self._scheduler.update(schedule, self._runner.collect())]
        # a pass begins when it was launched or when the one before it has ended, whichever came last
        began_s, self._collected_s = max(self._launched_s, self._collected_s), time.monotonic()
        self._scheduler.observe(schedule, self._collected_s - began_s)
        return events

    def _closed(self, event: TokenEvent) -> TokenEvent:
        """A finished request leaves its constraint. If that gave out, the output is cut short, not complete."""
        if event.finish_reason is None:
            return event
        matcher = self._constraints.remove(event.request_id)
        return replace(event, finish_reason="abort") if matcher is not None and matcher.has_failed else event
