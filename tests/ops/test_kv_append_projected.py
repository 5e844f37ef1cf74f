"""Norm, RoPE and append in one, over every codec."""

import pytest
import torch

from engine.ops.coded_kv import CodedKV, decoded
from engine.ops.hadamard import hadamard_reference, hadamard_triton
from engine.ops.kv_append_coded import require_finite
from engine.ops.kv_append_projected import kv_append_projected_reference, kv_append_projected_triton
from engine.ops.kv_restore import kv_restore_reference, kv_restore_triton
from engine.ops.paged_kv import PagedKV
from tests.ops.conftest import assert_matches
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.kv_examples import BLOCK, CODED_NAMES, HEAD_DIM, NAMES, empty_cache, filled_cache

HEADS, KV_HEADS, PAIRS, EPS = 3, 2, 32, 1e-6
CODEC = pytest.mark.parametrize("name", NAMES)
APPEND = pytest.mark.parametrize("implementation", both(kv_append_projected_reference, kv_append_projected_triton))
# relative squared errors that a codec may cause in keys and values; the interpreter truncates to bf16
LIMITS = {"bf16": (2e-5, 2e-5), "int8-g64": (6e-5, 6e-5), "rk8v4": (6e-5, 1e-2), "rk4v4-e8": (1e-2, 1e-2)}


def inputs(rows, device):
    """The projection with a gate after it, norm weights, and angles."""
    projected = torch.randn(rows, (2 * HEADS + 2 * KV_HEADS) * HEAD_DIM, device=device).bfloat16()
    weight = 1 + torch.rand(HEADS + KV_HEADS, HEAD_DIM, device=device)
    angles = 3 * torch.rand(rows, PAIRS, device=device)
    return projected, weight, angles.cos(), angles.sin()


def run(implementation, arguments, cache, slots):
    projected, weight, cos, sin = arguments
    return implementation(projected, weight, EPS, cos, sin, cache, slots)


def exact(arguments):
    """Query, keys and values in fp64, head by head and pair by pair."""
    projected, weight, cos, sin = (x.double() for x in arguments)
    heads = projected.unflatten(-1, (-1, HEAD_DIM)).clone()
    for head in range(HEADS + KV_HEADS):
        x = heads[:, head]
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[head]
        turned = x.clone()
        for i in range(PAIRS):
            turned[:, i] = x[:, i] * cos[:, i] - x[:, i + PAIRS] * sin[:, i]
            turned[:, i + PAIRS] = x[:, i + PAIRS] * cos[:, i] + x[:, i] * sin[:, i]
        heads[:, head] = turned
    return heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS : HEADS + 2 * KV_HEADS]


def tensors(cache):
    if isinstance(cache, CodedKV):
        return cache.keys, cache.values, cache.key_scales, cache.value_scales
    return cache.keys, cache.values


def zeroed(name, device):
    cache = empty_cache(name, 1, KV_HEADS, device)
    return CodedKV(*(x.zero_() for x in tensors(cache)), cache.is_rotated)


@APPEND
@CODEC
def test_query_keys_and_values_match_the_oracle(implementation, name, device):
    cache, arguments = empty_cache(name, 2, KV_HEADS, device), inputs(3, device)
    before = [x.clone() for x in tensors(cache)]
    slots = torch.tensor([70, -1, 5], device=device)
    found = run(implementation, arguments, cache, slots)
    query, keys, values = exact(arguments)
    is_rotated = isinstance(cache, CodedKV) and cache.is_rotated
    assert_matches(found.bfloat16(), hadamard_reference(query) if is_rotated else query)
    for new, old in zip(tensors(cache), before, strict=True):
        flat_new, flat_old = new.reshape(2 * BLOCK, -1).clone(), old.reshape(2 * BLOCK, -1).clone()
        flat_new[[70, 5]] = flat_old[[70, 5]] = 0
        assert torch.equal(flat_new.nan_to_num(7.0), flat_old.nan_to_num(7.0))
    plain = decoded(cache, torch.float64) if isinstance(cache, CodedKV) else cache
    for stored, rows, bound in zip((plain.keys, plain.values), (keys, values), LIMITS[name], strict=True):
        kept, wanted = stored.reshape(2 * BLOCK, KV_HEADS, HEAD_DIM)[[70, 5]].double(), rows[[0, 2]]
        assert (kept - wanted).square().sum() < bound * wanted.square().sum()


