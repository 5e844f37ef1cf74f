"""The rows of one forward pass, as the model sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from config.engine import BLOCK_SIZE

# most rows that one request brings to a pass that may still be taken back: one token and up to seven drafts
MAX_PENDING_ROWS = 8


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of several requests, each request's rows contiguous and in order of position.

    token_ids       [rows] int64
    positions       [rows] int64
    query_starts    [requests + 1] int32   request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens    [requests] int32       tokens in the KV cache once this pass has written its rows
    block_tables    [requests, blocks] int32; beyond a request's own blocks lie ids that mean nothing
    slot_mapping    [rows] int64           block_id * 64 + offset of each row's KV
    state_slots     [requests] int64       slot of each request's GDN state
    num_accepted    [requests] int32       rows of the previous pass that turned out to be part of the output;
                                           folded into the GDN state, in order, before anything else
    commits         True: the rows are certain (prompt) and advance the GDN state at once.
                    False: at most MAX_PENDING_ROWS rows per request, left pending beside the state until the next
                    pass says through num_accepted how many of them stand.

    What follows is known on the host, so that nothing has to wait for the device:
    num_rows        rows of each request
    max_context     no context is longer; what is launched for a pass may depend on it, results may not
    folds           whether num_accepted may be other than zero
    keeps           GDN states that are kept on the way, of rows that commit: rows of each request before them; of each
                    request the index that it is kept at, -1 for none; and the same, [requests] int64, on the device
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    state_slots: torch.Tensor
    num_accepted: torch.Tensor
    commits: bool
    num_rows: tuple[int, ...]
    max_context: int
    folds: bool = True
    keeps: tuple[tuple[int, tuple[int, ...], torch.Tensor], ...] = ()

    @property
    def last_rows(self) -> list[int]:
        """Of each request."""
        return [end - 1 for end in accumulate(self.num_rows)]


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request's part of a batch: its tokens at positions start, start + 1, ...

    keeps  (position, index): after the tokens before it the GDN state is to be kept there
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_accepted: int = 0
    keeps: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class BlockTables:
    """The block ids of every slot's request, kept on the device so that a step sends only the new ones.

    ids  [slots, blocks] int32
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.ids = torch.zeros(num_slots, max_blocks, dtype=torch.int32, device=device)
        self._lengths = [0] * num_slots

    def begin(self, slot: int) -> None:
        """The slot has a new request."""
        self._lengths[slot] = 0

    def extend(self, slot: int, block_ids: Sequence[int]) -> None:
        """Takes over what was added to the request's block ids since the last call."""
        known = self._lengths[slot]
        if known < len(block_ids):
            copy_in(self.ids[slot, known : len(block_ids)], block_ids[known:])
            self._lengths[slot] = len(block_ids)


def to_device(values: Sequence[int] | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy on the device that waits for nothing that runs there."""
    host = _on_host(values, dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def copy_in(target: torch.Tensor, values: Sequence[int] | torch.Tensor) -> None:
    """Likewise, into memory that is there."""
    host = _on_host(values, target.dtype)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def _on_host(values: Sequence[int] | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # torch takes the sequence of a chunk's tokens apart several times as slowly
    given = values if isinstance(values, torch.Tensor) else np.array(values, dtype=np.int64)
    return torch.as_tensor(given, dtype=dtype)


def build_batch(rows: Sequence[RequestRows], tables: BlockTables, commits: bool) -> ForwardBatch:
    """The batch of several requests' rows, on the device of the tables."""
    num_rows = tuple(len(r.token_ids) for r in rows)
    num_blocks = max(-(-r.end // BLOCK_SIZE) for r in rows)

    def put(values: Sequence[int] | torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return to_device(values, dtype, tables.ids.device)

    positions = put(torch.cat([torch.arange(r.start, r.end) for r in rows]))
    owners = put(torch.arange(len(rows)).repeat_interleave(torch.tensor(num_rows)))
    slots = put([r.slot for r in rows])
    block_tables = tables.ids[:, :num_blocks].index_select(0, slots)
    return ForwardBatch(
        token_ids=put(list(chain.from_iterable(r.token_ids for r in rows))),
        positions=positions,
        query_starts=put([0, *accumulate(num_rows)], torch.int32),
        context_lens=put([r.end for r in rows], torch.int32),
        block_tables=block_tables,
        slot_mapping=block_tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        state_slots=slots,
        num_accepted=put([r.num_accepted for r in rows], torch.int32),
        commits=commits,
        num_rows=num_rows,
        max_context=max(r.end for r in rows),
        folds=any(r.num_accepted for r in rows),
        keeps=tuple((num_rows, indices, put(indices)) for num_rows, indices in _indices_by_rows(rows).items()),
    )


def _indices_by_rows(rows: Sequence[RequestRows]) -> dict[int, tuple[int, ...]]:
    """Number of rows from each request's first -> where the states after so many are kept, -1 for none."""
    found = sorted({position - r.start for r in rows for position, _ in r.keeps})
    kept = [{position - r.start: index for position, index in r.keeps} for r in rows]
    return {num_rows: tuple(one.get(num_rows, -1) for one in kept) for num_rows in found}
