"""attention_decode and attention_prefill over every codec, and the append that fills the coded ones."""

import pytest
import torch
import triton
import triton.language as tl

from engine.ops.attention_decode import DecodeWorkspace, attention_decode_reference, attention_decode_triton
from engine.ops.attention_prefill import attention_prefill_reference, attention_prefill_triton
from engine.ops.attention_splits import num_splits, split_count, split_start, split_starts
from engine.ops.coded_kv import CodedKV, decoded
from engine.ops.kv_append_coded import kv_append_coded, kv_append_coded_reference, kv_append_coded_triton
from engine.ops.paged_kv import PagedKV
from tests.ops.conftest import assert_matches, starts_of
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.kv_examples import BLOCK, CODED_NAMES, HEAD_DIM, NAMES, empty_cache, filled_cache, oracle

SCALE = 1 / 16
HEADS = 3
CODEC = pytest.mark.parametrize("name", NAMES)


def decode_kernel(query, cache, starts, lens, tables, scale):
    max_rows, max_context = int(starts.diff().max()), tables.shape[1] * BLOCK
    workspace = DecodeWorkspace.empty(*query.shape, max_context, query.device)
    y = attention_decode_triton(wide(query), cache, starts, lens, tables, scale, max_rows, max_context, workspace)
    return y.to(query.dtype)


def prefill_kernel(query, cache, starts, lens, tables, scale):
    rows = int(starts.diff().max())
    return attention_prefill_triton(wide(query), cache, starts, lens, tables, scale, rows).to(query.dtype)


def wide(query):
    # the interpreter truncates results to bf16 where a GPU rounds
    return query.float() if IS_INTERPRETED else query


def attend(implementation, query, cache, num_rows, context_lens, tables):
    device = query.device
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    return implementation(query, cache, starts_of(num_rows, device), lens, tables, SCALE)


def query_of(rows, device):
    return (2 * torch.randn(rows, HEADS, HEAD_DIM, device=device)).bfloat16()


@pytest.mark.parametrize("implementation", both(attention_decode_reference, decode_kernel))
@CODEC
def test_decode_matches_oracle(implementation, name, device):
    # rows of one request on both sides of the split at 128; a second request within one split
    num_rows, context_lens = [3, 1], [129, 40]
    cache, tables = filled_cache(name, context_lens, 1, device)
    query = query_of(4, device)
    actual = attend(implementation, query, cache, num_rows, context_lens, tables)
    assert_matches(actual, oracle(query, cache, num_rows, context_lens, tables, SCALE))


@pytest.mark.parametrize("implementation", both(attention_prefill_reference, prefill_kernel))
@CODEC
def test_prefill_matches_oracle(implementation, name, device):
    num_rows, context_lens = [21, 5], [85, 5]
    cache, tables = filled_cache(name, context_lens, 1, device)
    query = query_of(26, device)
    actual = attend(implementation, query, cache, num_rows, context_lens, tables)
    assert_matches(actual, oracle(query, cache, num_rows, context_lens, tables, SCALE))


def test_heads_of_several_kv_heads(device):
    cache, tables = filled_cache("rk4v4-e8", [70], 3, device)
    query = query_of(2, device)
    actual = attend(attention_decode_reference, query, cache, [2], [70], tables)
    assert_matches(actual, oracle(query, cache, [2], [70], tables, SCALE))


@needs_kernels
def test_heads_of_several_kv_heads_in_the_kernel(device):
    cache, tables = filled_cache("int8-g64", [70], 3, device)
    query = query_of(2, device)
    actual = attend(decode_kernel, query, cache, [2], [70], tables)
    assert_matches(actual, oracle(query, cache, [2], [70], tables, SCALE))


@pytest.mark.parametrize("implementation", both(attention_decode_reference, decode_kernel))
def test_by_hand(implementation, device):
    """A query of zeros takes the mean of the values it sees; one along a key picks that key's value."""
    keys, values = torch.zeros(2, 1, BLOCK, 1, HEAD_DIM, device=device).bfloat16()
    values[0, :3, 0, 0] = torch.tensor([3.0, 6.0, 24.0])
    keys[0, 1, 0, 7] = 64.0
    query = torch.zeros(2, 1, HEAD_DIM, device=device).bfloat16()
    query[1, 0, 7] = 64.0
    tables = torch.zeros(1, 1, dtype=torch.int32, device=device)
    y = attend(implementation, query, PagedKV(keys, values), [2], [3], tables)
    # the first row sees 3 and 6; the second sees all, with log weights 0, 256 and 0
    assert y[:, 0, 0].tolist() == [4.5, 6.0]
    assert (y[:, 0, 1:] == 0).all()


