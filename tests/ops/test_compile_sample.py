"""The kernels that choose tokens compile for every card, with the shapes that they run with."""

import os

import pytest

from engine.ops.logprobs import part_top_kernel, row_top_kernel
from engine.ops.penalise import observe_kernel
from engine.ops.sample import adjust_kernel, scan_kernel
from engine.ops.sample_argmax import argmax_kernel, best_kernel
from engine.ops.sample_truncate import BISECTED, bisect_kernel, collect_kernel, rank_kernel, shape_for, tally_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler"),
    pytest.mark.parametrize("capability", SHARED_MEMORY),
]
INT32 = ["vocab", "programs", "logits_stride", "drafts_stride", "mask_stride", "rows_per_request"]
POINTERS = {
    "*fp32": ["logits", "scaled", "ranges", "bounds", "values", "lowest", "sums", "chosen", "top_values"],
    "*i64": [
        "positions", "drafts", "keys", "masses", "tally_masses", "places", "before", "found", "token_ids", "top_ids",
    ],
    "*i32": [
        "table", "slots", "counts", "tally_counts", "num_drafts", "mask_words", "mask_flags", "used", "num_tokens",
    ],
    "*i8": ["in_prompt"],
}  # fmt: skip
TYPES = dict.fromkeys(INT32, "i32") | {f"{name}_ptr": kind for kind, names in POINTERS.items() for name in names}
SHAPE = shape_for(8)
SEARCH = {"LEVELS": SHAPE.levels, "CUTS": SHAPE.cuts, "CAPACITY": SHAPE.capacity}
KERNELS = {
    argmax_kernel: {"BLOCK": 2048},
    best_kernel: {"PARTS": 128},
    adjust_kernel: {"HAS_MASKS": True, "BLOCK": SHAPE.block, "TALLIES": SHAPE.levels * SHAPE.cuts},
    tally_kernel: {"LEVEL": 1, "BLOCK": SHAPE.counted, "TILE": SHAPE.tile, "PARTS": 128, **SEARCH},
    collect_kernel: {"BLOCK": SHAPE.block, **SEARCH},
    rank_kernel: {"MINE": SHAPE.ranked, "TILE": 2 * SHAPE.tile, **SEARCH},
    bisect_kernel: {"BLOCK": BISECTED, **SEARCH},
    scan_kernel: {"BLOCK": SHAPE.block, "PARTS": 128, "LOOK": 1024, **SEARCH},
    observe_kernel: {},
    part_top_kernel: {"BLOCK": 2048, "TOP": 20, "LANES": 32},
    row_top_kernel: {"PARTS": 128, "TOP": 20, "LANES": 32},
}
# a second or two each: for the least shared memory and for dependent launch, unless all cards are asked for
SLOW = (adjust_kernel, bisect_kernel, rank_kernel, scan_kernel)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_sampling(kernel, capability):
    if kernel in SLOW and capability not in (86, 90) and not os.environ.get("LONGLANE_COMPILE_ALL"):
        pytest.skip("LONGLANE_COMPILE_ALL=1 compiles it for every card")
    num_warps = 16 if kernel is bisect_kernel else 4
    made = compiled(kernel, capability, TYPES, KERNELS[kernel] | {"PDL": capability >= 90}, num_warps)
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    assert ("griddepcontrol.wait" in made.asm["ptx"]) == (capability >= 90)
