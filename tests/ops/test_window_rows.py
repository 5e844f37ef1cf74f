"""window_rows."""

import pytest
import torch

from engine.cache.mtp_window import MtpWindow
from engine.ops.window_rows import window_rows_kernel, window_rows_reference, window_rows_triton
from tests.ops.kernels import IS_INTERPRETED, both
from tests.ops.targets import SHARED_MEMORY, compiled

IMPLEMENTATIONS = both(window_rows_reference, window_rows_triton)


def run(implementation, device, slots, rows, ring):
    """rows  (first position, number) of each request"""
    starts = torch.tensor([0, *(count for _, count in rows)]).cumsum(0).int()
    positions = torch.cat([torch.arange(first, first + count) for first, count in rows])
    contexts = torch.tensor([first + count for first, count in rows], dtype=torch.int32)
    mapping = positions.clone()
    mapping[-1] = -1
    parts = (x.to(device) for x in (torch.tensor(slots), positions, starts, contexts, mapping))
    return implementation(*parts, ring, [count for _, count in rows]), positions


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_by_hand(implementation, device):
    # 5 places a slot: block 0, then a ring of 4 of which 3 are looked at
    found, _ = run(implementation, device, [2, 0, 1], [(700, 3), (130, 2), (0, 1)], ring=4)
    # 703 tokens end in block 10, so blocks 0, 8, 9, 10 are seen; 10 lies at place 1 + 9 % 4
    assert found.block_tables.tolist() == [[10, 14, 11, 12], [0, 1, 2, 3], [5, 6, 7, 8]]
    assert found.context_lens.tolist() == [703 - 7 * 64, 132, 1]
    assert found.slot_mapping.tolist() == [
        12 * 64 + 60,
        12 * 64 + 61,
        12 * 64 + 62,
        130,
        131,
        -1,
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("ring", [4, 5, 67])
def test_rows_are_found_where_they_were_put(implementation, ring, device):
    """Through the table a row stands as far from the context's end as it did."""
    rows = [(0, 1), (63, 2), (64 * ring, 8), (64 * ring + 60, 9), (100_003, 64 * (ring - 2)), (5, 320)][
        : 6 if ring > 5 else 5
    ]
    slots = [3, 0, 5, 1, 2, 4][: len(rows)]
    found, positions = run(implementation, device, slots, rows, ring)
    first = 0
    for request, (start, count) in enumerate(rows):
        context = int(found.context_lens[request])
        for row in range(count - (request == len(rows) - 1)):
            at = context - count + row
            block_id = int(found.block_tables[request, at // 64])
            assert int(found.slot_mapping[first + row]) == block_id * 64 + at % 64
            assert at % 64 == int(positions[first + row]) % 64
        assert MtpWindow(ring).first_block(start + count) == (start + count - context) // 64 + 1
        first += count
    assert int(found.slot_mapping[-1]) == -1


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_compiles(capability):
    wide = ("slots_ptr", "positions_ptr", "mapping_ptr", "mapping_out_ptr")
    types = {name: "*i64" if name in wide else "*i32" for name in window_rows_kernel.arg_names if name.endswith("_ptr")}
    compiled(window_rows_kernel, capability, types | {"ring": "i32"}, {"ROWS": 256, "PADDED": 128}, 4)
