"""The attention kernels and the coded append compile for every card within its shared memory, at real dimensions."""

import pytest

from engine.cache.kv_codecs import CODECS
from engine.ops.attention_decode import attention_combine_kernel, attention_decode_kernel, decode_shape_for
from engine.ops.attention_prefill import attention_prefill_kernel, prefill_shape_for
from engine.ops.coded_kv import CodedKV
from engine.ops.kv_append_coded import kv_append_coded_kernel
from tests.ops.kernels import IS_INTERPRETED
from tests.ops.targets import SHARED_MEMORY, compiled

pytestmark = pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter replaces the compiler")
CARD = pytest.mark.parametrize("capability", SHARED_MEMORY)
INTEGERS = dict.fromkeys(["tables_stride", "max_splits", "rows", "keys_stride", "values_stride"], "i32")
POINTERS = {
    "query_ptr": "*bf16",
    "output_ptr": "*bf16",
    "tables_ptr": "*i32",
    "starts_ptr": "*i32",
    "lens_ptr": "*i32",
    "partials_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "slots_ptr": "*i64",
}
PLAIN = dict.fromkeys(["keys_ptr", "values_ptr", "key_scales_ptr", "value_scales_ptr"], "*bf16")
CODED = {"keys_ptr": "*i32", "values_ptr": "*i32", "key_scales_ptr": "*fp16", "value_scales_ptr": "*fp16"}
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


def check(kernel, capability, types, constants, num_warps):
    made = compiled(kernel, capability, INTEGERS | {"scale": "fp32"} | POINTERS | types, constants, num_warps)
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    return made.asm["ptx"]


def decode_ptx(name, capability, kv_heads, group, rows, depends):
    codec = CODECS[name]
    shape = decode_shape_for(divmod(capability, 10), rows * group, codec.folds[1], programs=264)
    constants = storage(codec, kv_heads) | {
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "NUM_STAGES": shape.num_stages,
        "PORTABLE": False,
        "DEPENDENT": depends,
    }
    types = CODED if codec.is_coded else PLAIN
    return check(attention_decode_kernel, capability, types, constants, shape.num_warps)


def prefill_ptx(name, capability, kv_heads, group):
    codec = CODECS[name]
    shape = prefill_shape_for(divmod(capability, 10), codec.folds[1])
    constants = storage(codec, kv_heads) | {
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "NUM_STAGES": shape.num_stages,
        "PORTABLE": False,
    }
    types = CODED if codec.is_coded else PLAIN
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
    "name, capability",
    [("bf16", 80), ("bf16", 86), ("bf16", 100), ("int8-g64", 86), ("int8-g64", 90), ("rk4v4-e8", 89), ("bf16", 120)],
)
def test_prefill(name, capability):
    prefill_ptx(name, capability, *MODELS[0])


@CARD
def test_combine(capability):
    constants = {"HEADS": 16, "HEAD_DIM": 256, "FOLD": 8, "IS_ROTATED": True, "TILE": 64}
    check(attention_combine_kernel, capability, {}, constants | {"DEPENDENT": capability >= 90}, 4)


@pytest.mark.parametrize("capability", [80, 90])
def test_append(capability):
    constants = storage(CODECS["rk8v4"], 2) | {"HEADS_PER_PROGRAM": 2, "DEPENDENT": capability >= 90}
    types = CODED | {"keys_ptr": "*bf16", "values_ptr": "*bf16", "key_words_ptr": "*i32", "value_words_ptr": "*i32"}
    check(kv_append_coded_kernel, capability, types, constants, 4)
