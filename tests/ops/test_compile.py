"""Every kernel over quantised weights compiles for every card, within its shared memory."""

import os
from types import SimpleNamespace

import pytest

from engine.ops.quantize_rows import quantize_rms_norm_kernel, quantize_rows_kernel
from engine.ops.quantized_dot import ahead, num_iterations, num_segments
from engine.ops.quantized_experts import experts_down_kernel, experts_swiglu_kernel
from engine.ops.quantized_linear import constants_of as few_rows_constants
from engine.ops.quantized_linear import linear_few_rows_kernel, registers_of
from engine.ops.quantized_linear_rows import linear_rows_kernel, registers_for
from engine.ops.router_logits import router_logits_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = [
    pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler"),
    pytest.mark.parametrize("capability", SHARED_MEMORY),
]
INTEGERS = {
    "rows", "outputs", "first_outputs", "first_tiles", "last_tiles", "first_column", "columns", "groups", "width",
    "width_groups", "hidden", "experts", "x_stride", "other_stride",
}  # fmt: skip
POINTERS = {
    "x_ptr": "*i32",
    "x_scales_ptr": "*fp32",
    "x_sums_ptr": "*i32",
    "words_ptr": "*i32",
    "scales_ptr": "*fp16",
    "last_words_ptr": "*i32",
    "last_scales_ptr": "*fp16",
    "shared_words_ptr": "*i32",
    "shared_scales_ptr": "*fp16",
    "logits_ptr": "*fp32",
    "values_ptr": "*i8",
    "value_scales_ptr": "*fp32",
    "value_sums_ptr": "*i32",
    "residual_ptr": "*bf16",
    "y_ptr": "*bf16",
}
ROWS_POINTERS = {
    "x_ptr": "*bf16",
    "other_ptr": "*bf16",
    "weight_ptr": "*fp32",
    "norm_weight_ptr": "*fp32",
    "router_ptr": "*bf16",
    "logits_ptr": "*fp32",
    "values_ptr": "*i8",
    "scales_ptr": "*fp32",
    "sums_ptr": "*i32",
}


def check(kernel, capability, pointers, constants, num_warps, **options):
    types = dict.fromkeys(INTEGERS, "i32") | {"eps": "fp32"} | pointers
    made = compiled(kernel, capability, types, constants | {"PDL": capability >= 90}, num_warps, **options)
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    assert ("griddepcontrol.wait" in made.asm["ptx"]) == (capability >= 90)
    return made.asm["ptx"]


def slow(capability, taken=(86, 90)):
    """A second or more each: for the least shared memory and for dependent launch, unless all cards are asked for."""
    if capability not in taken and not os.environ.get("LONGLANE_COMPILE_ALL"):
        pytest.skip("LONGLANE_COMPILE_ALL=1 compiles it for every card")


def order(columns):
    segments = num_segments(columns // 64)
    return {"SEGMENTS": segments, "ITERATIONS": num_iterations(columns // 64, segments), "INTERPRETED": False}


def pair(bits, last_bits, columns, most):
    constants = order(columns) | {"BITS": bits, "LAST_BITS": last_bits, "IS_PAIR": bits != last_bits}
    constants |= {"AHEAD": ahead(constants["ITERATIONS"], most // bits), "HAS_RESIDUAL": True}
    return constants | {"LAST_AHEAD": ahead(constants["ITERATIONS"], most // last_bits)}


def check_few_rows(bits, last_bits, rows, columns, capability):
    weights = [SimpleNamespace(bits=b, columns=columns) for b in ((bits,) if bits == last_bits else (bits, last_bits))]
    segments = num_segments(columns // 64)
    constants = few_rows_constants(rows, weights, segments) | {"HAS_RESIDUAL": True, "INTERPRETED": False}
    registers = registers_of(constants)
    ptx = check(linear_few_rows_kernel, capability, POINTERS, constants, segments // 2, maxnreg=registers)
    # one exchange between warps for each row and tile, and none inside the loop
    assert "dp4a" in ptx and ptx.count("bar.sync") < 2 * rows * constants["TILES"] * len(weights)


def check_rows(bits, last_bits, blocks, columns, capability):
    constants = pair(bits, last_bits, columns, 16 if blocks == 1 else 8) | {"BLOCKS": blocks}
    del constants["INTERPRETED"]
    segments = constants["SEGMENTS"]
    for registers in {registers_for(segments, programs=1, processors=132), registers_for(segments, 1024, 132)}:
        ptx = check(linear_rows_kernel, capability, POINTERS, constants, segments // 2, maxnreg=registers)
        assert "mma.sync.aligned.m16n8k32.row.col" in ptx and ptx.count("bar.sync") < 5 * blocks * 2


def test_linear(capability):
    check_few_rows(4, 4, 1, 1024, capability)
    check_rows(4, 4, 1, 1024, capability)


@pytest.mark.parametrize("bits, last_bits, rows, columns", [(4, 8, 1, 2048), (8, 8, 2, 1024), (4, 4, 1, 17_408)])
def test_few_rows(bits, last_bits, rows, columns, capability):
    slow(capability)
    check_few_rows(bits, last_bits, rows, columns, capability)


@pytest.mark.parametrize("bits, last_bits, blocks, columns", [(4, 8, 1, 2048), (8, 8, 4, 17_408)])
def test_rows(bits, last_bits, blocks, columns, capability):
    slow(capability)
    check_rows(bits, last_bits, blocks, columns, capability)


def choice(shared_bits):
    return {"CHOSEN": 8, "BITS": 4, "SHARED_BITS": shared_bits, "BLOCK": 256}


def test_experts_swiglu(capability):
    slow(capability, taken=(90,))
    constants = order(2048) | choice(8) | {"AHEAD": 2, "SHARED_AHEAD": 1, "EVEN": True}
    ptx = check(experts_swiglu_kernel, capability, POINTERS, constants, 16, maxnreg=128)
    # each warp finds the expert for itself
    assert "redux.sync.max.s32" in ptx and ptx.count("bar.sync") < 16


def test_experts_down(capability):
    slow(capability, taken=(86,))
    constants = order(8 * 512) | choice(8) | {"SHARED_ITERATIONS": 1, "HAS_RESIDUAL": True}
    constants |= {"EVEN": True, "SHARED_EVEN": False}
    check(experts_down_kernel, capability, POINTERS, constants, constants["SEGMENTS"] // 2, maxnreg=128)


def test_router_logits(capability):
    slow(capability)
    check(router_logits_kernel, capability, ROWS_POINTERS, {"OUTPUTS": 4, "BLOCK": 32, "EVEN": True}, 4, maxnreg=128)


def test_quantize_rows(capability):
    check(quantize_rows_kernel, capability, ROWS_POINTERS, {"BLOCK": 8, "IS_SWIGLU": True}, 4)
    check(quantize_rms_norm_kernel, capability, ROWS_POINTERS, {"BLOCK": 32, "EVEN": True}, 8, maxnreg=128)
