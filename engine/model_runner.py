"""Runs what the scheduler decided: forward, sample, accept, draft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch

from engine.batch import BlockTables, RequestRows, build_batch
from engine.cache.kv_cache import KVCache
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.models.qwen3_5 import Qwen3_5
from engine.request import TokenLogprob
from engine.sampler import Sampler, SamplingRow, logprobs
from engine.schedule import Chunk, Outcome, RequestState, Schedule, SnapshotCopy
from engine.speculative import Advance, Drafter, accept, sampling_row
from engine.tier_copy import TierCopier


@dataclass(frozen=True, slots=True)
class Span:
    """One request's rows in a step.

    first_row    where they lie among the rows of the step
    num_sampled  the last so many of them get a token
    restored     index of the snapshot that they follow upon, if they do
    """

    state: RequestState
    rows: RequestRows
    first_row: int
    num_sampled: int
    restored: int | None = None

    @property
    def sampled_rows(self) -> range:
        end = self.first_row + len(self.rows.token_ids)
        return range(end - self.num_sampled, end)


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens that a step adds to one request, before its stop condition is looked at."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class Runner(Protocol):
    """Runs schedules in the order in which they are launched. A pass has two parts, so that what a grammar allows can
    be worked out while the first one runs.

    is_ahead  a schedule may be launched before the outcomes of the one before it were collected
    """

    is_ahead: bool

    def launch_copies(self, schedule: Schedule) -> None:
        """schedule.kept, then schedule.stores: what passes launched so far have left on the device, and whether or not
        their requests are still there."""

    def launch_forward(self, schedule: Schedule) -> None:
        """Rows in, hidden states out; afterwards schedule.copies."""

    def launch_sampling(self) -> None:
        """Chooses tokens after the rows of the last forward pass. What was collected before is taken into account."""

    def collect(self) -> list[Outcome]:
        """Waits for the oldest pass that was not collected: one outcome per request in its schedule.sampled."""


class ModelRunner:
    """Runs each schedule to its end at once. Owns the model and what requests have on the device, by slot and block."""

    is_ahead = False

    def __init__(
        self,
        model: Qwen3_5,
        kv: KVCache,
        states: StateCache,
        sampler: Sampler,
        tables: BlockTables,
        num_drafts: int,
        snapshots: StateSnapshots | None = None,
        copier: TierCopier | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._states = states
        self._sampler = sampler
        self._tables = tables
        self._snapshots = snapshots
        self._copier = copier
        self._before: dict[int, torch.Tensor] = {}
        self._drafter = Drafter(model, kv, sampler, tables, num_drafts) if num_drafts else None
        self._last_hidden: dict[int, tuple[int, torch.Tensor]] = {}
        self._schedule = Schedule()
        self._spans: list[Span] = []
        self._hidden = torch.empty(0)

    @torch.inference_mode()
    def launch_copies(self, schedule: Schedule) -> None:
        for copy in schedule.kept:
            self._keep_pending(copy)
        for transfer in schedule.stores:
            assert self._copier is not None
            self._copier.store(transfer)
            self._copier.join()

    @torch.inference_mode()
    def launch_forward(self, schedule: Schedule) -> None:
        self._prepare(schedule)
        self._schedule, self._spans = schedule, spans_of(schedule)
        self._hidden = self._forward(self._spans, num_chunks=len(schedule.chunks))

    def launch_sampling(self) -> None:
        """Nothing yet: who calls `collect` at once need not wait before it."""

    @torch.inference_mode()
    def collect(self) -> list[Outcome]:
        spans, hidden = self._spans, self._hidden
        found = self._sample([span for span in spans if span.num_sampled], hidden)
        drafts = self._draft(spans, found, hidden)
        self._last_hidden = {span.state.slot: (span.rows.start, hidden[span.first_row :]) for span in spans}
        for copy in self._schedule.copies:
            assert self._snapshots is not None
            self._snapshots.save(copy.index, self._states, copy.slot, self._hidden_before(copy))
            self._snapshots.save_window(copy.index, self._kv, copy.slot)
        return [Outcome(choice.token_ids, choice.logprobs, drafts.get(slot, ())) for slot, choice in found.items()]

    def _keep_pending(self, copy: SnapshotCopy) -> None:
        assert self._snapshots is not None
        count = copy.position - self._last_hidden[copy.slot][0]
        slots, indices, counts = (torch.tensor([x], device=self._states.device) for x in (copy.slot, copy.index, count))
        hidden = self._hidden_before(copy)[None]
        self._snapshots.save_pending(indices, self._states, slots, counts.int(), hidden)
        self._snapshots.save_window(copy.index, self._kv, copy.slot)

    def _hidden_before(self, copy: SnapshotCopy) -> torch.Tensor:
        start, hidden = self._last_hidden[copy.slot]
        return hidden[copy.position - 1 - start]

    def _prepare(self, schedule: Schedule) -> None:
        for chunk in schedule.chunks:
            if chunk.is_first:
                self._begin(chunk)
        for state in (*(chunk.state for chunk in schedule.chunks), *schedule.decodes):
            self._tables.extend(state.slot, state.block_ids)

    def _begin(self, chunk: Chunk) -> None:
        state = chunk.state
        self._states.reset(state.slot)
        if chunk.transfer is not None:
            assert self._copier is not None
            self._copier.restore(chunk.transfer)
            self._copier.join()
        if chunk.restored is not None:
            assert self._snapshots is not None
            self._snapshots.restore(chunk.restored, self._states, state.slot)
            self._snapshots.restore_window(chunk.restored, self._kv, state.slot)
            # the next prompt of this step may be given its place
            self._before[state.slot] = self._snapshots.hidden(chunk.restored).clone()
        self._tables.begin(state.slot)
        self._sampler.begin(state.slot, state.request.prompt_token_ids, state.request.sampling)

    def _forward(self, spans: Sequence[Span], num_chunks: int) -> torch.Tensor:
        """Hidden states of all rows: prompt rows, which are certain, then rows that may be taken back."""
        passes = ((spans[:num_chunks], True), (spans[num_chunks:], False))
        batches = [build_batch([span.rows for span in part], self._tables, commits) for part, commits in passes if part]
        return torch.cat([self._model.forward(batch, self._kv, self._states) for batch in batches])

    def _sample(self, spans: Sequence[Span], hidden: torch.Tensor) -> dict[int, Choice]:
        """What each sampled request adds to its output, by slot."""
        if not spans:
            return {}
        logits = self._model.compute_logits(hidden[[row for span in spans for row in span.sampled_rows]])
        rows = [row for span in spans for row in sampling_rows(span)]
        chosen = iter(self._sampler.sample(logits, rows).tolist())
        found, first = {}, 0
        for span in spans:
            token_ids = accept(span.state.draft_token_ids, list(islice(chosen, span.num_sampled)))
            request = span.state.request
            self._sampler.observe(span.state.slot, token_ids, request.sampling, request.request_id)
            found[span.state.slot] = Choice(token_ids, _logprobs(logits[first:], token_ids, span.state))
            first += span.num_sampled
        return found

    def _draft(
        self, spans: Sequence[Span], found: Mapping[int, Choice], hidden: torch.Tensor
    ) -> dict[int, tuple[int, ...]]:
        if self._drafter is None:
            return {}
        advances = [advance_of(span, found.get(span.state.slot)) for span in spans]
        for i, span in enumerate(spans):
            if span.restored is not None:
                advances[i] = after_hit(advances[i], hidden_row=len(hidden))
                hidden = torch.cat([hidden, self._before[span.state.slot][None]])
        drafts = self._drafter.draft(advances, hidden)
        return {span.state.slot: tokens for span, tokens in zip(spans, drafts, strict=True)}


def spans_of(schedule: Schedule) -> list[Span]:
    """Chunks first, then decodes: their rows lie in this order."""
    spans, first_row = [], 0
    for chunk in schedule.chunks:
        slot, token_ids = chunk.state.slot, chunk.state.token_ids[chunk.start : chunk.end]
        own = (copy for copy in schedule.copies if copy.slot == slot)
        inside = tuple((copy.position, copy.index) for copy in own if copy.position < chunk.end)
        rows = RequestRows(slot, chunk.start, token_ids, keeps=inside)
        spans.append(Span(chunk.state, rows, first_row, int(chunk.ends_prompt), chunk.restored))
        first_row += len(rows.token_ids)
    for state in schedule.decodes:
        token_ids = [state.token_ids[-1], *state.draft_token_ids]
        rows = RequestRows(state.slot, state.num_computed_tokens, token_ids, state.num_accepted_rows)
        spans.append(Span(state, rows, first_row, num_sampled=len(token_ids)))
        first_row += len(token_ids)
    return spans


def sampling_rows(span: Span) -> list[SamplingRow]:
    """Each row gives the token after it; those after drafts count the drafts as output."""
    drafts = span.state.draft_token_ids
    first = span.rows.end - span.num_sampled + 1
    return [sampling_row(span.state, first + i, drafts[:i]) for i in range(span.num_sampled)]


def advance_of(span: Span, choice: Choice | None) -> Advance:
    """The rows that stand: all of a chunk; of a decode, the last token's and the accepted drafts'."""
    known = span.state.token_ids[span.rows.start + 1 : span.rows.end + 1]
    added = choice.token_ids if choice else ()
    next_token_ids = (*known, *added)
    hidden_rows = range(span.first_row, span.first_row + len(next_token_ids))
    return Advance(span.state, span.rows.start, hidden_rows, next_token_ids, is_current=choice is not None)


def after_hit(advance: Advance, hidden_row: int) -> Advance:
    """With the row before it too: MTP's row of the last token that was reused depends on the token after it.

    hidden_row  where that token's hidden state is
    """
    return replace(
        advance,
        start=advance.start - 1,
        hidden_rows=(hidden_row, *advance.hidden_rows),
        next_token_ids=(advance.state.token_ids[advance.start], *advance.next_token_ids),
    )


def _logprobs(logits: torch.Tensor, token_ids: Sequence[int], state: RequestState) -> tuple[TokenLogprob, ...]:
    num_top = state.request.sampling.logprobs
    if num_top is None:
        return ()
    return logprobs(logits[: len(token_ids)], torch.tensor(token_ids, device=logits.device), num_top)
