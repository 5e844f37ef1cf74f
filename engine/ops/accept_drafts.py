"""Which drafts of a pass stand, where its requests stand then, and where MTP's rows for the next drafts lie."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.ops.decode_rows import BLOCK_SIZE
from engine.ops.decode_slots import ACCEPTED, DRAFTS, LIMIT, NEXT, NUM_DRAFTS, POSITION, DecodeSlots
from engine.ops.launch import has_dependent_launch, launch_options, next_power_of_2


@dataclass(frozen=True, slots=True)
class Accepted:
    """What R choices for each of B requests come to.

    num_tokens      [B] int32      tokens that the pass adds: drafts that were chosen too, and one choice after them
    record          [B, 2 + R + D] int64  of each request: num_tokens, how many drafts may follow (fewer than D near the
                    limit), the R choices, and room for D drafts
    standing        [B * R] int64  slot mapping of the rows that stand, -1 for the others
    last_rows       [B] int64      the last of them
    positions       [D, B] int64   of MTP's row for each draft: the last one that stands, then one after another
    next_positions  [D, B] int64   of the draft itself
    slot_mapping    [D, B] int64   of those rows, -1 from the limit on
    context_lens    [D, B] int32   with those rows
    """

    num_tokens: torch.Tensor
    record: torch.Tensor
    standing: torch.Tensor
    last_rows: torch.Tensor
    positions: torch.Tensor
    next_positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_lens: torch.Tensor


def accept_drafts(
    state: DecodeSlots,
    slots: torch.Tensor,
    chosen: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    num_drafts: int,
    commits: bool,
) -> Accepted:
    """A draft stands when it was chosen too, and all before it were.

    slots         [B] int64
    chosen        [B * R] int64  after the newest token and after each draft
    slot_mapping  [B * R] int64  of the pass
    block_tables  [B, blocks] int32
    num_drafts    D, that will follow
    commits       the rows are part of the Gated DeltaNet state already, so none of them waits beside it
    writes        NEXT, POSITION, ACCEPTED and NUM_DRAFTS of those slots
    """
    arguments = (state, slots, chosen, slot_mapping, block_tables, num_drafts, commits)
    return accept_drafts_triton(*arguments) if slots.is_cuda else accept_drafts_reference(*arguments)


def accept_drafts_reference(
    state: DecodeSlots,
    slots: torch.Tensor,
    chosen: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    num_drafts: int,
    commits: bool,
) -> Accepted:
    numbers, requests = state.numbers[slots], len(slots)
    chosen = chosen.view(requests, -1)
    num_rows = chosen.shape[1]
    row = torch.arange(num_rows, device=slots.device)
    drafts = numbers[:, DRAFTS.value : DRAFTS.value + num_rows - 1]
    stands = (drafts == chosen[:, :-1]) & (row[:-1] < numbers[:, NUM_DRAFTS.value, None])
    num_tokens = 1 + stands.long().cumprod(dim=1).sum(dim=1)
    most = block_tables.shape[1] * BLOCK_SIZE - num_rows
    position = numbers[:, POSITION.value].clamp(0, most) + num_tokens
    limit = numbers[:, LIMIT.value]
    following = (limit - position - 2).clamp(0, num_drafts)
    state.numbers[slots, NEXT.value] = chosen.gather(1, num_tokens[:, None] - 1)[:, 0]
    state.numbers[slots, POSITION.value] = position
    state.numbers[slots, ACCEPTED.value] = 0 if commits else num_tokens
    state.numbers[slots, NUM_DRAFTS.value] = following
    positions = position - 1 + torch.arange(num_drafts, device=slots.device)[:, None]
    blocks = (positions // BLOCK_SIZE).clamp(max=block_tables.shape[1] - 1)
    places = block_tables.gather(1, blocks.T).T.long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return Accepted(
        num_tokens=num_tokens.int(),
        record=torch.cat([num_tokens[:, None], following[:, None], chosen, chosen.new_zeros(requests, num_drafts)], 1),
        standing=torch.where(row < num_tokens[:, None], slot_mapping.view(requests, -1), -1).flatten(),
        last_rows=torch.arange(requests, device=slots.device) * num_rows + num_tokens - 1,
        positions=positions,
        next_positions=positions + 2,
        slot_mapping=torch.where(positions < limit, places, -1),
        context_lens=(positions + 1).int(),
    )


def accept_drafts_triton(
    state: DecodeSlots,
    slots: torch.Tensor,
    chosen: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    num_drafts: int,
    commits: bool,
) -> Accepted:
    assert state.numbers.is_contiguous() and block_tables.is_contiguous()
    requests, num_rows = len(slots), len(chosen) // len(slots)

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=slots.device)

    found = Accepted(
        num_tokens=empty(requests, dtype=torch.int32),
        record=empty(requests, 2 + num_rows + num_drafts),
        standing=empty(len(chosen)),
        last_rows=empty(requests),
        positions=empty(num_drafts, requests),
        next_positions=empty(num_drafts, requests),
        slot_mapping=empty(num_drafts, requests),
        context_lens=empty(num_drafts, requests, dtype=torch.int32),
    )
    accept_drafts_kernel[(requests,)](
        state.numbers, slots, chosen, slot_mapping, block_tables, found.num_tokens, found.record, found.standing,
        found.last_rows, found.positions, found.next_positions, found.slot_mapping, found.context_lens,
        state.numbers.shape[1], block_tables.shape[1],
        ROWS=num_rows, DEPTH=num_drafts, COMMITS=commits,
        PADDED_ROWS=next_power_of_2(num_rows), PADDED_DEPTH=next_power_of_2(max(num_drafts, 1)),
        PDL=has_dependent_launch(slots.device), **launch_options(slots.device, 4, is_fused=True),
    )  # fmt: skip
    return found


@triton.jit
def accept_drafts_kernel(
    numbers_ptr, slots_ptr, chosen_ptr, mapping_ptr, tables_ptr, num_tokens_ptr, record_ptr, standing_ptr,
    last_rows_ptr, positions_ptr, next_positions_ptr, places_ptr, contexts_ptr, stride, width,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COMMITS: tl.constexpr,
    PADDED_ROWS: tl.constexpr, PADDED_DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # launches nothing early: what it leaves is read by kernels that have not waited yet
    if PDL:
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    requests = tl.num_programs(0)
    numbers_ptr += tl.load(slots_ptr + request) * stride
    tables_ptr += request.to(tl.int64) * width
    first = request * ROWS
    row = tl.arange(0, PADDED_ROWS)
    is_draft = (row < ROWS - 1) & (row < tl.load(numbers_ptr + NUM_DRAFTS))
    drafts = tl.load(numbers_ptr + DRAFTS + row, mask=row < ROWS - 1, other=0)
    chosen = tl.load(chosen_ptr + first + row, mask=row < ROWS, other=0)
    # the first row after which the draft does not stand
    num_tokens = 1 + tl.min(tl.where(is_draft & (drafts == chosen), PADDED_ROWS, row), axis=0)
    num_tokens = tl.minimum(num_tokens, ROWS)
    start = tl.minimum(tl.maximum(tl.load(numbers_ptr + POSITION), 0), width * 64 - ROWS)
    position = start + num_tokens
    limit = tl.load(numbers_ptr + LIMIT)
    following = tl.minimum(tl.maximum(limit - position - 2, 0), DEPTH)
    newest = tl.load(chosen_ptr + first + num_tokens - 1)
    mapping = tl.load(mapping_ptr + first + row, mask=row < ROWS, other=0)
    # every number that is read here was read before one is written
    tl.debug_barrier()
    tl.store(numbers_ptr + NEXT, newest)
    tl.store(numbers_ptr + POSITION, position)
    tl.store(numbers_ptr + ACCEPTED, 0 if COMMITS else num_tokens)
    tl.store(numbers_ptr + NUM_DRAFTS, following)
    tl.store(num_tokens_ptr + request, num_tokens)
    record_ptr += request * (2 + ROWS + DEPTH)
    tl.store(record_ptr, num_tokens.to(tl.int64))
    tl.store(record_ptr + 1, following)
    tl.store(record_ptr + 2 + row, chosen, mask=row < ROWS)
    tl.store(standing_ptr + first + row, tl.where(row < num_tokens, mapping, -1), mask=row < ROWS)
    tl.store(last_rows_ptr + request, first + num_tokens - 1)
    depth = tl.arange(0, PADDED_DEPTH)
    is_row = depth < DEPTH
    positions = position - 1 + depth
    block = tl.minimum(positions // 64, width - 1)
    block_id = tl.load(tables_ptr + block, mask=is_row, other=0).to(tl.int64)
    at = depth * requests + request
    tl.store(positions_ptr + at, positions, mask=is_row)
    tl.store(next_positions_ptr + at, positions + 2, mask=is_row)
    tl.store(places_ptr + at, tl.where(positions < limit, block_id * 64 + positions % 64, -1), mask=is_row)
    tl.store(contexts_ptr + at, (positions + 1).to(tl.int32), mask=is_row)
