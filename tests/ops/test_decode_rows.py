"""Where requests stand, and the rows that follow from it."""

import pytest
import torch

from engine.ops.accept_drafts import accept_drafts_reference, accept_drafts_triton
from engine.ops.decode_rows import decode_rows_reference, decode_rows_triton
from engine.ops.decode_slots import ACCEPTED, DRAFTS, LIMIT, NEXT, NUM_DRAFTS, POSITION, DecodeSlots
from tests.ops.kernels import both

ROWS = both(decode_rows_reference, decode_rows_triton)
ACCEPTS = both(accept_drafts_reference, accept_drafts_triton)


def slots_at(device, *rows, most_drafts=3):
    """rows  (newest token, position, limit, accepted, drafts)"""
    state = DecodeSlots.empty(len(rows), most_drafts, device)
    for slot, (newest, position, limit, accepted, drafts) in enumerate(rows):
        numbers = state.row(position, limit)
        numbers[NEXT.value], numbers[ACCEPTED.value], numbers[NUM_DRAFTS.value] = newest, accepted, len(drafts)
        numbers[DRAFTS.value : DRAFTS.value + len(drafts)] = drafts
        state.numbers[slot] = torch.tensor(numbers, device=device)
    return state


def tensor(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("decode_rows", ROWS)
def test_rows_are_the_newest_token_and_its_drafts(decode_rows, device):
    state = slots_at(device, (0, 0, 0, 0, []), (50, 63, 200, 2, [51, 52]), (60, 5, 7, 1, [61, 62, 63]))
    block_ids = tensor([[0] * 4, [9, 8, 7, 6], [3, 2, 1, 0]], device, torch.int32)
    rows = decode_rows(state, tensor([2, 1], device), block_ids, 4)
    assert rows.token_ids.tolist() == [60, 61, 62, 63, 50, 51, 52, 0]
    assert rows.positions.tolist() == [5, 6, 7, 8, 63, 64, 65, 66]
    assert rows.next_positions.tolist() == [6, 7, 8, 9, 64, 65, 66, 67]
    assert rows.slots.tolist() == [2, 1]
    # nothing is written from the limit on, nor after the last draft
    assert rows.slot_mapping.tolist() == [3 * 64 + 5, 3 * 64 + 6, -1, -1, 9 * 64 + 63, 8 * 64, 8 * 64 + 1, -1]
    assert rows.row_slots.tolist() == [2] * 4 + [1] * 4
    assert rows.context_lens.tolist() == [9, 67]
    assert rows.num_accepted.tolist() == [1, 2]
    assert rows.block_tables.tolist() == [[3, 2, 1, 0], [9, 8, 7, 6]]


def test_rows_until_a_position(device):
    # three rows of each were accepted, of the last one: none has been folded since, or all
    state = slots_at(device, (0, 66, 300, 3, []), (0, 64, 300, 3, []), (0, 67, 300, 3, []), (0, 63, 300, 3, []))
    slots, positions = tensor([0, 1, 2, 3, 0], device), tensor([64, 64, 64, 64, 128], device)
    assert state.rows_until(positions, slots).tolist() == [1, 3, -1, -1, -1]


@pytest.mark.parametrize("decode_rows", ROWS)
def test_one_row_without_drafts(decode_rows, device):
    state = slots_at(device, (7, 128, 300, 1, []), most_drafts=1)
    block_ids = torch.arange(2100, device=device, dtype=torch.int32)[None]
    rows = decode_rows(state, tensor([0], device), block_ids, 1)
    assert (rows.token_ids.tolist(), rows.slot_mapping.tolist(), rows.context_lens.tolist()) == ([7], [128], [129])
    assert torch.equal(rows.block_tables, block_ids)


@pytest.mark.parametrize("decode_rows", ROWS)
def test_a_table_of_one_block(decode_rows, device):
    rows = decode_rows(
        slots_at(device, (7, 62, 90, 1, [8])), tensor([0], device), tensor([[4]], device, torch.int32), 2
    )
    assert rows.slot_mapping.tolist() == [4 * 64 + 62, 4 * 64 + 63]
    assert rows.block_tables.tolist() == [[4]]


@pytest.mark.parametrize("decode_rows", ROWS)
def test_a_place_beyond_every_block_reads_no_table_beyond_its_end(decode_rows, device):
    state = slots_at(device, (7, 10_000, 90, 1, [8]))
    rows = decode_rows(state, tensor([0], device), tensor([[4, 5]], device, torch.int32), 2)
    assert rows.positions.tolist() == [126, 127]
    assert rows.slot_mapping.tolist() == [-1, -1]


@pytest.mark.parametrize("accept", ACCEPTS)
@pytest.mark.parametrize(
    "drafts, chosen, num_tokens",
    [
        ([5, 6, 7], [5, 6, 7, 8], 4),
        ([5, 6, 7], [5, 6, 9, 8], 3),
        ([5, 6, 7], [9, 6, 7, 8], 1),
        ([5, 6], [5, 6, 0, 8], 3),
        ([], [0, 0, 0, 0], 1),
    ],
)
def test_drafts_stand_up_to_the_first_that_was_not_chosen(accept, device, drafts, chosen, num_tokens):
    state = slots_at(device, (0, 0, 0, 0, []), (4, 62, 200, 1, drafts))
    mapping = tensor([362, 363, 64, 65], device)
    blocks = tensor([[5, 1, 2, 3]], device, torch.int32)
    found = accept(state, tensor([1], device), tensor(chosen, device), mapping, blocks, 3, False)
    position = 62 + num_tokens
    assert found.num_tokens.tolist() == [num_tokens]
    assert found.standing.tolist() == mapping.tolist()[:num_tokens] + [-1] * (4 - num_tokens)
    assert found.last_rows.tolist() == [num_tokens - 1]
    assert found.positions[:, 0].tolist() == [position - 1 + depth for depth in range(3)]
    assert found.slot_mapping[:, 0].tolist() == [
        [5, 1][p // 64] * 64 + p % 64 for p in range(position - 1, position + 2)
    ]
    assert found.context_lens[:, 0].tolist() == [position + depth for depth in range(3)]
    numbers = state.numbers[1].tolist()
    assert numbers[NEXT.value] == chosen[num_tokens - 1]
    assert numbers[POSITION.value] == position
    assert numbers[ACCEPTED.value] == num_tokens
    assert numbers[NUM_DRAFTS.value] == 3
    assert found.record[:, : 2 + len(chosen)].tolist() == [[num_tokens, 3, *chosen]]
    assert found.record.shape == (1, 2 + 4 + 3)
    assert not state.numbers[0].any()


@pytest.mark.parametrize("accept", ACCEPTS)
@pytest.mark.parametrize("limit, following", [(20, 3), (16, 3), (15, 2), (13, 0), (12, 0), (10, 0)])
def test_no_drafts_follow_that_could_not_become_output(accept, device, limit, following):
    """The token after the newest at 11 is the last but one that a limit of 13 allows, and the target adds it itself."""
    state = slots_at(device, (4, 10, limit, 1, []))
    blocks = tensor([[5]], device, torch.int32)
    found = accept(state, tensor([0], device), tensor([9, 0], device), tensor([330, -1], device), blocks, 3, False)
    assert found.record[:, 1].tolist() == [following]
    assert found.slot_mapping[:, 0].tolist() == [5 * 64 + p if p < limit else -1 for p in (10, 11, 12)]
    assert state.numbers[0, LIMIT.value] == limit


@pytest.mark.parametrize("accept", ACCEPTS)
def test_rows_that_commit_leave_nothing_pending(accept, device):
    state = slots_at(device, (4, 99, 300, 0, []), (4, 7, 300, 0, []))
    blocks = tensor([[5, 6], [7, 8]], device, torch.int32)
    found = accept(state, tensor([1, 0], device), tensor([8, 9], device), tensor([-1, -1], device), blocks, 0, True)
    assert found.num_tokens.tolist() == [1, 1]
    assert found.positions.shape == (0, 2)
    assert state.numbers[:, : NUM_DRAFTS.value + 1].tolist() == [[9, 100, 300, 0, 0], [8, 8, 300, 0, 0]]
