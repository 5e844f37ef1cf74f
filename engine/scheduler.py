"""Decides what the next step computes. Plain data in, plain data out."""

import enum
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from config.engine import BLOCK_SIZE
from engine.cache.block_pool import BlockPool
from engine.errors import QueueFullError
from engine.request import EngineStats, FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob


class RequestStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """One request inside the engine.

    arrival              order of submission
    seed                 of its random numbers: the request's own, or a random one
    token_ids            prompt and output so far
    num_computed_tokens  tokens whose KV and GDN state stand
    num_accepted_rows    rows of its last pass that stand but are not yet folded into the GDN state
    draft_token_ids      MTP's proposal for what follows token_ids
    block_ids            KV blocks, in order of position
    num_promised_blocks  reserved and not yet taken
    slot                 of its GDN state and its sampling counts; -1 while it waits
    """

    request: Request
    arrival: int
    seed: int
    token_ids: list[int]
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_accepted_rows: int = 0
    draft_token_ids: tuple[int, ...] = ()
    block_ids: list[int] = field(default_factory=list)
    num_promised_blocks: int = 0
    slot: int = -1

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def token_limit(self) -> int:
        """Prompt and output may never be longer than this; it is what admission reserves."""
        return self.num_prompt_tokens + self.request.sampling.max_tokens

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start : end of one request."""

    state: RequestState
    start: int
    end: int

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.state.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step computes: some prompt tokens, and one pass over the last token and the drafts of every request
    that decodes."""

    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[RequestState, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.chunks or self.decodes)

    @property
    def sampled(self) -> tuple[RequestState, ...]:
        """Requests that get a token in this step, in the order of their outcomes."""
        return tuple(chunk.state for chunk in self.chunks if chunk.ends_prompt) + self.decodes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave one request: accepted drafts and the target's own token, and drafts for the next step."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    draft_token_ids: tuple[int, ...] = ()


