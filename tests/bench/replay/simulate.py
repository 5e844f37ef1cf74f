"""The real scheduler and prefix cache over a trace, with a clock that a cost model moves."""

import heapq
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from engine.cache.prefix_cache import hash_block, pack
from engine.request import Request, SamplingParams
from engine.schedule import Outcome, RequestState, Schedule
from engine.scheduler import Scheduler
from tests.bench.replay.trace import Call, Spelling

BLOCK = 64
MarksOf = Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step. A step with prompt tokens reads all weights once (chunk_ms) and each chunk the context before
    it (chunk_context_ms of a thousand tokens); each token then costs 1 / prefill_tok_s at the beginning of a context,
    twice that after half_speed_tokens, and so on; and however little that is, it has to be launched (launch_ms). A
    decoding request costs its share of the products and of its own context."""

    step_ms: float = 0.1
    launch_ms: float = 0.0
    chunk_ms: float = 4.0
    chunk_context_ms: float = 0.0
    prefill_tok_s: float = 50_000.0
    half_speed_tokens: float = 70_000.0
    decode_ms: float = 1.4
    decode_more_ms: float = 0.35
    decode_context_ms: float = 0.0065
    restore_ms: float = 0.1

    def seconds(self, schedule: Schedule) -> float:
        """decode_more_ms of each further request, decode_context_ms of each thousand tokens of context."""
        total_ms = self.step_ms
        if schedule.chunks:
            total_ms += self._prompts_ms([(chunk.start, chunk.end) for chunk in schedule.chunks])
        total_ms += self.restore_ms * sum(chunk.restored is not None for chunk in schedule.chunks)
        if schedule.decodes:
            context = sum(len(state.token_ids) for state in schedule.decodes)
            total_ms += self.decode_ms + self.decode_more_ms * (len(schedule.decodes) - 1)
            total_ms += self.decode_context_ms * context / 1000
        return total_ms / 1000

    def of_prompt(self, num_tokens: int) -> float:
        """A step with one chunk, at the beginning of its context."""
        return (self.step_ms + self._prompts_ms([(0, num_tokens)])) / 1000

    def _prompts_ms(self, chunks: Sequence[tuple[int, int]]) -> float:
        return max(self.launch_ms, self.chunk_ms + sum(self._chunk_ms(*chunk) for chunk in chunks))

    def _chunk_ms(self, start: int, end: int) -> float:
        tokens_ms = (end - start) / self.prefill_tok_s * (1 + (start + end) / 2 / self.half_speed_tokens) * 1000
        return tokens_ms + self.chunk_context_ms * start / 1000


@dataclass(slots=True)
class Record:
    """What became of one call; times on the simulated clock."""

    call: Call
    num_prompt_tokens: int
    submitted_s: float
    num_cached: int = 0
    num_infinite: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    is_cancelled: bool = False
    gaps: array = field(default_factory=lambda: array("d"))

    def tokens_at(self, now: float) -> None:
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps.append(now - self.last_s)
        self.last_s = now


class Simulation:
    """One run.

    reserve_tokens   output that each request has promised to it, as when a client names no limit
    tokens_per_step  of an answer, as drafts give them
    marks_of         which of a prompt's marks the scheduler is told
    """

    def __init__(
        self,
        calls: Sequence[Call],
        scheduler: Scheduler,
        costs: Costs,
        vocab_size: int = 100_000,
        reserve_tokens: int = 4096,
        tokens_per_step: int = 1,
        marks_of: MarksOf = tuple,
    ) -> None:
        self.records: dict[str, Record] = {}
        self.now = 0.0
        self._scheduler, self._costs, self._reserve = scheduler, costs, reserve_tokens
        self._tokens_per_step, self._marks_of = tokens_per_step, marks_of
        self._spelling = Spelling(vocab_size)
        self._calls = {call.call_id: call for call in calls}
        self._missing = {call.call_id: len(call.after) for call in calls}
        self._followers: dict[str, list[str]] = {}
        for call in calls:
            for before in call.after:
                self._followers.setdefault(before, []).append(call.call_id)
        self._due = [(call.wait_s, call.call_id) for call in calls if not call.after]
        heapq.heapify(self._due)
        self._cancels: list[tuple[float, str]] = []
        self._states: dict[str, RequestState] = {}
        self._computed: set[bytes] = set()
        self.num_steps = 0

    def run(self) -> "Simulation":
        while self._due or self._scheduler.has_requests:
            self._submit_due()
            self._cancel_due()
            schedule = self._scheduler.schedule()
            if schedule.is_empty:
                if not self._due:
                    continue
                self.now = max(self.now, self._due[0][0])
                continue
            self._run(schedule)
        self._scheduler.check_integrity()
        return self

    def _submit_due(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            _, call_id = heapq.heappop(self._due)
            call = self._calls[call_id]
            token_ids, marks = self._spelling.prompt(call)
            sampling = SamplingParams(max_tokens=self._reserve, stop_token_ids=(self._spelling.stop,))
            self._scheduler.add(Request(call_id, token_ids, sampling, call.tenant, marks=self._marks_of(marks)), seed=0)
            self.records[call_id] = Record(call, len(token_ids), self.now)
            if call.cancel_s is not None:
                heapq.heappush(self._cancels, (self.now + call.cancel_s, call_id))

    def _cancel_due(self) -> None:
        while self._cancels and self._cancels[0][0] <= self.now:
            _, call_id = heapq.heappop(self._cancels)
            if self._scheduler.abort(call_id) is not None:
                self.records[call_id].is_cancelled = True
                self._end(call_id)

    def _run(self, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            self._look(chunk.state, chunk.is_first)
            self._computed.update(chunk.state.path.hashes[chunk.start // BLOCK : chunk.end // BLOCK])
        seconds = self._costs.seconds(schedule)
        self.now += seconds
        self.num_steps += 1
        self._scheduler.observe(schedule, seconds)
        for event in self._scheduler.update(schedule, [self._outcome(state) for state in schedule.sampled]):
            record = self.records[event.request_id]
            record.tokens_at(self.now)
            if event.finish_reason is not None:
                self._end(event.request_id)

    def _look(self, state: RequestState, is_first: bool) -> None:
        """What is reused, and what a cache that kept everything would have had at this moment."""
        if is_first:
            record = self.records[state.request.request_id]
            hashes = state.path.hashes
            record.num_cached = state.num_cached_tokens
            known = bisect_left(range(len(hashes)), True, key=lambda index: hashes[index] not in self._computed)
            record.num_infinite = known * BLOCK
            self._states[state.request.request_id] = state

    def _outcome(self, state: RequestState) -> Outcome:
        answer = self._calls[state.request.request_id].answer
        first = state.num_output_tokens
        rest = self._spelling.tokens(answer)[first : first + (self._tokens_per_step if first else 1)]
        return Outcome(rest if first + len(rest) < answer.num_tokens else (*rest, self._spelling.stop))

    def _end(self, call_id: str) -> None:
        if (state := self._states.pop(call_id, None)) is not None:
            self._know_output(state)
        for follower in self._followers.get(call_id, ()):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                heapq.heappush(self._due, (self.now + self._calls[follower].wait_s, follower))

    def _know_output(self, state: RequestState) -> None:
        hashes = state.path.hashes
        done = min(state.num_computed_tokens, len(state.token_ids)) // BLOCK
        above = hashes[-1] if hashes else state.path.root
        for index in range(len(hashes), done):
            above = hash_block(above, pack(state.token_ids[index * BLOCK : (index + 1) * BLOCK]))
            self._computed.add(above)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a run gave. Shares of prompt tokens; recomputed tokens are those that an infinite cache would have had."""

    calls: int
    prompt_tokens: int
    hit: float
    infinite: float
    of_infinite: float
    recomputed: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    gap_p99: float
    gap_max: float

    def line(self) -> str:
        return " | ".join(_cell(field.name, getattr(self, field.name)) for field in fields(self))


def _cell(name: str, value: float) -> str:
    if name in ("hit", "infinite", "of_infinite"):
        return f"{value:.2%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def result_of(records: Sequence[Record]) -> Result:
    looked_up = [record for record in records if record.first_s is not None or record.num_infinite]
    totals = Counter(
        prompt=sum(record.num_prompt_tokens for record in looked_up),
        cached=sum(record.num_cached for record in looked_up),
        infinite=sum(record.num_infinite for record in looked_up),
    )
    first = [record.first_s - record.submitted_s for record in records if record.first_s is not None]
    gaps = [gap for record in records for gap in record.gaps]
    return Result(
        len(records),
        totals["prompt"],
        totals["cached"] / max(totals["prompt"], 1),
        totals["infinite"] / max(totals["prompt"], 1),
        totals["cached"] / max(totals["infinite"], 1),
        sum(max(0, record.num_infinite - record.num_cached) for record in looked_up),
        *(percentile(first, share) for share in (0.5, 0.9, 0.99)),
        percentile(gaps, 0.99),
        max(gaps, default=0.0),
    )
