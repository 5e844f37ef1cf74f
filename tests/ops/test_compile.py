"""Every kernel over quantised weights compiles for every card, within its shared memory."""

import os

import pytest

from engine.ops.quantize_rows import quantize_rows_kernel
from engine.ops.quantized_dot import num_iterations, num_segments
from engine.ops.quantized_experts import experts_down_kernel, experts_swiglu_kernel
from engine.ops.quantized_linear import linear_few_rows_kernel, linear_rows_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler"),
    pytest.mark.parametrize("capability", SHARED_MEMORY),
]
INTEGERS = {"rows", "outputs", "groups", "width_tiles", "x_stride", "other_stride"}
POINTERS = {
    "x_ptr": "*i32",
    "x_scales_ptr": "*fp32",
    "x_sums_ptr": "*i32",
    "words_ptr": "*i32",
    "bytes_ptr": "*i8",
    "scales_ptr": "*fp16",
    "shared_words_ptr": "*i32",
    "shared_scales_ptr": "*fp16",
    "chosen_ptr": "*i64",
    "weights_ptr": "*fp32",
    "inner_ptr": "*fp32",
    "residual_ptr": "*bf16",
    "y_ptr": "*bf16",
}
ROWS_POINTERS = {
    "x_ptr": "*bf16",
    "other_ptr": "*bf16",
    "weight_ptr": "*fp32",
    "values_ptr": "*i8",
    "scales_ptr": "*fp32",
    "sums_ptr": "*i32",
}


def check(kernel, capability, pointers, constants, num_warps):
    types = dict.fromkeys(INTEGERS, "i32") | {"eps": "fp32"} | pointers
    made = compiled(kernel, capability, types, constants | {"PDL": capability >= 90}, num_warps)
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    assert ("griddepcontrol.wait" in made.asm["ptx"]) == (capability >= 90)
    return made.asm["ptx"]


def slow(capability):
    """A second or more each: for the least shared memory and for dependent launch, unless all cards are asked for."""
    if capability not in (86, 90) and not os.environ.get("LONGLANE_COMPILE_ALL"):
        pytest.skip("LONGLANE_COMPILE_ALL=1 compiles it for every card")


def order(columns):
    segments = num_segments(columns // 64)
    return {"SEGMENTS": segments, "ITERATIONS": num_iterations(columns // 64, segments), "INTERPRETED": False}


def check_few_rows(bits, rows, columns, capability):
    constants = order(columns) | {"BITS": bits, "ROWS": rows, "AHEAD": 4, "HAS_RESIDUAL": True}
    ptx = check(linear_few_rows_kernel, capability, POINTERS, constants, constants["SEGMENTS"] // 2)
    # one exchange between warps for each row, and none inside the loop
    assert "dp4a" in ptx and ptx.count("bar.sync") < 2 * rows


def check_rows(bits, rows, columns, capability):
    constants = order(columns) | {"BITS": bits, "ROWS": rows, "AHEAD": 4, "HAS_RESIDUAL": False}
    pointers = POINTERS | {"x_ptr": "*i8"}
    ptx = check(linear_rows_kernel, capability, pointers, constants, constants["SEGMENTS"] // 2)
    assert "mma.sync.aligned.m16n8k32.row.col" in ptx


def test_linear(capability):
    check_few_rows(4, 1, 2048, capability)
    check_rows(4, 8, 1024, capability)


@pytest.mark.parametrize("bits, rows, columns", [(8, 4, 2048), (4, 1, 6144)])
def test_few_rows(bits, rows, columns, capability):
    slow(capability)
    check_few_rows(bits, rows, columns, capability)


def test_rows(capability):
    slow(capability)
    check_rows(8, 32, 2048, capability)


def test_experts(capability):
    slow(capability)
    constants = {"CHOSEN": 8, "BITS": 4, "SHARED_BITS": 8}
    swiglu = constants | order(2048)
    check(experts_swiglu_kernel, capability, POINTERS, swiglu, swiglu["SEGMENTS"] // 2)
    early = {"SHARED_ITERATIONS": 1, "HAS_RESIDUAL": True, "EARLY": capability >= 90}
    down = constants | order(8 * 512) | early
    check(experts_down_kernel, capability, POINTERS, down, down["SEGMENTS"] // 2)


def test_quantize_rows(capability):
    check(quantize_rows_kernel, capability, ROWS_POINTERS, {"BLOCK": 8, "IS_SWIGLU": True}, 4)
