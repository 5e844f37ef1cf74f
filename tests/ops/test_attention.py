"""attention_decode and attention_prefill over every codec."""

import pytest
import torch
import triton
import triton.language as tl

from engine.ops.attention_decode import (
    DecodeWorkspace,
    attention_decode_reference,
    attention_decode_rounded_reference,
    attention_decode_rounded_triton,
    attention_decode_triton,
)
from engine.ops.attention_prefill import attention_prefill_reference, attention_prefill_triton, parts_side_by_side
from engine.ops.attention_splits import num_splits, split_count, split_start, split_starts
from engine.ops.coded_kv import CodedKV
from engine.ops.hadamard import hadamard_reference
from engine.ops.paged_kv import PagedKV
from engine.ops.quantize_rows import quantize_rows_reference
from tests.ops.conftest import assert_matches, starts_of
from tests.ops.kernels import IS_INTERPRETED, both, needs_kernels
from tests.ops.kv_examples import BLOCK, HEAD_DIM, NAMES, filled_cache, oracle

SCALE = 1 / 16
HEADS = 3
CODEC = pytest.mark.parametrize("name", NAMES)


def decode_kernel(query, cache, starts, lens, tables, scale):
    max_rows, max_context = int(starts.diff().max()), tables.shape[1] * BLOCK
    workspace = DecodeWorkspace.empty(*query.shape, max_context, query.device)
    return attention_decode_triton(query, cache, starts, lens, tables, scale, max_rows, max_context, workspace)


def prefill_kernel(query, cache, starts, lens, tables, scale):
    return attention_prefill_triton(query, cache, starts, lens, tables, scale, part=BLOCK)


def ready(query, cache):
    """The query as attention over this cache takes it."""
    if isinstance(cache, CodedKV):
        rotated = hadamard_reference(query.float()) if cache.is_rotated else query
        return rotated.half()
    # the interpreter truncates results to bf16 where a GPU rounds
    return query.float() if IS_INTERPRETED else query


def attend(implementation, query, cache, num_rows, context_lens, tables):
    device = query.device
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    y = implementation(ready(query, cache), cache, starts_of(num_rows, device), lens, tables, SCALE)
    return y.to(query.dtype)


def query_of(rows, device):
    return (2 * torch.randn(rows, HEADS, HEAD_DIM, device=device)).bfloat16()


def assert_same_bits(actual, expected):
    """As on a GPU; under the interpreter a product's bits depend on where in it a row stands."""
    assert torch.allclose(actual, expected, rtol=0.01, atol=1e-4) if IS_INTERPRETED else torch.equal(actual, expected)


@pytest.mark.parametrize("implementation", both(attention_decode_reference, decode_kernel))
@CODEC
def test_decode_matches_oracle(implementation, name, device):
    # rows of one request on both sides of a split; a second request within one
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
        assert_same_bits(alone[0], together[row])


@needs_kernels
@pytest.mark.parametrize("name", ["int8-g64"])
def test_a_row_does_not_depend_on_where_the_prompt_was_cut(name, device):
    cache, tables = filled_cache(name, [80], 1, device)
    query = query_of(30, device)
    whole = attend(prefill_kernel, query, cache, [30], [80], tables)
    head = attend(prefill_kernel, query[:13].clone(), cache, [13], [63], tables)
    tail = attend(prefill_kernel, query[13:].clone(), cache, [17], [80], tables)
    assert_same_bits(torch.cat([head, tail]), whole)


def rounded_kernel(query, gate, cache, starts, lens, tables, scale):
    return attention_decode_rounded_triton(query, gate, cache, starts, lens, tables, scale, int(starts.diff().max()))


@pytest.mark.parametrize("implementation", both(attention_decode_rounded_reference, rounded_kernel))
@CODEC
def test_rounded_decode_gates_and_rounds(implementation, name, device):
    num_rows, context_lens = [2, 1], [131, 5]
    cache, tables = filled_cache(name, context_lens, 1, device)
    query = query_of(3, device)
    # the gate is a part of wider rows
    gate = torch.randn(3, HEADS * HEAD_DIM + 64, device=device).bfloat16()[:, 64:]
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    actual = implementation(ready(query, cache), gate, cache, starts_of(num_rows, device), lens, tables, SCALE)
    exact = oracle(query, cache, num_rows, context_lens, tables, SCALE).flatten(1) * torch.sigmoid(gate.double())
    wanted = quantize_rows_reference(exact)
    assert torch.equal(actual.sums, actual.values.unflatten(1, (-1, 64)).sum(-1, dtype=torch.int32))
    assert (actual.values.int() - wanted.values.int()).abs().max() <= 1
    assert_matches(actual.scales.bfloat16(), wanted.scales)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_prefill_is_the_same_in_parts_side_by_side(name, device):
    """Of the second request, whose rows see one part, the others know nothing."""
    cache, tables = filled_cache(name, [290, 40], 1, device)
    query = query_of(27, device)

    def side_by_side(count):
        def run(query, cache, starts, lens, tables, scale):
            options = {"part": BLOCK, "side_by_side": count}
            return attention_prefill_triton(query, cache, starts, lens, tables, scale, **options)

        return attend(run, query, cache, [20, 7], [290, 40], tables)

    assert torch.equal(side_by_side(1), side_by_side(2))
    assert torch.equal(side_by_side(1), side_by_side(4))


@needs_kernels
def test_a_part_that_holds_the_context_is_all_there_is(device):
    cache, tables = filled_cache("int8-g64", [60], 1, device)
    query = query_of(20, device)

    def parts_of(tokens):
        def run(query, cache, starts, lens, tables, scale):
            return attention_prefill_triton(query, cache, starts, lens, tables, scale, max_context=128, part=tokens)

        return attend(run, query, cache, [20], [60], tables)

    assert torch.equal(parts_of(64), parts_of(128))


def test_parts_side_by_side_fill_a_card():
    # 64 rows of the 35B, 512, 1,024, and so many that one part is enough
    assert [parts_side_by_side(programs) for programs in (8, 64, 128, 256, 512)] == [4, 2, 1, 1, 1]
    assert parts_side_by_side(192) == 2


@needs_kernels
def test_decode_of_plain_fp32_numbers(device):
    cache, tables = filled_cache("bf16", [130], 1, device)
    wide = PagedKV(cache.keys.float(), cache.values.float())
    query = torch.randn(2, HEADS, HEAD_DIM, device=device)
    starts, lens = starts_of([2], device), torch.tensor([130], dtype=torch.int32, device=device)
    assert_matches(
        attention_decode_triton(query, wide, starts, lens, tables, SCALE, 2),
        oracle(query, wide, [2], [130], tables, SCALE),
    )


@pytest.mark.parametrize("context", [1, 64, 65, 8192, 8193, 65535, 65537, 262144])
def test_splits_cover_the_context(context):
    starts = split_starts(context)
    assert len(starts) == num_splits(context)
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] < context
    assert all(start % BLOCK == 0 for start in starts)


def test_splits_by_hand():
    assert num_splits(8192) == 128
    assert split_starts(8192 + 513)[-3:] == [8192 - 64, 8192, 8192 + 512]
    # 128 splits of 64, 112 of 512 and 192 of 1,024
    assert num_splits(262144) == 128 + 112 + 192


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
