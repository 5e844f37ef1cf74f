"""The rows of a decode pass, from where its requests stand."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.decode_slots import ACCEPTED, DRAFTS, LIMIT, NEXT, NUM_DRAFTS, POSITION, DecodeSlots
from engine.ops.launch import cdiv, next_power_of_2, plain_options

BLOCK_SIZE = 64
# block ids that one program copies
COPIED = 1024


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R rows for each of B requests: its newest token and its drafts.

    token_ids       [B * R] int64  rows after the drafts that there are hold ids that mean nothing
    positions       [B * R] int64
    next_positions  [B * R] int64  of the token after each row
    slot_mapping    [B * R] int64  block_id * 64 + offset; -1 for those rows, and from the request's limit on
    row_slots       [B * R] int32  slot of the row's request
    slots           [B] int32
    context_lens    [B] int32      tokens with the R rows
    num_accepted    [B] int32      rows of the pass before that stand
    block_tables    [B, blocks] int32
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    slot_mapping: torch.Tensor
    row_slots: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor
    num_accepted: torch.Tensor
    block_tables: torch.Tensor


def decode_rows(state: DecodeSlots, slots: torch.Tensor, block_ids: torch.Tensor, num_rows: int) -> DecodeRows:
    """slots      [B] int64, all different
    block_ids  [slots, blocks] int32
    num_rows   R, at most 1 + drafts that the state has room for
    bounds     where a request stands is held to what block_ids cover
    """
    if slots.is_cuda:
        return decode_rows_triton(state, slots, block_ids, num_rows)
    return decode_rows_reference(state, slots, block_ids, num_rows)


def decode_rows_reference(
    state: DecodeSlots, slots: torch.Tensor, block_ids: torch.Tensor, num_rows: int
) -> DecodeRows:
    numbers, tables = state.numbers[slots], block_ids[slots]
    row = torch.arange(num_rows, device=slots.device)
    most = block_ids.shape[1] * BLOCK_SIZE - num_rows
    positions = numbers[:, POSITION.value].clamp(0, most)[:, None] + row
    written = (row <= numbers[:, NUM_DRAFTS.value, None]) & (positions < numbers[:, LIMIT.value, None])
    places = tables.gather(1, positions // BLOCK_SIZE).long() * BLOCK_SIZE + positions % BLOCK_SIZE
    token_ids = torch.cat([numbers[:, NEXT.value, None], numbers[:, DRAFTS.value : DRAFTS.value + num_rows - 1]], dim=1)
    return DecodeRows(
        token_ids=token_ids.flatten(),
        positions=positions.flatten(),
        next_positions=positions.flatten() + 1,
        slot_mapping=torch.where(written, places, -1).flatten(),
        row_slots=slots.repeat_interleave(num_rows).int(),
        slots=slots.int(),
        context_lens=(positions[:, 0] + num_rows).int(),
        num_accepted=numbers[:, ACCEPTED.value].int(),
        block_tables=tables,
    )


def decode_rows_triton(state: DecodeSlots, slots: torch.Tensor, block_ids: torch.Tensor, num_rows: int) -> DecodeRows:
    assert state.numbers.is_contiguous() and block_ids.is_contiguous()
    requests, width = len(slots), block_ids.shape[1]

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=slots.device)

    rows = DecodeRows(
        *(empty(requests * num_rows, dtype=torch.int64) for _ in range(4)),
        row_slots=empty(requests * num_rows, dtype=torch.int32),
        slots=empty(requests, dtype=torch.int32),
        context_lens=empty(requests, dtype=torch.int32),
        num_accepted=empty(requests, dtype=torch.int32),
        block_tables=empty(requests, width, dtype=torch.int32),
    )
    decode_rows_kernel[(requests, 1 + cdiv(width, COPIED))](
        state.numbers, slots, block_ids, rows.token_ids, rows.positions, rows.next_positions, rows.slot_mapping,
        rows.row_slots, rows.slots, rows.context_lens, rows.num_accepted, rows.block_tables,
        state.numbers.shape[1], width, ROWS=num_rows, PADDED=next_power_of_2(num_rows), COPIED=COPIED,
        **plain_options(4, is_fused=True),
    )  # fmt: skip
    return rows


@triton.jit
def decode_rows_kernel(
    numbers_ptr, slots_ptr, block_ids_ptr, token_ids_ptr, positions_ptr, next_positions_ptr, mapping_ptr,
    row_slots_ptr, request_slots_ptr, contexts_ptr, accepted_ptr, tables_ptr, stride, width,
    ROWS: tl.constexpr, PADDED: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    slot = tl.load(slots_ptr + request)
    block_ids_ptr += slot * width
    if tl.program_id(1) == 0:
        numbers_ptr += slot * stride
        start = tl.load(numbers_ptr + POSITION)
        start = tl.minimum(tl.maximum(start, 0), width * 64 - ROWS)
        row = tl.arange(0, PADDED)
        mask = row < ROWS
        drafted = tl.load(numbers_ptr + DRAFTS - 1 + row, mask=mask & (row > 0), other=0)
        token_ids = tl.where(row == 0, tl.load(numbers_ptr + NEXT), drafted)
        positions = start + row
        written = (row <= tl.load(numbers_ptr + NUM_DRAFTS)) & (positions < tl.load(numbers_ptr + LIMIT))
        block_id = tl.load(block_ids_ptr + positions // 64, mask=mask, other=0)
        places = tl.where(written, block_id.to(tl.int64) * 64 + positions % 64, -1)
        at = request * ROWS + row
        tl.store(token_ids_ptr + at, token_ids, mask=mask)
        tl.store(positions_ptr + at, positions, mask=mask)
        tl.store(next_positions_ptr + at, positions + 1, mask=mask)
        tl.store(mapping_ptr + at, places, mask=mask)
        tl.store(row_slots_ptr + at, slot.to(tl.int32) + tl.zeros_like(row), mask=mask)
        tl.store(request_slots_ptr + request, slot.to(tl.int32))
        tl.store(contexts_ptr + request, (start + ROWS).to(tl.int32))
        tl.store(accepted_ptr + request, tl.load(numbers_ptr + ACCEPTED).to(tl.int32))
    else:
        column = (tl.program_id(1) - 1) * COPIED + tl.arange(0, COPIED)
        is_block = column < width
        copied = tl.load(block_ids_ptr + column, mask=is_block, other=0)
        tl.store(tables_ptr + request.to(tl.int64) * width + column, copied, mask=is_block)