@needs_kernels
@pytest.mark.parametrize("name", CODED_NAMES)
def test_codes_are_those_of_the_reference(name, device):
    """Almost all of them: a norm summed in another order may tip what lies between two codes."""
    rows = 4 if IS_INTERPRETED else 60
    arguments, slots = inputs(rows, device), torch.randperm(BLOCK, device=device)[:rows]
    caches = [
        CodedKV(*(x.zero_() for x in tensors(empty_cache(name, 1, KV_HEADS, device))), "rk" in name) for _ in "ab"
    ]
    run(kv_append_projected_reference, arguments, caches[0], slots)
    run(kv_append_projected_triton, arguments, caches[1], slots)
    for expected, actual in zip(*map(tensors, caches), strict=True):
        assert (actual != expected).float().mean() < 0.01


@needs_kernels
def test_a_row_is_coded_alike_alone_and_beside_others(device):
    arguments = inputs(3, device)
    projected, weight, cos, sin = arguments
    caches = [zeroed("rk4v4-e8", device) for _ in "ab"]
    run(kv_append_projected_triton, arguments, caches[0], torch.arange(3, device=device))
    for row in range(3):
        alone = (projected[row : row + 1], weight, cos[row : row + 1], sin[row : row + 1])
        run(kv_append_projected_triton, alone, caches[1], torch.tensor([row], device=device))
    assert all(torch.equal(a, b) for a, b in zip(*map(tensors, caches), strict=True))


def test_by_hand(device):
    """Equal numbers have the norm 1; a quarter turn moves the first of a pair to the second."""
    cache = PagedKV(*torch.zeros(2, 1, BLOCK, 1, HEAD_DIM, device=device))
    projected = torch.full((1, 3 * HEAD_DIM), 5.0, device=device)
    cos, sin = torch.ones(1, PAIRS, device=device), torch.zeros(1, PAIRS, device=device)
    cos[0, 0], sin[0, 0] = 0.0, 1.0
    weight = torch.ones(2, HEAD_DIM, device=device)
    weight[0, PAIRS] = 3.0
    slots = torch.tensor([2], device=device)
    query = kv_append_projected_reference(projected, weight, 0.0, cos, sin, cache, slots)
    assert query[0, 0, [0, PAIRS, 1, 255]].tolist() == [-3, 1, 1, 1]
    assert cache.keys[0, 2, 0, [0, PAIRS, 1]].tolist() == [-1, 1, 1]
    assert (cache.values[0, 2] == 5).all() and (cache.values[0, 3] == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_named(poison, device):
    values = torch.randn(4, 2, HEAD_DIM, device=device)
    values[2, 1, 200] = poison
    with pytest.raises(FloatingPointError, match="values of row 2, KV head 1"):
        require_finite("values", values)


@needs_kernels
def test_hadamard_kernel(device):
    x = torch.randn(5, 3, 64, device=device)
    assert_matches(hadamard_triton(x), hadamard_reference(x.double()))


@pytest.mark.parametrize("implementation", both(kv_restore_reference, kv_restore_triton))
@pytest.mark.parametrize("name", CODED_NAMES)
def test_restored_blocks_are_what_the_codes_say(implementation, name, device):
    cache, tables = filled_cache(name, [150], 2, device)
    target = PagedKV(*torch.full((2, 2, BLOCK, 2, HEAD_DIM), torch.nan, dtype=torch.float16, device=device))
    implementation(cache, tables[0], torch.tensor([150], dtype=torch.int32, device=device), 1, target)
    plain = decoded(CodedKV(*tensors(cache), is_rotated=False), torch.float64)
    for stored, restored in ((plain.keys, target.keys), (plain.values, target.values)):
        wanted = stored[tables[0, 1:3].long()].flatten(0, 1)[: 150 - BLOCK]
        assert torch.equal(restored.flatten(0, 1)[: 150 - BLOCK], wanted.half())
        assert (restored.flatten(0, 1)[150 - BLOCK :] == 0).all()
