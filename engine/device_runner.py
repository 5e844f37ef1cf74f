"""Runs what the scheduler decided on a device that is one pass ahead of the host.

Where requests stand lies on the device (ops/decode_slots), so a decode pass needs nothing but their slots: two graph
replays. Prompts are launched op by op on the same stream. Nothing is waited for but the record of the pass before.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from config.engine import BLOCK_SIZE
from engine.batch import BlockTables, ForwardBatch, RequestRows, build_batch, copy_in, to_device
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.constraint import Constraints
from engine.decode_pass import DecodePass, DeviceState, Forwarded, Masks, Mode, Owners, Record
from engine.model_runner import Choice, Span, advance_of, after_hit, spans_of
from engine.models.qwen3_5 import Qwen3_5
from engine.ops.sample import HAS_MASK, MUST_END
from engine.ops.sample_table import MIN_TEMPERATURE
from engine.request import TokenLogprob
from engine.sampler import has_penalties
from engine.schedule import Chunk, Outcome, RequestState, RequestStatus, Schedule, SnapshotCopy
from engine.speculative import Following
from engine.tier_copy import TierCopier, written

# requests of one decode pass, and rows: more are multiplied by other kernels
MAX_REQUESTS = 8
MAX_ROWS = 32


class Passes(Protocol):
    """Decode passes as they are launched: op by op, or as graphs."""

    def forward(self, slots: Sequence[int], num_rows: int) -> Forwarded: ...

    def sample(self, forwarded: Forwarded, mode: Mode, masks: Masks | None) -> Record: ...


class EagerPasses:
    """Op by op: on a CPU, and where graphs are turned off."""

    def __init__(self, decode_pass: DecodePass, device: torch.device) -> None:
        self._pass = decode_pass
        self._device = device

    def forward(self, slots: Sequence[int], num_rows: int) -> Forwarded:
        return self._pass.forward(to_device(slots, torch.int64, self._device), num_rows)

    def sample(self, forwarded: Forwarded, mode: Mode, masks: Masks | None) -> Record:
        return self._pass.sample(forwarded, mode, masks)


# stands for a first token that the device alone knows
_PENDING = Choice((0,), ())


def rows_per_request(requests: int, num_drafts: int) -> int:
    """Fewer drafts are verified where many requests decode."""
    return min(1 + num_drafts, MAX_ROWS // requests)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The chunks of a pass after forward.

    hidden  [rows, hidden]
    before  by slot, the hidden state of the token before a chunk that follows upon a snapshot
    """

    spans: list[Span]
    hidden: torch.Tensor
    before: dict[int, torch.Tensor]


