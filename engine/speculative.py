"""Speculation with MTP: it proposes, the target decides.

A draft is chosen exactly as the target chooses, from MTP's distribution but with the same noise for the same position
(see sampler). It is accepted when the target, at that position, chooses the same token. What is published is the
target's choice in any case, so speculation changes neither the distribution nor, for a given seed, a single token.
The same noise makes the two choices agree whenever the two distributions nearly do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.batch import BlockTables, RequestRows, build_batch
from engine.cache.kv_cache import KVCache
from engine.cache.mtp_window import MtpWindow
from engine.models.qwen3_5 import Qwen3_5
from engine.sampler import Sampler, SamplingRow
from engine.schedule import RequestState


def accept(draft_token_ids: Sequence[int], chosen: Sequence[int]) -> tuple[int, ...]:
    """The drafts that the target chose too, then the first token that it chose itself.

    chosen  the target's choice after the last token and after each draft, one longer than the drafts
    """
    num_accepted = 0
    while num_accepted < len(draft_token_ids) and draft_token_ids[num_accepted] == chosen[num_accepted]:
        num_accepted += 1
    return tuple(chosen[: num_accepted + 1])


def sampling_row(state: RequestState, position: int, draft_token_ids: tuple[int, ...]) -> SamplingRow:
    """For the token of a request at a position, after drafts that are not yet part of the output."""
    return SamplingRow(
        sampling=state.request.sampling,
        seed=state.seed,
        slot=state.slot,
        request_id=state.request.request_id,
        position=position,
        num_outputs=position - state.num_prompt_tokens,
        draft_token_ids=draft_token_ids,
    )


@dataclass(frozen=True, slots=True)
class Advance:
    """Rows of a request that stand after a pass of the target, and the token that follows each of them.

    start           position of the first
    hidden_rows     where their hidden states are among those of the pass
    next_token_ids  one per row
    is_current      the last of next_token_ids is the request's newest token, so drafts may follow it
    """

    state: RequestState
    start: int
    hidden_rows: Sequence[int]
    next_token_ids: Sequence[int]
    is_current: bool

    @property
    def end(self) -> int:
        return self.start + len(self.next_token_ids)

    def num_drafts(self, most: int) -> int:
        """As many as the last round gave tokens, so that drafting slows down where it fails, and none that could not
        become output any more: the target adds one token to those it accepts."""
        remaining = self.state.token_limit - (self.end + 1)
        return max(0, min(most, len(self.next_token_ids), remaining - 1)) if self.is_current else 0


@dataclass(frozen=True, slots=True)
class Following:
    """Rows that MTP computes after a pass: those of all that stand that it may see again.

    rows       of each request in one or two parts
    places     where they are among all that stand
    last_rows  of each request, among them
    """

    rows: list[RequestRows]
    places: list[int]
    last_rows: list[int]

    @classmethod
    def of(cls, standing: Sequence[RequestRows], window: MtpWindow | None) -> "Following":
        found, first = cls([], [], []), 0
        for each in standing:
            for start, end in window.kept(each.start, each.end) if window else [(each.start, each.end)]:
                part = slice(start - each.start, end - each.start)
                found.rows.append(RequestRows(each.slot, start, each.token_ids[part]))
                found.places.extend(range(first + part.start, first + part.stop))
            found.last_rows.append(len(found.places) - 1)
            first += len(each.token_ids)
        return found


class Drafter:
    """Keeps MTP's KV in step with the target's and proposes what comes next."""

    def __init__(self, model: Qwen3_5, kv: KVCache, sampler: Sampler, tables: BlockTables, num_drafts: int) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._tables = tables
        self._num_drafts = num_drafts

    def draft(self, advances: Sequence[Advance], hidden: torch.Tensor) -> list[tuple[int, ...]]:
        """Writes MTP's KV of the rows that stand, over what its own drafts left there; then drafts ahead.

        hidden  [rows of the pass, hidden]  the target's
        return  drafts per advance, fewer or none where the request's end is near
        """
        following = self._follow(advances, hidden)
        counts = [advance.num_drafts(self._num_drafts) for advance in advances]
        drafts: list[tuple[int, ...]] = [()] * len(advances)
        active = list(range(len(advances)))
        for depth in range(max(counts)):
            still = [k for k, i in enumerate(active) if counts[i] > depth]
            active = [active[k] for k in still]
            following = following[still]
            if depth > 0:
                following = self._feed_back(following, [(advances[i], drafts[i]) for i in active])
            chosen = self._choose(following, [(advances[i], drafts[i]) for i in active])
            for i, token_id in zip(active, chosen, strict=True):
                drafts[i] = (*drafts[i], token_id)
        return drafts

    def _follow(self, advances: Sequence[Advance], hidden: torch.Tensor) -> torch.Tensor:
        """MTP over the rows that stand; its hidden state of each advance's last row."""
        standing = [row for advance in advances for row in advance.hidden_rows]
        rows = [RequestRows(a.state.slot, a.start, a.next_token_ids) for a in advances]
        following = Following.of(rows, self._kv.window)
        batch = build_batch(following.rows, self._tables, commits=False)
        out = self._model.forward_mtp(batch, hidden[[standing[place] for place in following.places]], self._kv)
        return out[following.last_rows]

    def _feed_back(self, hidden: torch.Tensor, drafted: Sequence[tuple[Advance, tuple[int, ...]]]) -> torch.Tensor:
        """One more row per request: its last draft with MTP's own hidden state."""
        rows = [RequestRows(a.state.slot, a.end + len(drafts) - 1, drafts[-1:]) for a, drafts in drafted]
        return self._model.forward_mtp(build_batch(rows, self._tables, commits=False), hidden, self._kv)

    def _choose(self, hidden: torch.Tensor, drafted: Sequence[tuple[Advance, tuple[int, ...]]]) -> list[int]:
        rows = [sampling_row(a.state, a.end + 1 + len(drafts), drafts) for a, drafts in drafted]
        return self._sampler.sample(self._model.compute_logits(hidden), rows).tolist()