class Scheduler:
    """Makes every request's num_computed_tokens catch up with its number of tokens; there are no phases.

    A request is admitted when a slot is free and its prompt + max_tokens can be promised in blocks, in the order of
    priority (higher first), then arrival. What is admitted finishes: nothing is preempted.

    Who owns what: the scheduler owns pool and slots; a RequestState holds blocks, promises and a slot from `_admit`
    to `_release`, and nothing before or after.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_slots: int,
        prefill_chunk: int,
        num_drafts: int,
        max_queued_requests: int,
        max_queued_tokens: int,
    ) -> None:
        self._pool = BlockPool(num_blocks)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._prefill_chunk = prefill_chunk
        self._num_drafts = num_drafts
        self._max_queued_requests = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._waiting: list[RequestState] = []
        self._running: list[RequestState] = []
        self._by_id: dict[str, RequestState] = {}
        self._num_arrived = 0
        self._counts: Counter[str] = Counter()

    @property
    def has_requests(self) -> bool:
        return bool(self._by_id)

    @property
    def running(self) -> tuple[RequestState, ...]:
        return tuple(self._running)

    def add(self, request: Request, seed: int) -> None:
        """Takes a checked request. raises QueueFullError when it would have to wait and may not"""
        state = RequestState(request, self._num_arrived, seed, list(request.prompt_token_ids))
        if self._waiting or not self._admit(state):
            self._check_queue(state)
            insort(self._waiting, state, key=_queue_order)
        self._num_arrived += 1
        self._by_id[request.request_id] = state

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request in any state and frees what it holds; None when there is no such request."""
        state = self._by_id.get(request_id)
        if state is None:
            return None
        self._counts["num_aborted"] += 1
        self._release(state)
        return TokenEvent(request_id, finish_reason="abort")

    def schedule(self) -> Schedule:
        while self._waiting and self._admit(self._waiting[0]):
            del self._waiting[0]
        schedule = Schedule(
            chunks=tuple(self._cut_chunks()),
            decodes=tuple(state for state in self._running if not state.is_prefilling),
        )
        for chunk in schedule.chunks:
            self._cover(chunk.state, chunk.end)
        for state in schedule.decodes:
            self._cover(state, len(state.token_ids) + len(state.draft_token_ids))
        return schedule

    def update(self, schedule: Schedule, outcomes: Sequence[Outcome]) -> list[TokenEvent]:
        """Takes over what the step computed; one event per request that got a token.

        outcomes  one per request in schedule.sampled
        """
        self._counts["num_steps"] += 1
        for chunk in schedule.chunks:
            chunk.state.num_computed_tokens = chunk.end
            self._counts["num_prompt_tokens"] += chunk.end - chunk.start
        events = []
        for state, outcome in zip(schedule.sampled, outcomes, strict=True):
            self._accept(state, outcome)
            events.append(self._append(state, outcome))
        return events

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_waiting_tokens=self._num_waiting_tokens(),
            num_kv_blocks=self._pool.num_blocks,
            num_free_kv_blocks=self._pool.num_free,
            **self._counts,
        )

    def check_integrity(self) -> None:
        """Asserts that blocks and slots belong to running requests alone; when idle, that nothing is held."""
        self._pool.check_integrity()
        blocks = [block_id for state in self._running for block_id in state.block_ids]
        slots = [state.slot for state in self._running]
        assert len(set(blocks)) == len(blocks) == self._pool.num_blocks - self._pool.num_free
        assert sorted(self._free_slots + slots) == list(range(self._num_slots))
        assert len(self._by_id) == len(self._running) + len(self._waiting)
        assert self._running or self._pool.is_idle

    def _admit(self, state: RequestState) -> bool:
        num_blocks = -(-state.token_limit // BLOCK_SIZE)
        if not self._free_slots or not self._pool.reserve(num_blocks):
            return False
        state.num_promised_blocks = num_blocks
        state.slot = self._free_slots.pop()
        state.status = RequestStatus.RUNNING
        self._running.append(state)
        return True

    def _release(self, state: RequestState) -> None:
        if state.status is RequestStatus.RUNNING:
            self._pool.release(state.block_ids, state.num_promised_blocks)
            self._free_slots.append(state.slot)
            self._running.remove(state)
        else:
            self._waiting.remove(state)
        state.status = RequestStatus.FINISHED
        del self._by_id[state.request.request_id]

    def _check_queue(self, state: RequestState) -> None:
        if len(self._waiting) >= self._max_queued_requests:
            raise QueueFullError(f"{len(self._waiting)} requests wait already, which is the most that may: try again")
        num_tokens = self._num_waiting_tokens() + state.num_prompt_tokens
        if num_tokens > self._max_queued_tokens:
            raise QueueFullError(
                f"{num_tokens} prompt tokens would wait, but {self._max_queued_tokens} is the most that may: try again"
            )

    def _num_waiting_tokens(self) -> int:
        return sum(state.num_prompt_tokens for state in self._waiting)

    def _cut_chunks(self) -> Iterator[Chunk]:
        """At most prefill_chunk prompt tokens. Each chunk ends at a multiple of 64 or with its prompt, where states may
        be kept for reuse and where the chunked recurrence is cut anyway."""
        budget = self._prefill_chunk
        for state in self._running:
            if not state.is_prefilling:
                continue
            start, end = state.num_computed_tokens, state.num_prompt_tokens
            if end - start > budget:
                end = (start + budget) // BLOCK_SIZE * BLOCK_SIZE
            if end <= start:
                return
            yield Chunk(state, start, end)
            budget -= end - start

    def _cover(self, state: RequestState, num_tokens: int) -> None:
        """Takes blocks for the rows of this pass and for the positions at which MTP drafts after it."""
        last = min(num_tokens + self._num_drafts, state.token_limit)
        while len(state.block_ids) * BLOCK_SIZE < last:
            state.block_ids.append(self._pool.take())
            state.num_promised_blocks -= 1

    def _accept(self, state: RequestState, outcome: Outcome) -> None:
        """Moves past the rows that stand: those of the last token and of each accepted draft, one per new token."""
        is_decode = state.num_computed_tokens < len(state.token_ids)
        state.num_accepted_rows = len(outcome.token_ids) if is_decode else 0
        state.num_computed_tokens += state.num_accepted_rows
        self._counts["num_draft_tokens"] += len(state.draft_token_ids)
        self._counts["num_accepted_tokens"] += len(outcome.token_ids) - 1
        state.draft_token_ids = outcome.draft_token_ids

    def _append(self, state: RequestState, outcome: Outcome) -> TokenEvent:
        kept, reason = cut_at_end(outcome.token_ids, state.num_output_tokens, state.request.sampling)
        state.token_ids += kept
        self._counts["num_output_tokens"] += len(kept)
        if reason is not None:
            self._release(state)
        return TokenEvent(state.request.request_id, kept, outcome.logprobs[: len(kept)], reason)


def cut_at_end(
    token_ids: tuple[int, ...], num_output_tokens: int, sampling: SamplingParams
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens that belong to the output, and why it ends if it does; what comes after the end is dropped."""
    for index, token_id in enumerate(token_ids):
        if token_id in sampling.stop_token_ids:
            return token_ids[:index], "stop"
        if num_output_tokens + index + 1 == sampling.max_tokens:
            return token_ids[: index + 1], "length"
    return token_ids, None


def _queue_order(state: RequestState) -> tuple[int, int]:
    return -state.request.priority, state.arrival