class Arrival:
    """A place in the device's work that the host can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Readback:
    """A record on its way to the host, and whose it is."""

    def __init__(self, record: Record, states: Sequence[RequestState], num_rows: int) -> None:
        self.states = states
        self.num_rows = num_rows
        self._numbers = record.numbers.to("cpu", non_blocking=True)
        self._logprobs = record.logprobs and record.logprobs.to_host()

    def outcomes(self) -> list[Outcome]:
        """Once the device has got here."""
        return [self._outcome(place, numbers) for place, numbers in enumerate(self._numbers.tolist())]

    def _outcome(self, place: int, numbers: list[int]) -> Outcome:
        num_tokens, num_drafts, *token_ids = numbers
        drafts = token_ids[self.num_rows : self.num_rows + num_drafts]
        num_top = self.states[place].request.sampling.logprobs
        logprobs = () if num_top is None else self._logprobs_of(place * self.num_rows, num_tokens, num_top)
        return Outcome(tuple(token_ids[:num_tokens]), logprobs, tuple(drafts))

    def _logprobs_of(self, first: int, count: int, num_top: int) -> tuple[TokenLogprob, ...]:
        assert self._logprobs is not None
        found = self._logprobs
        chosen, ids, values = (
            x[first : first + count].tolist() for x in (found.chosen, found.top_ids, found.top_values)
        )
        tops = [tuple(zip(*row, strict=True))[:num_top] for row in zip(ids, values, strict=True)]
        return tuple(TokenLogprob(logprob, top) for logprob, top in zip(chosen, tops, strict=True))


class DeviceRunner:
    """Owns the model and what requests have on the device, by slot and by block."""

    is_ahead = True

    def __init__(
        self,
        model: Qwen3_5,
        state: DeviceState,
        states: StateCache,
        tables: BlockTables,
        decode_pass: DecodePass,
        passes: Passes,
        constraints: Constraints,
        snapshots: StateSnapshots | None = None,
        copier: TierCopier | None = None,
    ) -> None:
        self._model = model
        self._state = state
        self._states = states
        self._tables = tables
        self._pass = decode_pass
        self._passes = passes
        self._constraints = constraints
        self._snapshots = snapshots
        self._copier = copier
        self._device = tables.ids.device
        self._schedule = Schedule()
        self._prompts: Prompts | None = None
        self._forwarded: Forwarded | None = None
        self._in_flight: list[Readback] = []
        self._arrived = Arrival(self._device)

    @torch.inference_mode()
    def warm_up(self, batches: Iterable[Sequence[tuple[int, int]]]) -> None:
        """Prompts in the first slots, before there are requests: what is compiled on first use is compiled here.

        batches  first position and number of the rows of each prompt that is computed beside the others of its batch
        """
        for parts in batches:
            for slot, (start, count) in enumerate(parts):
                self._tables.begin(slot)
                num_blocks = -(-(start + count) // BLOCK_SIZE)
                self._tables.extend(slot, list(range(num_blocks)))
            rows = [RequestRows(slot, start, [0] * count) for slot, (start, count) in enumerate(parts)]
            self._run_once(rows)
        self._state.slots.numbers.zero_()
        for slot in range(self._states.num_slots):
            self._states.reset(slot)
        # who is ready must not have this still before it
        self._arrived.mark()
        self._arrived.wait()

    def time_prompts(self, sizes: Iterable[int]) -> list[tuple[int, float]]:
        """Seconds that a prompt of so many rows takes from launch to end, once all of it is compiled."""
        found = []
        for size in sizes:
            began = time.monotonic()
            self.warm_up([[(0, size)]])
            found.append((size, time.monotonic() - began))
        return found

    def _run_once(self, rows: Sequence[RequestRows]) -> None:
        batch = build_batch(rows, self._tables, commits=True)
        owners = Owners(batch.state_slots, batch.state_slots.int(), self._tables.ids.index_select(0, batch.state_slots))
        hidden = self._forward(batch)
        last = self._take(hidden, batch.last_rows)
        proposed = self._propose(Following.of(rows, self._state.kv.window), hidden) if self._pass.num_drafts else last
        logits = self._model.compute_logits(last)
        positions = self._take(batch.positions, batch.last_rows) + 1
        for mode in Mode:
            first = self._pass.choose_first(logits, owners, positions, mode, None)
            self._pass.finish_first(logits, owners, first, proposed, mode)

    @torch.inference_mode()
    def launch_copies(self, schedule: Schedule) -> None:
        if schedule.kept:
            if self._copier is not None:
                self._copier.protect(set(), {copy.index for copy in schedule.kept})
            self._keep_pending(schedule.kept)
        for transfer in schedule.stores:
            assert self._copier is not None
            self._copier.store(transfer)

    @torch.inference_mode()
    def launch_forward(self, schedule: Schedule) -> None:
        self._schedule = schedule
        if self._copier is not None:
            self._copier.protect(*written(schedule))
        self._prompts = self._forward_prompts(schedule) if schedule.chunks else None
        self._keep(schedule.copies)
        self._forwarded = None
        if schedule.decodes:
            for state in schedule.decodes:
                self._tables.extend(state.slot, state.block_ids)
            slots = [state.slot for state in schedule.decodes]
            self._forwarded = self._passes.forward(slots, self._rows_per_request(len(slots)))

    @torch.inference_mode()
    def launch_sampling(self) -> None:
        if self._prompts is not None:
            if self._copier is not None:
                self._copier.join_arriving()
            self._sample_prompts(self._prompts)
            for copy in self._schedule.copies:
                assert self._snapshots is not None
                self._snapshots.save_window(copy.index, self._state.kv, copy.slot)
        if self._forwarded is not None:
            decodes = self._schedule.decodes
            mode, num_rows = self._mode_of(decodes), self._forwarded.batch.num_rows[0]
            masks = None if mode is Mode.GREEDY else self._masks(decodes, num_rows)
            record = self._passes.sample(self._forwarded, mode, masks)
            self._in_flight.append(Readback(record, decodes, num_rows))
        self._arrived.mark()

    def collect(self) -> list[Outcome]:
        self._arrived.wait()
        readbacks, self._in_flight = self._in_flight, []
        outcomes = []
        for readback in readbacks:
            for state, outcome in zip(readback.states, readback.outcomes(), strict=True):
                # it verified those drafts alone that it had rows for: the fewer, the more requests share a pass
                state.draft_token_ids = state.draft_token_ids[: readback.num_rows - 1]
                outcomes.append(outcome)
                # after an abort the id may stand for another request already
                is_there = state.status is RequestStatus.RUNNING
                if is_there and (matcher := self._constraints.get(state.request.request_id)):
                    matcher.advance(outcome.token_ids)
        return outcomes

    def _keep_pending(self, copies: Sequence[SnapshotCopy]) -> None:
        """States among the rows of the last decode pass. Whether it got there the device alone knows yet."""
        assert self._snapshots is not None and self._forwarded is not None
        slots, indices, positions, places = (
            to_device(values, torch.int64, self._device)
            for values in (
                [copy.slot for copy in copies],
                [copy.index for copy in copies],
                [copy.position for copy in copies],
                [self._place_of(copy.slot) for copy in copies],
            )
        )
        counts = self._state.slots.rows_until(positions, slots)
        hidden = self._forwarded.hidden.view(len(self._schedule.decodes), -1, self._forwarded.hidden.shape[1])
        last = hidden[places, counts.long().clamp(1, hidden.shape[1]) - 1]
        self._snapshots.save_pending(indices, self._states, slots, counts, last)
        for copy in copies:
            self._snapshots.save_window(copy.index, self._state.kv, copy.slot)

    def _place_of(self, slot: int) -> int:
        return next(place for place, state in enumerate(self._schedule.decodes) if state.slot == slot)

    def _keep(self, copies: Sequence[SnapshotCopy]) -> None:
        for copy in copies:
            assert self._snapshots is not None and self._prompts is not None
            span = next(span for span in self._prompts.spans if span.state.slot == copy.slot)
            hidden = self._prompts.hidden[span.first_row + copy.position - 1 - span.rows.start]
            if copy.position == span.rows.end:
                self._snapshots.save(copy.index, self._states, copy.slot, hidden)
            else:
                self._snapshots.save_hidden(copy.index, hidden)

    def _rows_per_request(self, requests: int) -> int:
        return rows_per_request(requests, self._pass.num_drafts)

    def _forward_prompts(self, schedule: Schedule) -> Prompts:
        spans = spans_of(replace(schedule, decodes=()))
        before = {}
        for span, chunk in zip(spans, schedule.chunks, strict=True):
            if chunk.is_first:
                self._begin(chunk)
            if span.restored is not None:
                assert self._snapshots is not None
                before[chunk.state.slot] = self._snapshots.hidden(span.restored)[None].clone()
            self._tables.extend(chunk.state.slot, chunk.state.block_ids)
        batch = build_batch([span.rows for span in spans], self._tables, commits=True)
        return Prompts(spans, self._forward(batch), before)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward(batch, self._copier or self._state.kv, self._states)

    def _begin(self, chunk: Chunk) -> None:
        state, sampling = chunk.state, chunk.state.request.sampling
        self._states.reset(state.slot)
        if chunk.transfer is not None:
            assert self._copier is not None
            self._copier.restore(chunk.transfer)
        if chunk.restored is not None:
            assert self._snapshots is not None
            self._snapshots.restore(chunk.restored, self._states, state.slot)
            self._snapshots.restore_window(chunk.restored, self._state.kv, state.slot)
        self._tables.begin(state.slot)
        # as if its last row were a decode pass without drafts
        row = self._state.slots.row(state.num_prompt_tokens - 1, state.token_limit)
        copy_in(self._state.slots.numbers[state.slot], row)
        self._write_sampling(state)
        if has_penalties(sampling):
            self._state.counts.begin(state.slot, state.request.prompt_token_ids)

    def _write_sampling(self, state: RequestState) -> None:
        sampling = state.request.sampling
        self._state.sampling.write(
            state.slot,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=state.seed,
            min_tokens=sampling.min_tokens,
            num_prompt_tokens=state.num_prompt_tokens,
            logit_bias=sampling.logit_bias,
            stop_token_ids=sampling.stop_token_ids,
        )

    def _sample_prompts(self, prompts: Prompts) -> None:
        """First tokens of the prompts that have ended, and MTP's keys and values of all rows."""
        ended = [span for span in prompts.spans if span.num_sampled]
        states = [span.state for span in ended]
        if not ended:
            if self._pass.num_drafts:
                self._follow(prompts, None)
            return
        mode, owners = self._mode_of(states), self._owners(states)
        positions = to_device([state.num_prompt_tokens for state in states], torch.int64, self._device)
        last_rows = [span.first_row + len(span.rows.token_ids) - 1 for span in ended]
        logits = self._model.compute_logits(self._take(prompts.hidden, last_rows))
        masks = None if mode is Mode.GREEDY else self._masks(states, 1)
        first = self._pass.choose_first(logits, owners, positions, mode, masks)
        hidden = self._follow(prompts, first[0]) if self._pass.num_drafts else prompts.hidden
        self._in_flight.append(Readback(self._pass.finish_first(logits, owners, first, hidden, mode), states, 1))

    def _follow(self, prompts: Prompts, chosen: torch.Tensor | None) -> torch.Tensor:
        """MTP over the rows that it will see, each with the token after it; its hidden states of the last rows of ended
        prompts.

        chosen  [ended] first tokens, or None where no prompt has ended
        """
        advances = []
        for span in prompts.spans:
            advance = advance_of(span, _PENDING if span.num_sampled else None)
            advances.append(advance if span.restored is None else after_hit(advance, hidden_row=-1))
        rows = [RequestRows(a.state.slot, a.start, a.next_token_ids) for a in advances]
        following = Following.of(rows, self._state.kv.window)
        pairs = zip(following.last_rows, prompts.spans, strict=True)
        last_rows = [row for row, span in pairs if span.num_sampled]
        return self._propose(replace(following, last_rows=last_rows), self._standing(prompts), chosen)

    def _propose(
        self, following: Following, standing: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """MTP's hidden states of the last rows.

        standing  [rows, hidden]  the target's
        chosen    [last rows]  tokens that follow them, where the device alone knows them
        """
        batch = build_batch(following.rows, self._tables, commits=True)
        if chosen is not None:
            batch.token_ids.index_copy_(0, to_device(following.last_rows, torch.int64, self._device), chosen)
        if len(following.places) < len(standing):
            standing = self._take(standing, following.places)
        return self._take(self._model.forward_mtp(batch, standing, self._state.kv), following.last_rows)

    def _standing(self, prompts: Prompts) -> torch.Tensor:
        """The rows' hidden states, behind a hit with that of the token before them."""
        if not prompts.before:
            return prompts.hidden
        parts = []
        for span in prompts.spans:
            if span.restored is not None:
                parts.append(prompts.before[span.state.slot])
            parts.append(prompts.hidden[span.first_row : span.first_row + len(span.rows.token_ids)])
        return torch.cat(parts)

    def _owners(self, states: Sequence[RequestState]) -> Owners:
        slots = to_device([state.slot for state in states], torch.int64, self._device)
        return Owners(slots, slots.int(), self._tables.ids.index_select(0, slots))

    def _take(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if len(rows) == 1:
            return x[rows[0] : rows[0] + 1]
        return x.index_select(0, to_device(rows, torch.int64, self._device))

    def _mode_of(self, states: Iterable[RequestState]) -> Mode:
        states = list(states)
        if any(state.request.sampling.logprobs is not None for state in states):
            return Mode.LOGPROBS
        return Mode.GREEDY if all(self._is_greedy(state) for state in states) else Mode.GENERAL

    def _is_greedy(self, state: RequestState) -> bool:
        sampling = state.request.sampling
        has_more = has_penalties(sampling) or sampling.logit_bias or state.num_output_tokens < sampling.min_tokens
        is_constrained = self._constraints.get(state.request.request_id) is not None
        return sampling.temperature < MIN_TEMPERATURE and not has_more and not is_constrained

    def _masks(self, states: Sequence[RequestState], num_rows: int) -> Masks | None:
        """What grammars allow after each row, now that the drafts before it are known."""
        found = {}
        for place, state in enumerate(states):
            matcher = self._constraints.get(state.request.request_id)
            drafts = state.draft_token_ids[: num_rows - 1]
            for row in range(len(drafts) + 1 if matcher else 0):
                if (mask := matcher.mask(drafts[:row])) is not None:
                    found[place * num_rows + row] = mask
        if not found:
            return None
        count = len(states) * num_rows
        words = torch.zeros(count, len(next(iter(found.values())).words), dtype=torch.int32)
        flags = torch.zeros(count, dtype=torch.int32)
        for row, mask in found.items():
            words[row] = torch.from_numpy(mask.words)
            flags[row] = HAS_MASK.value | (MUST_END.value if mask.must_end else 0)
        return Masks(to_device(words, torch.int32, self._device), to_device(flags, torch.int32, self._device))
