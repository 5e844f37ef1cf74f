"""The rows of a pass as a layer meets them that keeps a window of each context."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.launch import cdiv, next_power_of_2, plain_options

BLOCK_SIZE = 64
ROWS = 256


@dataclass(frozen=True, slots=True)
class WindowRows:
    """A context as if the blocks between its first and the window had never been.

    block_tables  [requests, ring] int32  the first block, then the window's in order
    context_lens  [requests] int32
    slot_mapping  [rows] int64
    """

    block_tables: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor


def window_rows(
    slots: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    ring: int,
    num_rows: Sequence[int],
) -> WindowRows:
    """id(slot, b) = slot * (1 + ring) + (0 if b == 0 else 1 + (b - 1) % ring) for block b of a context, of which those
    from max(1, (context - 1) // 64 - ring + 2) on are the window.

    slots         [requests] int64
    positions     [rows] int64
    query_starts  [requests + 1] int32  request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens  [requests] int32
    slot_mapping  [rows] int64  where it is negative, a row stays without a place
    num_rows      of each request
    bounds        a request's rows with a place lie in its first block or in the window
    """
    arguments = (slots, positions, query_starts, context_lens, slot_mapping, ring, num_rows)
    return window_rows_triton(*arguments) if slots.is_cuda else window_rows_reference(*arguments)


def window_rows_reference(
    slots: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    ring: int,
    num_rows: Sequence[int],
) -> WindowRows:
    first = ((context_lens.long() - 1) // BLOCK_SIZE - ring + 2).clamp(min=1)
    base = slots * (1 + ring)
    newest = 1 + (first[:, None] - 1 + torch.arange(ring - 1, device=slots.device)) % ring
    tables = base[:, None] + torch.cat([torch.zeros_like(base)[:, None], newest], dim=1)
    block = positions // BLOCK_SIZE
    place = torch.where(block == 0, 0, 1 + (block - 1) % ring)
    owners = torch.repeat_interleave(base, torch.tensor(num_rows, device=slots.device))
    mapping = (owners + place) * BLOCK_SIZE + positions % BLOCK_SIZE
    return WindowRows(
        block_tables=tables.int(),
        context_lens=(context_lens - (first - 1) * BLOCK_SIZE).int(),
        slot_mapping=torch.where(slot_mapping < 0, -1, mapping),
    )


def window_rows_triton(
    slots: torch.Tensor,
    positions: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    ring: int,
    num_rows: Sequence[int],
) -> WindowRows:
    found = WindowRows(
        block_tables=torch.empty(len(slots), ring, dtype=torch.int32, device=slots.device),
        context_lens=torch.empty_like(context_lens),
        slot_mapping=torch.empty_like(slot_mapping),
    )
    window_rows_kernel[(len(slots), 1 + cdiv(max(num_rows), ROWS))](
        slots, positions, query_starts, context_lens, slot_mapping,
        found.block_tables, found.context_lens, found.slot_mapping, ring,
        ROWS=ROWS, PADDED=next_power_of_2(ring), **plain_options(4, is_fused=True),
    )  # fmt: skip
    return found


@triton.jit
def window_rows_kernel(
    slots_ptr, positions_ptr, starts_ptr, lens_ptr, mapping_ptr, tables_out_ptr, lens_out_ptr, mapping_out_ptr, ring,
    ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    base = tl.load(slots_ptr + request) * (1 + ring)
    if tl.program_id(1) == 0:
        context = tl.load(lens_ptr + request)
        first = tl.maximum((context - 1) // 64 - ring + 2, 1)
        tl.store(lens_out_ptr + request, context - (first - 1) * 64)
        column = tl.arange(0, PADDED)
        # behind the first block stands block first + column - 1
        block_id = base + tl.where(column == 0, 0, 1 + (first + column + ring - 2) % ring)
        tl.store(tables_out_ptr + request * ring + column, block_id.to(tl.int32), mask=column < ring)
    else:
        row = tl.load(starts_ptr + request) + (tl.program_id(1) - 1) * ROWS + tl.arange(0, ROWS)
        mask = row < tl.load(starts_ptr + request + 1)
        position = tl.load(positions_ptr + row, mask=mask, other=0)
        block = position // 64
        place = tl.where(block == 0, 0, 1 + (block + ring - 1) % ring)
        target = (base + place) * 64 + position % 64
        old = tl.load(mapping_ptr + row, mask=mask, other=-1)
        tl.store(mapping_out_ptr + row, tl.where(old < 0, -1, target), mask=mask)