@needs_kernels
@pytest.mark.parametrize("name", ["bf16", "rk4v4-e8"])
def test_a_row_is_the_same_alone_and_beside_others(name, device):
    cache, tables = filled_cache(name, [130], 1, device)
    query = query_of(3, device)
    together = attend(decode_kernel, query, cache, [3], [130], tables)
    for row in range(3):
        alone = attend(decode_kernel, query[row : row + 1].clone(), cache, [1], [128 + row], tables)
        assert torch.equal(alone[0], together[row])


@needs_kernels
@pytest.mark.parametrize("name", ["int8-g64"])
def test_a_row_does_not_depend_on_where_the_prompt_was_cut(name, device):
    cache, tables = filled_cache(name, [80], 1, device)
    query = query_of(30, device)
    whole = attend(prefill_kernel, query, cache, [30], [80], tables)
    head = attend(prefill_kernel, query[:13].clone(), cache, [13], [63], tables)
    tail = attend(prefill_kernel, query[13:].clone(), cache, [17], [80], tables)
    assert torch.equal(torch.cat([head, tail]), whole)


@pytest.mark.parametrize("implementation", both(kv_append_coded_reference, kv_append_coded_triton))
@pytest.mark.parametrize("name", CODED_NAMES)
def test_append_writes_its_slots_and_no_other(implementation, name, device):
    cache = empty_cache(name, 2, 2, device)
    before = CodedKV(*(x.clone() for x in tensors(cache)), cache.is_rotated)
    keys, values = torch.randn(2, 3, 2, HEAD_DIM, device=device).bfloat16()
    slots = torch.tensor([70, -1, 5], device=device)
    implementation(keys, values, cache, slots)
    for new, old in zip(tensors(cache), tensors(before), strict=True):
        flat_new, flat_old = new.reshape(128, -1).clone(), old.reshape(128, -1).clone()
        flat_new[[70, 5]] = flat_old[[70, 5]] = 0
        assert torch.equal(flat_new.nan_to_num(7.0), flat_old.nan_to_num(7.0))
    plain = decoded(cache, torch.float64)
    limit = {"int8-g64": (6e-5, 6e-5), "rk8v4": (6e-5, 1e-2), "rk4v4-e8": (1e-2, 1e-2)}[name]
    for stored, rows, bound in ((plain.keys, keys, limit[0]), (plain.values, values, limit[1])):
        kept, exact = stored.reshape(128, 2, HEAD_DIM)[[70, 5]], rows[[0, 2]].double()
        assert (kept - exact).square().sum() < bound * exact.square().sum()


@needs_kernels
@pytest.mark.parametrize("name", CODED_NAMES)
def test_append_codes_as_the_reference(name, device):
    expected, actual = empty_cache(name, 1, 1, device), empty_cache(name, 1, 1, device)
    keys, values = torch.randn(2, 8, 1, HEAD_DIM, device=device).bfloat16()
    slots = torch.arange(8, device=device)
    kv_append_coded_reference(keys, values, expected, slots)
    kv_append_coded_triton(keys, values, actual, slots)
    for a, b in zip(tensors(actual), tensors(expected), strict=True):
        # a sum in another order may tip a value that lies between two codes
        assert (a[0, :8] != b[0, :8]).float().mean() < 0.01


def tensors(cache):
    return cache.keys, cache.values, cache.key_scales, cache.value_scales


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_append_names_what_is_not_finite(poison, device):
    cache = empty_cache("rk4v4-e8", 1, 2, device)
    keys, values = torch.randn(2, 4, 2, HEAD_DIM, device=device)
    values[2, 1, 200] = poison
    with pytest.raises(FloatingPointError, match="values of row 2, KV head 1"):
        kv_append_coded(keys, values, cache, torch.arange(4, device=device), checks_finite=True)


@pytest.mark.parametrize("context", [1, 128, 129, 16384, 16385, 65535, 65537, 262144])
def test_splits_cover_the_context(context):
    starts = split_starts(context)
    assert len(starts) == num_splits(context)
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < context
    assert all(start % BLOCK == 0 for start in starts)


def test_splits_by_hand():
    assert num_splits(8192) == 64
    assert split_starts(16384 + 513)[-3:] == [16384 - 128, 16384, 16384 + 512]
    # 128 splits of 128, 96 of 512 and 192 of 1,024
    assert num_splits(262144) == 128 + 96 + 192


@triton.jit
def splits_kernel(context, counts_ptr, starts_ptr, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)
    tl.store(counts_ptr, split_count(context))
    tl.store(starts_ptr + split, split_start(split))


@needs_kernels
@pytest.mark.parametrize("context", [100, 16384, 70000])
def test_splits_on_the_device_are_those_of_the_host(context, device):
    count, starts = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, 256))
    splits_kernel[(1,)](context, count, starts, SPLITS=256)
    expected = split_starts(context)
    assert count.item() == len(expected)
    assert starts[: len(expected)].tolist() == expected
