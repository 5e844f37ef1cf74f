"""The attention kernels and the coded append compile for every card within its shared memory, at real dimensions."""

import pytest

from engine.cache.kv_codecs import CODECS
from engine.ops.attention_decode import (
    COMBINE_TILE,
    COMBINE_WARPS,
    attention_combine_kernel,
    attention_decode_kernel,
    decode_shape_for,
)
from engine.ops.attention_prefill import PART, attention_prefill_kernel, merge_parts_kernel, prefill_shape_for
from engine.ops.coded_kv import CodedKV
from engine.ops.kv_append_projected import kv_append_projected_kernel
from engine.ops.kv_restore import kv_restore_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
INTEGERS = ["tables_stride", "max_splits", "gate_stride", "x_stride", "first_block"]
INTEGERS += ["begin", "first_part", "side", "num_rows", "count"]
POINTERS = {
    "query_ptr": "*bf16",
    "output_ptr": "*bf16",
    "tables_ptr": "*i32",
    "starts_ptr": "*i32",
    "lens_ptr": "*i32",
    "partials_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "slots_ptr": "*i64",
    "state_ptr": "*fp32",
    "gate_ptr": "*bf16",
    "scales_ptr": "*fp32",
    "sums_ptr": "*i32",
    "table_ptr": "*i32",
}
PLAIN = dict.fromkeys(["keys_ptr", "values_ptr", "key_scales_ptr", "value_scales_ptr"], "*bf16")
CODED = {"keys_ptr": "*i32", "values_ptr": "*i32", "key_scales_ptr": "*fp16", "value_scales_ptr": "*fp16"}
FLOATS = ("weight_ptr", "cos_ptr", "sin_ptr")
# KV heads, query heads per KV head: 35B-A3B and 27B
MODELS = [(2, 8), (4, 6)]


def storage(codec, kv_heads):
    """The constants of a cache's form and layout."""
    if codec.is_coded:
        cache = CodedKV.zeros(1, 64, kv_heads, 256, codec.folds, codec.is_rotated, "meta")
        strides = [x.stride() for x in (cache.keys, cache.values, cache.key_scales, cache.value_scales)]
    else:
        strides = [(64 * kv_heads * 256, kv_heads * 256, 256, 1)] * 4
    names = ("KEY_STRIDES", "VALUE_STRIDES", "KEY_SCALE_STRIDES", "VALUE_SCALE_STRIDES")
    return {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": 256,
        "BLOCK_SIZE": 64,
        "KEY_FOLD": codec.folds[0],
        "VALUE_FOLD": codec.folds[1],
        "IS_ROTATED": codec.is_rotated,
        **dict(zip(names, strides, strict=True)),
    }


def check(kernel, capability, types, constants, num_warps, **options):
    made = compiled(
        kernel,
        capability,
        dict.fromkeys(INTEGERS, "i32") | {"scale": "fp32", "eps": "fp32"} | POINTERS | types,
        constants,
        num_warps,
    )
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    return made.asm["ptx"]


def decode_ptx(name, capability, kv_heads, group, rows, depends):
    codec = CODECS[name]
    shape = decode_shape_for(divmod(capability, 10), rows * group, codec.folds[1], processors=132)
    constants = storage(codec, kv_heads) | {
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "NUM_STAGES": shape.num_stages,
        "PORTABLE": False,
        "DEPENDENT": depends,
    }
    types = CODED if codec.is_coded else PLAIN
    return check(attention_decode_kernel, capability, types, constants, shape.num_warps, maxnreg=shape.max_registers)


def prefill_ptx(number, capability, kv_heads, group, *, is_whole):
    """number  of the cache or of what is restored from codes"""
    shape = prefill_shape_for(divmod(capability, 10))
    wanted = ("KV_HEADS", "HEAD_DIM", "BLOCK_SIZE", "KEY_STRIDES", "VALUE_STRIDES")
    plain = {name: storage(CODECS["bf16"], kv_heads)[name] for name in wanted}
    constants = plain | {
        "PART": PART,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "NUM_STAGES": shape.num_stages,
        "IS_WHOLE": is_whole,
        "MERGES": not is_whole,
        "PORTABLE": False,
    }
    types = dict.fromkeys(["keys_ptr", "values_ptr", "query_ptr"], f"*{number}") | {"planes_ptr": "*fp32"}
    return check(attention_prefill_kernel, capability, types, constants, shape.num_warps)


