"""A pass over the newest tokens and drafts of requests, from forward to the next drafts, without a word to the host.

Everything here depends on the device's own state alone, by slot, so that a pass can be captured once and replayed, and
the next one launched before anybody has looked at what this one chose.
"""

import enum
from dataclasses import dataclass, replace

import torch

from engine.batch import ForwardBatch
from engine.models.qwen3_5 import AllKVLayers, Qwen3_5, StateLayers
from engine.ops.accept_drafts import Accepted, accept_drafts
from engine.ops.decode_rows import DecodeRows, decode_rows
from engine.ops.decode_slots import DecodeSlots
from engine.ops.logprobs import MAX_TOP, logprobs_of
from engine.ops.penalise import TokenCounts, observe
from engine.ops.sample import SampleRows, sample
from engine.ops.sample_argmax import argmax
from engine.ops.sample_table import SamplingTable


class Mode(enum.Enum):
    """How much choosing tokens takes. GREEDY: no request asks for anything but the most likely token."""

    GREEDY = "greedy"
    GENERAL = "general"
    LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What requests have on the device, by slot and by block.

    block_ids  [slots, blocks] int32
    """

    slots: DecodeSlots
    sampling: SamplingTable
    counts: TokenCounts
    block_ids: torch.Tensor
    kv: AllKVLayers
    states: StateLayers


@dataclass(frozen=True, slots=True)
class Masks:
    """What grammars allow after each row.

    words  [rows, at least vocab / 32] int32
    flags  [rows] int32, as SampleRows has them
    """

    words: torch.Tensor
    flags: torch.Tensor


@dataclass(frozen=True, slots=True)
class Forwarded:
    """Rows that went through the model. hidden [rows, hidden]"""

    rows: DecodeRows
    batch: ForwardBatch
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """chosen [rows] fp32, top_ids [rows, n] int64, top_values [rows, n] fp32"""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def to_host(self) -> "Logprobs":
        """Copies that will be there once the device has got here."""
        return Logprobs(*(x.to("cpu", non_blocking=True) for x in (self.chosen, self.top_ids, self.top_values)))


@dataclass(frozen=True, slots=True)
class Record:
    """What the host has to know of a pass.

    numbers  [B, 2 + R + D] int64  tokens that were added, drafts that follow, the R choices, the D drafts
    """

    numbers: torch.Tensor
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True)
class Owners:
    """Whose rows these are.

    slots         [B] int64, all different
    narrow_slots  [B] int32, the same
    block_tables  [B, blocks] int32
    """

    slots: torch.Tensor
    narrow_slots: torch.Tensor
    block_tables: torch.Tensor


class DecodePass:
    """Launches passes. What it allocates may be in a graph's own memory."""

    def __init__(self, model: Qwen3_5, state: DeviceState, num_drafts: int, max_context: int) -> None:
        """num_drafts   that are drafted after a pass
        max_context  bound on every request's tokens
        """
        self.num_drafts = num_drafts
        self._model = model
        self._state = state
        self._max_context = max_context
        self._constants: dict[tuple[str, int, int], torch.Tensor] = {}

    @torch.inference_mode()
    def forward(self, slots: torch.Tensor, num_rows: int) -> Forwarded:
        """slots  [B] int64, all different"""
        rows = decode_rows(self._state.slots, slots, self._state.block_ids, num_rows)
        batch = ForwardBatch(
            token_ids=rows.token_ids,
            positions=rows.positions,
            query_starts=self._starts(len(slots), num_rows),
            context_lens=rows.context_lens,
            block_tables=rows.block_tables,
            slot_mapping=rows.slot_mapping,
            state_slots=slots,
            num_accepted=rows.num_accepted,
            commits=False,
            num_rows=(num_rows,) * len(slots),
            max_context=self._max_context,
        )
        return Forwarded(rows, batch, self._model.forward(batch, self._state.kv, self._state.states))

    @torch.inference_mode()
    def sample(self, forwarded: Forwarded, mode: Mode, masks: Masks | None = None) -> Record:
        """Chooses, accepts, and drafts for the next pass. masks  not with GREEDY"""
        rows = forwarded.rows
        owners = Owners(forwarded.batch.state_slots, rows.slots, rows.block_tables)
        logits = self._model.compute_logits(forwarded.hidden)
        chosen = self._choose(logits, mode, self._verified(forwarded, masks))
        accepted = self._accept(owners, chosen, rows.slot_mapping, mode, commits=False)
        following = self._follow(forwarded, chosen, accepted) if self.num_drafts else forwarded.hidden
        self._draft(owners, accepted, following, mode)
        return _record(logits, chosen, accepted, mode)

    @torch.inference_mode()
    def choose_first(
        self, logits: torch.Tensor, owners: Owners, positions: torch.Tensor, mode: Mode, masks: Masks | None
    ) -> tuple[torch.Tensor, Accepted]:
        """The first token after each prompt. positions  [B] int64 of those tokens"""
        count = len(logits)
        no_drafts, nothing = positions.new_empty(count, 0), positions.new_full((count,), -1)
        rows = SampleRows(owners.narrow_slots, positions, no_drafts, self._filled(count, 0), *_parts(masks))
        chosen = self._choose(logits, mode, rows)
        return chosen, self._accept(owners, chosen, nothing, mode, commits=True)

    @torch.inference_mode()
    def finish_first(
        self,
        logits: torch.Tensor,
        owners: Owners,
        first: tuple[torch.Tensor, Accepted],
        hidden: torch.Tensor,
        mode: Mode,
    ) -> Record:
        """Drafts behind the first tokens. hidden  [B, hidden] MTP's of each prompt's last row, or anything without"""
        chosen, accepted = first
        self._draft(owners, accepted, hidden, mode)
        return _record(logits, chosen, accepted, mode)

    def _choose(self, logits: torch.Tensor, mode: Mode, rows: SampleRows) -> torch.Tensor:
        if mode is Mode.GREEDY:
            return argmax(logits)
        return sample(logits, self._state.sampling, self._state.counts, rows)

    def _verified(self, forwarded: Forwarded, masks: Masks | None) -> SampleRows:
        rows, num_rows = forwarded.rows, forwarded.batch.num_rows
        drafts = rows.token_ids.view(len(num_rows), -1)[:, 1:]
        places = self._places(len(num_rows), num_rows[0])
        return SampleRows(rows.row_slots, rows.next_positions, drafts, places, *_parts(masks))

    def _accept(
        self, owners: Owners, chosen: torch.Tensor, slot_mapping: torch.Tensor, mode: Mode, commits: bool
    ) -> Accepted:
        accepted = accept_drafts(
            self._state.slots, owners.slots, chosen, slot_mapping, owners.block_tables, self.num_drafts, commits
        )
        if mode is not Mode.GREEDY:
            observe(self._state.counts, self._state.sampling, chosen, owners.narrow_slots, accepted.num_tokens)
        return accepted

    def _follow(self, forwarded: Forwarded, chosen: torch.Tensor, accepted: Accepted) -> torch.Tensor:
        """MTP over the rows that stand, each with the token after it; its hidden state of each request's last one."""
        batch = replace(forwarded.batch, token_ids=chosen, slot_mapping=accepted.standing)
        hidden = self._model.forward_mtp(batch, forwarded.hidden, self._state.kv)
        return hidden.index_select(0, accepted.last_rows)

    def _draft(self, owners: Owners, accepted: Accepted, hidden: torch.Tensor, mode: Mode) -> None:
        """MTP's proposals, each fed back for the next; kept for the next pass, and in the record.

        hidden  [B, hidden]  MTP's, of the last row that stands
        """
        drafts = accepted.record[:, accepted.record.shape[1] - self.num_drafts :]
        chosen = owners.slots
        for depth in range(self.num_drafts):
            if depth:
                batch = self._fed_back(owners, accepted, depth, chosen)
                hidden = self._model.forward_mtp(batch, hidden, self._state.kv)
            places = self._filled(len(chosen), depth)
            rows = SampleRows(owners.narrow_slots, accepted.next_positions[depth], drafts, places)
            chosen = self._choose(self._model.compute_logits(hidden), mode, rows)
            drafts[:, depth] = chosen
        if self.num_drafts:
            self._state.slots.drafts[:, : self.num_drafts].index_copy_(0, owners.slots, drafts)

    def _fed_back(self, owners: Owners, accepted: Accepted, depth: int, drafts: torch.Tensor) -> ForwardBatch:
        return ForwardBatch(
            token_ids=drafts,
            positions=accepted.positions[depth],
            query_starts=self._starts(len(drafts), 1),
            context_lens=accepted.context_lens[depth],
            block_tables=owners.block_tables,
            slot_mapping=accepted.slot_mapping[depth],
            state_slots=owners.slots,
            num_accepted=self._filled(len(drafts), 0),
            commits=False,
            num_rows=(1,) * len(drafts),
            max_context=self._max_context,
        )

    # constants are made in the run that comes before a capture

    def _starts(self, requests: int, num_rows: int) -> torch.Tensor:
        return self._constant("starts", requests, num_rows, torch.arange(requests + 1) * num_rows)

    def _places(self, requests: int, num_rows: int) -> torch.Tensor:
        """Each row's place among its request's."""
        return self._constant("places", requests, num_rows, torch.arange(num_rows).repeat(requests))

    def _filled(self, requests: int, value: int) -> torch.Tensor:
        return self._constant("filled", requests, value, torch.full((requests,), value))

    def _constant(self, kind: str, requests: int, number: int, values: torch.Tensor) -> torch.Tensor:
        """int32, on the device"""
        key = kind, requests, number
        if key not in self._constants:
            self._constants[key] = values.int().to(self._state.block_ids.device)
        return self._constants[key]


def _record(logits: torch.Tensor, chosen: torch.Tensor, accepted: Accepted, mode: Mode) -> Record:
    if mode is not Mode.LOGPROBS:
        return Record(accepted.record, None)
    return Record(accepted.record, Logprobs(*logprobs_of(logits, chosen, min(MAX_TOP, logits.shape[1]))))


def _parts(masks: Masks | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if masks is None else (masks.words, masks.flags)
