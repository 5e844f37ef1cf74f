"""The kernels of Gated DeltaNet compile for every card within its shared memory, at real dimensions."""

import os

import pytest

from engine.ops.causal_conv_heads import BLOCK_ROWS, causal_conv_heads_kernel
from engine.ops.gated_delta_copy import BLOCK, gated_delta_copy_kernel
from engine.ops.gated_delta_decode import (
    FINISH_WARPS,
    PARTS,
    STEP_WARPS,
    gated_delta_finish_kernel,
    gated_delta_step_kernel,
)
from engine.ops.gated_delta_fold import gated_delta_fold_kernel
from engine.ops.gated_delta_prefill import REQUESTS, delta_chunks_kernel, delta_scan_kernel, prefill_shape_for
from engine.ops.gated_rms_norm import BLOCK_ITEMS, gated_rms_norm_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
CARD = pytest.mark.parametrize("capability", SHARED_MEMORY)
INTEGERS = [
    "x_stride",
    "inputs_stride",
    "gate_stride",
    "gates_stride",
    "channels",
    "unit_heads",
    "heads",
    "start",
    "size",
]
INTEGERS += ["copies_stride", "has_copies"]
WORDS = ["starts_ptr", "accepted_ptr"]
NUMBERS = ["decay_ptr", "dt_bias_ptr", "norm_ptr", "norms_ptr", "state_ptr", "inputs_ptr", "keys_ptr", "u_ptr"]
NUMBERS += [
    "alpha_ptr",
    "made_ptr",
    "made_key_ptr",
    "made_alpha_ptr",
    "conv_ptr",
    "weight_ptr",
    "fresh_ptr",
    "factors_ptr",
]
HALVES = ["x_ptr", "a_ptr", "b_ptr", "gate_ptr", "stale_ptr", "within_ptr"]
TYPES = (
    dict.fromkeys([*INTEGERS, "requests"], "i32")
    | dict.fromkeys(["stale_stride", "within_stride"], "i64")
    | dict.fromkeys(WORDS, "*i32")
    | dict.fromkeys(NUMBERS, "*fp32")
    | dict.fromkeys(HALVES, "*bf16")
    | {"slots_ptr": "*i64", "eps": "fp32"}
)
# key heads, value heads per key head: 35B-A3B and 27B
MODELS = [(16, 2), (16, 3)]


def slow(capability, always):
    """Many seconds each: where it matters most, unless all cards are asked for."""
    if capability != always and not os.environ.get("LONGLANE_COMPILE_ALL"):
        pytest.skip("LONGLANE_COMPILE_ALL=1 compiles it for every card")


def check(kernel, capability, types, constants, num_warps):
    made = compiled(kernel, capability, TYPES | types, constants, num_warps)
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    return made.asm["ptx"]


@CARD
def test_decode(capability):
    key_heads, group = MODELS[capability == 90]
    depends = capability >= 90
    heads = {"KEY_HEADS": key_heads, "GROUP": group, "PENDING": 8, "PDL": depends}
    ptx = check(gated_delta_step_kernel, capability, {}, heads | {"PARTS": PARTS}, STEP_WARPS)
    assert ("griddepcontrol.wait" in ptx) == depends
    types = {"y_ptr": "*i8", "scales_ptr": "*fp32", "sums_ptr": "*i32"}
    ptx = check(gated_delta_finish_kernel, capability, types, heads | {"IS_ROUNDED": True}, FINISH_WARPS)
    assert ("griddepcontrol.wait" in ptx) == depends


@pytest.mark.parametrize("capability", [86, 90])
def test_fold(capability):
    constants = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "PENDING": 8, "DIM": 128, "BLOCK": 1024}
    check(gated_delta_fold_kernel, capability, {}, constants, 8)


@CARD
def test_copy(capability):
    types = {
        "counts_ptr": "*i32",
        "copies_ptr": "*fp32",
        "taps_ptr": "*fp32",
        "indices_ptr": "*i64",
        "num_slots": "i32",
    }
    constants = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "PENDING": 8, "DIM": 128, "BLOCK": BLOCK}
    check(gated_delta_copy_kernel, capability, types, constants, 8)


@pytest.mark.parametrize("capability", [86, 90])
def test_rows_around_the_prompt(capability):
    types = {"y_ptr": "*bf16"}
    check(causal_conv_heads_kernel, capability, types, {"DIM": 128, "BLOCK": BLOCK_ROWS}, 4)
    norm = types | {"x_ptr": "*fp32"}
    check(gated_rms_norm_kernel, capability, norm, {"ITEMS": BLOCK_ITEMS, "WIDTH": 128, "HALVES": True}, 4)


def prefill(capability):
    key_heads, group = MODELS[capability == 90]
    constants = {"KEY_HEADS": key_heads, "GROUP": group, "REQUESTS": REQUESTS, "PORTABLE": False}
    return prefill_shape_for(divmod(capability, 10)), constants


@CARD
def test_scan(capability):
    # the least shared memory
    slow(capability, always=86)
    shape, constants = prefill(capability)
    constants |= {"VALUES": shape.values, "NUM_STAGES": shape.num_stages}
    types = {"y_ptr": "*fp32", "copies_ptr": "*fp32", "indices_ptr": "*i64"}
    check(delta_scan_kernel, capability, types, constants, shape.scan_warps)


@CARD
def test_chunks(capability):
    slow(capability, always=90)
    shape, constants = prefill(capability)
    check(delta_chunks_kernel, capability, {}, constants, shape.chunk_warps)