# a compilation takes seconds: the codes on every card, numbers on a small and a large one
ON_CARDS = [(name, capability) for name in ("int8-g64", "rk4v4-e8") for capability in SHARED_MEMORY]


@pytest.mark.parametrize("name, capability", [*ON_CARDS, ("bf16", 86), ("bf16", 90)])
def test_decode(name, capability):
    depends = capability >= 90
    ptx = decode_ptx(name, capability, *MODELS[0], rows=1, depends=depends)
    assert ("griddepcontrol.wait" in ptx) == depends
    # codes become numbers by bit patterns: conversions of integers run at a quarter of the rate
    assert "cvt.rn.f16.s" not in ptx and "cvt.rn.f32.s8" not in ptx
    # tiles are in flight while others are multiplied, and no decoded plane goes through shared memory on the way
    assert "cp.async" in ptx and ptx.count("st.shared") < 90


@pytest.mark.parametrize("name", ["rk8v4", "rk4v4-e8"])
def test_decode_of_several_rows(name):
    decode_ptx(name, 90, *MODELS[1], rows=4, depends=True)


@pytest.mark.parametrize(
    "number, capability", [("bf16", 80), ("bf16", 86), ("bf16", 100), ("fp16", 86), ("fp16", 90), ("bf16", 120)]
)
def test_prefill(number, capability):
    prefill_ptx(number, capability, *MODELS[0], is_whole=number == "bf16")


@pytest.mark.parametrize("capability", [86, 90])
def test_merge(capability):
    types = dict.fromkeys(["partials_ptr", "partial_stats_ptr"], "*fp32")
    constants = {"HEADS": 24, "BLOCK": 32, "HEAD_DIM": 256, "IS_LAST": True}
    check(merge_parts_kernel, capability, types, constants, 4)


@pytest.mark.parametrize("capability, is_rounded", [(80, True), (86, True), (90, True), (90, False), (120, True)])
def test_combine(capability, is_rounded):
    constants = {"HEADS": 16, "HEAD_DIM": 256, "FOLD": 8, "IS_ROTATED": True, "TILE": COMBINE_TILE}
    constants |= {"IS_ROUNDED": is_rounded, "DEPENDENT": capability >= 90}
    types = {"output_ptr": "*i8"} if is_rounded else {}
    check(attention_combine_kernel, capability, types, constants, COMBINE_WARPS)


@pytest.mark.parametrize("name, capability", [("bf16", 90), ("int8-g64", 80), ("rk8v4", 90), ("rk4v4-e8", 86)])
def test_append(name, capability):
    codec = CODECS[name]
    constants = storage(codec, 2) | {"HEADS": 16, "PAIRS": 32, "DEPENDENT": capability >= 90}
    types = (CODED if codec.is_coded else PLAIN) | {"x_ptr": "*bf16"} | dict.fromkeys(FLOATS, "*fp32")
    # a maximum that passes from warp to warp comes out wrong under Triton 3.6: all of a head stays in one
    check(kv_append_projected_kernel, capability, types | {"query_ptr": "*fp16"}, constants, num_warps=1)


@pytest.mark.parametrize("capability", [86, 90])
def test_restore(capability):
    constants = {n: x for n, x in storage(CODECS["rk8v4"], 2).items() if n not in ("KV_HEADS", "IS_ROTATED")}
    constants |= {"TOKENS": 32, "TARGET_STRIDES": (64 * 2 * 256, 256, 64 * 256, 1), "PORTABLE": False}
    targets = dict.fromkeys(["target_keys_ptr", "target_values_ptr"], "*fp16")
    check(kv_restore_kernel, capability, CODED | targets, constants, 4)
