"""Decides what the next step computes. Plain data in, plain data out."""

import enum
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from config.engine import BLOCK_SIZE
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import CachedPath, Hit, PrefixCache, Snapshot, ancestry
from engine.cache.tiers import LONGEST_FETCH_S, Found, Tiers, Transfer
from engine.chunk_budget import ChunkBudget
from engine.errors import QueueFullError
from engine.prompt_order import Candidate, PromptOrder
from engine.request import EngineStats, FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob

# a prompt that takes more steps than this shares none with others
LONG_STEPS = 8

log = logging.getLogger("longlane.engine.reuse")


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
    num_in_flight        passes that were scheduled and will give it tokens
    last_turn            number of its last turn to decode, of all turns of all requests
    num_cached_tokens    of its prompt that were not computed again
    draft_token_ids      MTP's proposal for what follows token_ids
    block_ids            KV blocks, in order of position
    num_promised_blocks  reserved and not yet taken
    slot                 of its GDN state and its sampling counts; -1 while it waits
    path                 its blocks that the prefix cache knows
    cuts                 where chunks of its prompt end beside the budget, so that a state can stand there
    has_begun            its first chunk was scheduled, and with it decided what it reuses
    fetch_until_s        it waits no longer than this for what lies outside the device
    fetch_seen           how much had come from the slower tiers when it was looked at last
    """

    request: Request
    arrival: int
    seed: int
    token_ids: list[int]
    path: CachedPath
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_accepted_rows: int = 0
    num_in_flight: int = 0
    last_turn: int = 0
    num_cached_tokens: int = 0
    draft_token_ids: tuple[int, ...] = ()
    block_ids: list[int] = field(default_factory=list)
    num_promised_blocks: int = 0
    slot: int = -1
    cuts: tuple[int, ...] = ()
    has_begun: bool = False
    fetch_until_s: float | None = None
    fetch_seen: int = -1

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
    def num_shared_blocks(self) -> int:
        return self.num_cached_tokens // BLOCK_SIZE

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed_tokens < self.num_prompt_tokens

    @property
    def may_go_on(self) -> bool:
        """Whether it can still run once the passes in flight have given it one token each, the least that they may."""
        return self.num_output_tokens + self.num_in_flight < self.request.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens start : end of one request.

    is_first  nothing of the request is on the device yet but the blocks that it shares
    restored  index of the snapshot that it starts from; None anywhere but at a first chunk with a hit
    transfer  what has to be brought back before it, that snapshot included; after the chunks before it have begun,
              since it may take what they began from
    """

    state: RequestState
    start: int
    end: int
    is_first: bool = False
    restored: int | None = None
    transfer: Transfer | None = None

    @property
    def ends_prompt(self) -> bool:
        return self.end == self.state.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class SnapshotCopy:
    """The state of a slot's request after `position` tokens, to be copied once its pass has run.

    index       of the snapshot
    num_folded  rows of the pass that the state needs to get there; what comes after them stays pending
    """

    slot: int
    index: int
    position: int
    num_folded: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step computes: some prompt tokens, and one pass over the last token and the drafts of every request
    that decodes.

    copies  states that stand after the chunks and are to be kept
    stores  what earlier schedules left on the device and is to lie outside of it too; before anything else
    """

    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[RequestState, ...] = ()
    copies: tuple[SnapshotCopy, ...] = ()
    stores: tuple[Transfer, ...] = ()

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

    A request is admitted when a slot is free and its prompt + max_tokens can be promised in blocks. The next in line
    has the highest priority, then a tenant with the fewest requests running, then came first; once it is next, only a
    higher priority passes it. What is admitted finishes: nothing is preempted.

    Prompts share a step's tokens as PromptOrder and ChunkBudget say. Of prompts that begin alike and arrive together
    one is computed, and the others wait for what they have in common; when it is aborted, they go on from there.

    What a request reuses is decided with its first chunk, not before: what others compute meanwhile counts, and the
    snapshot that it starts from cannot be given up in between. Admission reserves as if nothing were reused; a hit
    gives back.

    A schedule counts as run as soon as it is made: what it does to prompts is certain. What it gives to outputs is
    known to `update` alone, and the next schedule may be made before that. It goes on with the same requests then,
    takes blocks for as many tokens as may have been accepted, and what it gives to a request that has ended is dropped.

    Who owns what: the scheduler owns pool, prefix cache and slots; a RequestState holds blocks, promises and a slot
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
    ) -> None:
        """num_snapshots    0 turns reuse off
        cache_key        what the content of a block depends on beside its tokens
        reuses_decoded   also keep what was computed token by token; it differs from prefill by rounding
        longest_gap_s    that a decoding request waits for its next token because prompts are computed
        most_decodes     requests that decode in one step; where there are more they take turns
        tiers            of the prefix cache outside the device
        """
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache(self._pool, num_snapshots, cache_key)
        self._reuses_decoded = reuses_decoded
        self._copies: list[SnapshotCopy] = []
        self._tiers = tiers
        self._to_store: list[Snapshot] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._budget = ChunkBudget(prefill_chunk, longest_gap_s)
        self._order = PromptOrder()
        self._next: RequestState | None = None
        self._num_drafts = num_drafts
        self._most_decodes = most_decodes
        self._num_turns = 0
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
        return bool(self._to_store)

    @property
    def running(self) -> tuple[RequestState, ...]:
        return tuple(self._running)

    def add(self, request: Request, seed: int) -> None:
        """Takes a checked request. raises QueueFullError when it would have to wait and may not"""
        path = self._cache.begin(request.cache_salt)
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
        stores = self._choose_stores()
        self._admit_waiting()
        decodes = self._choose_decodes()
        chunks = tuple(self._cut_chunks(self._budget.num_tokens(bool(decodes)), bool(decodes)))
        for state in decodes:
            self._cover(state, self._most_tokens(state))
        self._copies = []
        for chunk in chunks:
            self._read(chunk)
        schedule = Schedule(chunks, decodes, tuple(self._copies), stores)
        for state in schedule.sampled:
            state.num_in_flight += 1
        self._counts["num_steps"] += not schedule.is_empty
        return schedule

    def update(self, schedule: Schedule, outcomes: Sequence[Outcome]) -> list[TokenEvent]:
        """Takes over what the oldest schedule in flight gave; one event per request that is still there. Then `copies`
        has to be done, before anything else happens to slots.

        outcomes  one per request in schedule.sampled
        """
        self._copies = []
        events = []
        for state, outcome in zip(schedule.sampled, outcomes, strict=True):
            state.num_in_flight -= 1
            if state.status is RequestStatus.RUNNING:
                self._accept(state, outcome)
                events.append(self._append(state, outcome))
        return events

    def observe(self, schedule: Schedule, seconds: float) -> None:
        """What a schedule took, for the size of those to come."""
        num_tokens = sum(chunk.end - chunk.start for chunk in schedule.chunks)
        self._budget.observe(num_tokens, bool(schedule.decodes), seconds)

    def wait_for_tiers(self, seconds: float) -> None:
        """Where nothing can be computed until something has come from a slower tier."""
        if self._tiers is not None:
            self._tiers.wait(seconds)

    @property
    def copies(self) -> tuple[SnapshotCopy, ...]:
        """States after rows that were accepted in the last update and are to be kept."""
        return tuple(self._copies)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_waiting_tokens=self._num_waiting_tokens(),
            num_kv_blocks=self._pool.num_blocks,
            num_free_kv_blocks=self._pool.num_free,
            num_cached_blocks=self._cache.num_blocks,
            num_snapshots=self._cache.num_snapshots,
            **self._counts,
            **self._cache.counts,
            **(self._tiers.stats() if self._tiers else {}),
        )

    def check_integrity(self) -> None:
        """Asserts that blocks and slots belong to running requests alone; when idle, that nothing is held."""
        self._cache.check_integrity()
        if self._tiers is not None:
            self._tiers.poll()
            self._tiers.check_integrity()
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
            self._store(state.path.latest)
            self._cache.leave(state.path, state.block_ids, state.num_promised_blocks)
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
            if leader := self._leader(state, hit):
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
            if state.is_prefilling:
                hit = self._look_up(state)
                if hit is None or (hit := self._look_further(state, hit)) is not None:
                    yield state, hit

    def _look_further(self, state: RequestState, hit: Hit) -> Hit | None:
        """A hit that counts what lies outside the device; None while that is on its way to host memory."""
        if self._tiers is None or not self._cache.is_enabled:
            return hit
        may_wait = state.fetch_until_s is None or time.monotonic() < state.fetch_until_s
        if may_wait and state.fetch_seen == self._tiers.num_settled:
            return None
        hashes = self._cache.address(state.path, state.request.prompt_token_ids)
        found = self._tiers.find(hashes, hit.depth)
        if found is None:
            return hit
        if self._tiers.is_ready(found):
            return replace(hit, brought=found)
        if not (may_wait and self._tiers.fetch(found)):
            return hit
        state.fetch_until_s = state.fetch_until_s or time.monotonic() + LONGEST_FETCH_S
        state.fetch_seen = self._tiers.num_settled
        return None

    def _look_again(self, state: RequestState, hit: Hit) -> Hit:
        """What others of the same step brought back or gave up since."""
        fresh = self._cache.lookup(state.path, state.request.prompt_token_ids)
        found = hit.brought
        if self._tiers is None or found is None or found.depth <= fresh.depth or not self._tiers.is_ready(found):
            return fresh
        return replace(fresh, brought=found)

    def _look_up(self, state: RequestState) -> Hit | None:
        """What a prompt that has not begun may reuse now."""
        return None if state.has_begun else self._cache.lookup(state.path, state.request.prompt_token_ids)

    def _leader(self, state: RequestState, hit: Hit | None) -> RequestState | None:
        """A request that will soon have computed more of this prompt's beginning than is cached; it leaves a state
        where the two part."""
        if hit is None or not self._cache.is_enabled:
            return None
        ahead = [other for other in self._running if other.has_begun and other.is_prefilling]
        leader = max(ahead, key=lambda other: self._num_alike(state, other), default=None)
        if leader is None:
            return None
        depth = self._num_alike(state, leader)
        if depth <= max(hit.depth, leader.num_computed_tokens):
            return None
        if depth not in leader.cuts:
            leader.cuts = (*leader.cuts, depth)
        return leader

    def _num_alike(self, first: RequestState, second: RequestState) -> int:
        """Tokens of whole blocks with which both prompts begin."""
        ours, others = (self._cache.address(s.path, s.request.prompt_token_ids) for s in (first, second))
        shorter = range(min(len(ours), len(others)))
        return bisect_left(shorter, True, key=lambda index: ours[index] != others[index]) * BLOCK_SIZE

    def _cut(self, state: RequestState, hit: Hit | None, budget: int) -> Chunk | None:
        """The next chunk of one prompt; None when not even a block of it fits the budget."""
        if hit is None:
            end = _chunk_end(state, state.num_computed_tokens, state.cuts, budget)
            return Chunk(state, state.num_computed_tokens, end) if end > state.num_computed_tokens else None
        if self._tiers is not None:
            hit = self._look_again(state, hit)
        cuts = self._choose_cuts(state, hit)
        end = _chunk_end(state, hit.depth, cuts, budget)
        if end <= hit.depth:
            return None
        restored, transfer = self._begin(state, hit, cuts)
        return Chunk(state, hit.depth, end, is_first=True, restored=restored, transfer=transfer)

    def _choose_cuts(self, state: RequestState, hit: Hit) -> tuple[int, ...]:
        """Where another conversation left this text, the ends of messages after which another may, and the last whole
        block that the same prompt could reuse."""
        if not self._cache.is_enabled:
            return ()
        ends = (hit.known, *chosen_marks(state.request.marks), state.num_prompt_tokens - 1)
        return tuple(end // BLOCK_SIZE * BLOCK_SIZE for end in ends)

    def _begin(self, state: RequestState, hit: Hit, cuts: tuple[int, ...]) -> tuple[int | None, Transfer | None]:
        """Takes over what is reused; returns the snapshot to start from, and what has to be brought back for it."""
        state.path.anchors = frozenset(mark // BLOCK_SIZE * BLOCK_SIZE for mark in chosen_marks(state.request.marks))
        state.has_begun, state.cuts = True, cuts
        state.num_computed_tokens = state.num_cached_tokens = hit.depth
        if self._cache.is_enabled:
            reused = f"{hit.depth} of {state.num_prompt_tokens} prompt tokens reused"
            if hit.brought is not None:
                reused += f", {hit.depth - len(hit.nodes) * BLOCK_SIZE} of them brought back"
            log.info("request %s: %s; %s", state.request.request_id, reused, hit.explain())
        restored = self._cache.adopt(state.path, hit)
        state.block_ids = [node.block_id for node in state.path.nodes]
        state.num_promised_blocks -= len(state.block_ids)
        return (restored, None) if hit.brought is None else self._bring_back(state, hit.brought)

    def _bring_back(self, state: RequestState, found: Found) -> tuple[int, Transfer]:
        assert self._tiers is not None
        num_at_hand = len(state.block_ids)
        while len(state.block_ids) * BLOCK_SIZE < found.depth:
            state.block_ids.append(self._cache.take())
            state.num_promised_blocks -= 1
        index = self._cache.take_in(state.path, state.token_ids, found.depth, state.block_ids)
        return index, self._tiers.bring_back(found, num_at_hand, state.block_ids[num_at_hand:], index)

    def _store(self, snapshot: Snapshot | None) -> None:
        """What stands there is worth a copy outside the device: made before the next step, if it still stands then."""
        if self._tiers is not None and snapshot is not None and self._cache.is_standing(snapshot):
            self._to_store.append(snapshot)

    def _choose_stores(self) -> tuple[Transfer, ...]:
        if self._tiers is None:
            return ()
        self._tiers.poll()
        snapshots, self._to_store = dict.fromkeys(self._to_store), []
        stores = [self._keep(snapshot) for snapshot in snapshots if self._cache.is_standing(snapshot)]
        return tuple(transfer for transfer in stores if transfer is not None)

    def _keep(self, snapshot: Snapshot) -> Transfer | None:
        assert self._tiers is not None
        nodes = list(ancestry(snapshot.node))[::-1]
        hashes, block_ids = [node.block_hash for node in nodes], [node.block_id for node in nodes]
        return self._tiers.keep(hashes, block_ids, snapshot.index, snapshot.is_anchor)

    def _address(self, state: RequestState, num_before: int) -> None:
        """Makes what stands now known to the prefix cache, and where whole blocks end keeps the state too.

        num_before  tokens whose rows the committed state holds beside what a chunk has just committed
        """
        is_decoded = num_before >= state.num_prompt_tokens
        if is_decoded and not self._reuses_decoded:
            return
        # an output may end before the last row that was accepted
        num_final = min(state.num_computed_tokens, len(state.token_ids))
        self._cache.extend(state.path, state.token_ids, num_final, state.block_ids)
        position = num_final // BLOCK_SIZE * BLOCK_SIZE
        if position <= num_before or not (is_decoded or position == num_final):
            return
        index = self._cache.stand(state.path, is_decoded)
        if index is not None:
            num_folded = position - num_before if is_decoded else 0
            self._copies.append(SnapshotCopy(state.slot, index, position, num_folded))
            state.num_accepted_rows -= num_folded
            if position in state.cuts and not is_decoded:
                self._store(state.path.latest)

    def _choose_decodes(self) -> tuple[RequestState, ...]:
        """Those that have waited longest where a step does not take all of them."""
        ready = [state for state in self._running if not state.is_prefilling and state.may_go_on]
        if self._most_decodes is not None and len(ready) > self._most_decodes:
            ready = sorted(ready, key=lambda state: state.last_turn)[: self._most_decodes]
        for state in ready:
            self._num_turns += 1
            state.last_turn = self._num_turns
        return tuple(ready)

    def _read(self, chunk: Chunk) -> None:
        self._cover(chunk.state, chunk.end)
        chunk.state.num_computed_tokens = chunk.end
        self._counts["num_prompt_tokens"] += chunk.end - chunk.start
        self._address(chunk.state, chunk.start)

    def _most_tokens(self, state: RequestState) -> int:
        """Tokens and drafts of a request's next pass, if those in flight accept every draft."""
        if not state.num_in_flight:
            return len(state.token_ids) + len(state.draft_token_ids)
        return len(state.token_ids) + state.num_in_flight * (1 + self._num_drafts) + self._num_drafts

    def _cover(self, state: RequestState, num_tokens: int) -> None:
        """Takes blocks for the rows of this pass and for the positions at which MTP drafts after it."""
        last = min(num_tokens + self._num_drafts, state.token_limit)
        while len(state.block_ids) * BLOCK_SIZE < last:
            state.block_ids.append(self._cache.take())
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
        if state.num_accepted_rows:
            self._address(state, state.num_computed_tokens - state.num_accepted_rows)
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


def chosen_marks(marks: Sequence[int]) -> tuple[int, ...]:
    """Of the ends of a prompt's messages those where states are worth their place: that of system and tools, which
    others share, and that of the last user's, to which a conversation returns that drops the thoughts after it."""
    return (*marks[:1], *marks[-1:])


def _chunk_end(state: RequestState, start: int, cuts: tuple[int, ...], budget: int) -> int:
    end = min((cut for cut in cuts if cut > start), default=state.num_prompt_tokens)
    return end if end - start <= budget else (start + budget) // BLOCK_SIZE * BLOCK_SIZE


def _candidate(state: RequestState, hit: Hit | None) -> Candidate:
    num_left = state.num_prompt_tokens - (state.num_computed_tokens if hit is None else hit.depth)
    return Candidate(state, state.request.cache_salt, state.request.priority, state.arrival, num_left)
