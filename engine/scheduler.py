"""Decides what the next step computes. Plain data in, plain data out."""

from collections import Counter
from collections.abc import Iterator, Sequence

from config.engine import BLOCK_SIZE
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import Hit
from engine.cache.tiers import Tiers
from engine.chunk_budget import ChunkBudget
from engine.errors import QueueFullError
from engine.prompt_order import Candidate, PromptOrder
from engine.request import EngineStats, FinishReason, Request, SamplingParams, TokenEvent
from engine.reuse import Reuse
from engine.schedule import Chunk, Outcome, RequestState, RequestStatus, Schedule, SnapshotCopy

# a prompt that takes more steps than this shares none with others
LONG_STEPS = 8


class Scheduler:
    """Makes every request's num_computed_tokens catch up with its number of tokens; there are no phases.

    A request is admitted when a slot is free and its prompt + max_tokens can be promised in blocks. The next in line
    has the highest priority, then a tenant with the fewest requests running, then came first; once it is next, only a
    higher priority passes it. What is admitted finishes: nothing is preempted.

    Prompts share a step's tokens as PromptOrder and ChunkBudget say. Of prompts that begin alike and arrive together
    one is computed, and the others wait for what they have in common; when it is aborted, they go on from there.

    What a request reuses, and leaves for others, is up to Reuse, and decided with its first chunk. Admission reserves
    as if nothing were reused; a hit gives back.

    A schedule counts as run as soon as it is made: what it does to prompts is certain. What it gives to outputs is
    known to `update` alone, and the next schedule may be made before that. It goes on with the same requests then,
    takes blocks for as many tokens as may have been accepted, and what it gives to a request that has ended is dropped.

    Who owns what: the scheduler owns pool, reuse and slots; a RequestState holds blocks, promises and a slot
    from `_admit` to `_release`, and nothing before or after.
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
        num_snapshots: int = 0,
        cache_key: bytes = b"",
        reuses_decoded: bool = True,
        longest_gap_s: float | None = None,
        most_decodes: int | None = None,
        tiers: Tiers | None = None,
        keeps_inside: bool = False,
    ) -> None:
        """num_snapshots    0 turns reuse off
        cache_key        what the content of a block depends on beside its tokens
        reuses_decoded   also keep what was computed token by token; it differs from prefill by rounding
        longest_gap_s    that a decoding request waits for its next token because prompts are computed
        most_decodes     requests that decode in one step; where there are more they take turns
        tiers            of the prefix cache outside the device
        keeps_inside     a pass leaves states inside a chunk too; otherwise chunks end where states are to stand
        """
        self._pool = BlockPool(num_blocks)
        self._reuse = Reuse(self._pool, num_snapshots, cache_key, reuses_decoded, tiers, keeps_inside)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._budget = ChunkBudget(prefill_chunk, longest_gap_s)
        self._order = PromptOrder()
        self._next: RequestState | None = None
        self._num_drafts = num_drafts
        self._keeps_inside = keeps_inside
        self._most_decodes = most_decodes
        self._num_turns = 0
        self._last_decodes: tuple[RequestState, ...] = ()
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
    def has_stores(self) -> bool:
        """Whether the next schedule copies something out, even if it computes nothing."""
        return self._reuse.has_stores

    @property
    def running(self) -> tuple[RequestState, ...]:
        return tuple(self._running)

    def add(self, request: Request, seed: int) -> None:
        """Takes a checked request. raises QueueFullError when it would have to wait and may not"""
        path = self._reuse.begin(request.cache_salt)
        state = RequestState(request, self._num_arrived, seed, list(request.prompt_token_ids), path)
        if self._waiting or not self._admit(state):
            self._check_queue(state)
            self._waiting.append(state)
        self._num_arrived += 1
        self._by_id[request.request_id] = state

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request in any state and frees what it holds; None when there is no such request."""
        state = self._by_id.get(request_id)
        if state is None:
            return None
        self._counts["num_aborted"] += 1
        self._release(state)
        return TokenEvent(request_id, finish_reason="abort", num_cached_tokens=state.num_cached_tokens)

    def schedule(self) -> Schedule:
        """What to run after everything that was scheduled before."""
        in_flight = [s for s in self._last_decodes if s.num_in_flight and s.status is RequestStatus.RUNNING]
        self._reuse.set_aside(in_flight, most_rows=1 + self._num_drafts)
        kept, stores = self._reuse.take_left(), self._reuse.take_stores()
        self._admit_waiting()
        decodes = self._choose_decodes()
        chunks = tuple(self._cut_chunks(self._budget.num_tokens(bool(decodes)), bool(decodes)))
        for state in decodes:
            self._cover(state, self._most_tokens(state))
        # of two that got the same place the later one counts
        copies = {copy.index: copy for chunk in chunks for copy in self._read(chunk)}
        schedule = Schedule(chunks, decodes, kept, stores, tuple(copies.values()))
        for state in schedule.sampled:
            state.num_in_flight += 1
        self._last_decodes = decodes
        self._counts["num_steps"] += not schedule.is_empty
        return schedule

    def update(self, schedule: Schedule, outcomes: Sequence[Outcome]) -> list[TokenEvent]:
        """Takes over what the oldest schedule in flight gave; one event per request that is still there.

        outcomes  one per request in schedule.sampled
        """
        events = []
        for state, outcome in zip(schedule.sampled, outcomes, strict=True):
            state.num_in_flight -= 1
            if state.status is RequestStatus.RUNNING:
                self._accept(state, outcome)
                events.append(self._append(state, outcome))
        self._reuse.settle()
        return events

    def expect(self, num_prompt_tokens: int, seconds: float) -> None:
        """What a step of so many prompt tokens takes, before there were any."""
        self._budget.observe(num_prompt_tokens, False, seconds)

    def observe(self, schedule: Schedule, seconds: float) -> None:
        """What a schedule took, for the size of those to come."""
        num_tokens = sum(chunk.end - chunk.start for chunk in schedule.chunks)
        self._budget.observe(num_tokens, bool(schedule.decodes), seconds)

    def wait_for_tiers(self, seconds: float) -> None:
        """Where nothing can be computed until something has come from a slower tier."""
        self._reuse.wait(seconds)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_waiting_tokens=self._num_waiting_tokens(),
            num_kv_blocks=self._pool.num_blocks,
            num_free_kv_blocks=self._pool.num_free,
            **self._counts,
            **self._reuse.stats(),
        )

    def check_integrity(self) -> None:
        """Asserts that blocks and slots belong to running requests alone; when idle, that nothing is held."""
        self._reuse.check_integrity()
        own = [block_id for state in self._running for block_id in state.block_ids[state.num_shared_blocks :]]
        held = {block_id for state in self._running for block_id in (*state.block_ids, *state.path.extra_ids)}
        slots = [state.slot for state in self._running]
        assert len(set(own)) == len(own), "a block that is written to has two owners"
        assert len(held) == self._pool.num_blocks - self._pool.num_free
        assert sorted(self._free_slots + slots) == list(range(self._num_slots))
        assert len(self._by_id) == len(self._running) + len(self._waiting)
        assert self._running or self._pool.is_idle

    def _admit_waiting(self) -> None:
        while self._waiting:
            running = Counter(state.request.cache_salt for state in self._running)
            self._next = min(self._waiting, key=lambda state: self._queue_order(state, running))
            if not self._admit(self._next):
                return
            self._waiting.remove(self._next)

    def _queue_order(self, state: RequestState, running: Counter[str]) -> tuple[int, bool, int, int]:
        request = state.request
        return -request.priority, state is not self._next, running[request.cache_salt], state.arrival

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
            self._reuse.leave(state)
            self._free_slots.append(state.slot)
            self._running.remove(state)
        else:
            self._waiting.remove(state)
        state.status = RequestStatus.FINISHED
        del self._by_id[state.request.request_id]

    def _check_queue(self, state: RequestState) -> None:
        if len(self._waiting) >= self._max_queued_requests:
            raise QueueFullError(f"{len(self._waiting)} requests wait already (max_queued_requests): try again later")
        num_tokens = self._num_waiting_tokens() + state.num_prompt_tokens
        if num_tokens > self._max_queued_tokens:
            raise QueueFullError(
                f"{num_tokens} prompt tokens would wait of {self._max_queued_tokens} (max_queued_tokens): try again"
            )

    def _num_waiting_tokens(self) -> int:
        return sum(state.num_prompt_tokens for state in self._waiting)

    def _cut_chunks(self, budget: int, has_decodes: bool) -> Iterator[Chunk]:
        """Each chunk ends at a multiple of 64 or with its prompt, where states may be kept for reuse and where the
        chunked recurrence is cut anyway."""
        prompts = dict(self._find_prompts())
        self._order.begin_step({state.request.cache_salt for state in prompts})
        whole, steps_aside = budget, has_decodes and self._waiting and not self._order.is_oldest_first
        while prompts and budget:
            chosen = self._order.choose([_candidate(state, hit) for state, hit in prompts.items()])
            state, hit = chosen.key, prompts.pop(chosen.key)
            # a prompt far from its end would hold up the others of this step, or those who wait for a slot
            if chosen.num_left > LONG_STEPS * whole and (budget < whole or steps_aside):
                continue
            leader = self._reuse.leader(state, hit, self._running) if hit is not None else None
            if leader is not None:
                # the turn is spent on what both wait for, unless that had one already
                if leader not in prompts:
                    continue
                state, hit = leader, prompts.pop(leader)
            chunk = self._cut(state, hit, budget)
            if chunk is None:
                return
            yield chunk
            budget -= chunk.end - chunk.start
            self._order.serve(state.request.cache_salt, chunk.end - chunk.start)

    def _find_prompts(self) -> Iterator[tuple[RequestState, Hit | None]]:
        """Prompts that may go on, and what those reuse that have not begun. Not who waits for a slower tier."""
        for state in self._running:
            if state.has_begun:
                if state.is_prefilling:
                    yield state, None
            elif (hit := self._reuse.look_up(state)) is not None:
                yield state, hit

    def _cut(self, state: RequestState, hit: Hit | None, budget: int) -> Chunk | None:
        """The next chunk of one prompt; None when not even a block of it fits the budget."""
        if hit is None:
            end = self._chunk_end(state, state.num_computed_tokens, state.cuts, budget)
            return Chunk(state, state.num_computed_tokens, end) if end > state.num_computed_tokens else None
        hit = self._reuse.look_again(state, hit)
        cuts = self._reuse.choose_cuts(state, hit)
        end = self._chunk_end(state, hit.depth, cuts, budget)
        if end <= hit.depth:
            return None
        state.has_begun, state.cuts = True, cuts
        restored, transfer = self._reuse.adopt(state, hit)
        return Chunk(state, hit.depth, end, is_first=True, restored=restored, transfer=transfer)

    def _chunk_end(self, state: RequestState, start: int, cuts: tuple[int, ...], budget: int) -> int:
        ends = () if self._keeps_inside else (cut for cut in cuts if cut > start)
        end = min(ends, default=state.num_prompt_tokens)
        return end if end - start <= budget else (start + budget) // BLOCK_SIZE * BLOCK_SIZE

    def _choose_decodes(self) -> tuple[RequestState, ...]:
        """Those that have waited longest where a step does not take all of them."""
        ready = [state for state in self._running if not state.is_prefilling and state.may_go_on]
        if self._most_decodes is not None and len(ready) > self._most_decodes:
            ready = sorted(ready, key=lambda state: state.last_turn)[: self._most_decodes]
        for state in ready:
            self._num_turns += 1
            state.last_turn = self._num_turns
        return tuple(ready)

    def _read(self, chunk: Chunk) -> list[SnapshotCopy]:
        self._cover(chunk.state, chunk.end)
        chunk.state.num_computed_tokens = chunk.end
        self._counts["num_prompt_tokens"] += chunk.end - chunk.start
        return self._reuse.keep_prompt(chunk)

    def _most_tokens(self, state: RequestState) -> int:
        """Tokens and drafts of a request's next pass, if those in flight accept every draft."""
        if not state.num_in_flight:
            return len(state.token_ids) + len(state.draft_token_ids)
        return len(state.token_ids) + state.num_in_flight * (1 + self._num_drafts) + self._num_drafts

    def _cover(self, state: RequestState, num_tokens: int) -> None:
        """Takes blocks for the rows of this pass and for the positions at which MTP drafts after it."""
        self._reuse.take_blocks(state, min(num_tokens + self._num_drafts, state.token_limit))

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
        if state.num_accepted_rows:
            self._reuse.keep_decoded(state, state.num_computed_tokens - state.num_accepted_rows)
        if reason is not None:
            self._release(state)
        logprobs = outcome.logprobs[: len(kept)]
        return TokenEvent(state.request.request_id, kept, logprobs, reason, state.num_cached_tokens)


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


def _candidate(state: RequestState, hit: Hit | None) -> Candidate:
    num_left = state.num_prompt_tokens - (state.num_computed_tokens if hit is None else hit.depth)
    return Candidate(state, state.request.cache_salt, state.request.priority, state.arrival, num_left)
