"""kv_append and paged_attention."""

import pytest
import torch

from engine.ops.kv_append import kv_append
from engine.ops.paged_attention import paged_attention
from engine.ops.paged_kv import PagedKV
from tests.ops.conftest import assert_matches, starts_of

BLOCK = 64


def cache_of(num_blocks, kv_heads, dtype, device, fill=None):
    shape = (2, num_blocks, BLOCK, kv_heads, 256)
    storage = torch.randn(shape, device=device, dtype=dtype) if fill is None else torch.full(shape, fill, device=device)
    return PagedKV(*storage)


def naive(query, cache, num_rows, context_lens, tables, scale):
    """Token by token and head by head, in fp64."""
    out, row = [], 0
    group = query.shape[1] // cache.keys.shape[2]
    for rows, length, table in zip(num_rows, context_lens, tables, strict=True):
        k, v = (x[table].flatten(0, 1)[:length].double() for x in (cache.keys, cache.values))
        for i in range(rows):
            seen = length - rows + i + 1
            for head, q in enumerate(query[row].double()):
                weights = torch.softmax(k[:seen, head // group] @ q * scale, dim=0)
                out.append(weights @ v[:seen, head // group])
            row += 1
    return torch.stack(out).view(query.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "num_rows, context_lens",
    [
        ([1], [1]),
        ([5], [5]),
        ([1], [64]),
        ([3], [65]),
        ([70], [200]),
        ([1, 1, 1], [3, 64, 129]),
        ([4, 1, 9], [4, 130, 64]),
    ],
)
def test_attention_matches_naive_softmax(dtype, num_rows, context_lens, device):
    cache = cache_of(12, 2, dtype, device)
    query = torch.randn(sum(num_rows), 6, 256, dtype=dtype, device=device)
    tables = torch.randperm(12, device=device)[: 4 * len(num_rows)].view(len(num_rows), 4).int()
    oracle = naive(query, cache, num_rows, context_lens, tables, 1 / 16)
    lens = torch.tensor(context_lens, device=device).int()
    actual = paged_attention(query, cache, starts_of(num_rows, device), lens, tables, 1 / 16)
    assert actual.dtype == dtype
    assert_matches(actual, oracle)


def test_attention_does_not_read_past_the_context(device):
    cache = cache_of(2, 1, torch.float32, device, fill=float("nan"))
    cache.keys[1, :3] = cache.values[1, :3] = 1.0
    query = torch.ones(2, 2, 256, device=device)
    lens, tables = torch.tensor([3], device=device).int(), torch.tensor([[1, 0]], device=device).int()
    out = paged_attention(query, cache, starts_of([2], device), lens, tables, 1 / 16)
    assert_matches(out, torch.ones(2, 2, 256, dtype=torch.float64, device=device))


def test_attention_by_hand(device):
    """Scores 0 and ln 3 weigh the values 1 and 5 as 1 : 3."""
    cache = cache_of(1, 1, torch.float32, device, fill=0.0)
    cache.keys[0, 1, 0, 0] = 2.0
    cache.values[0, 0], cache.values[0, 1] = 1.0, 5.0
    query = torch.zeros(1, 1, 256, device=device)
    query[..., 0] = torch.log(torch.tensor(3.0)) / 2 * 16
    lens, tables = torch.tensor([2], device=device).int(), torch.tensor([[0]], device=device).int()
    out = paged_attention(query, cache, starts_of([1], device), lens, tables, 1 / 16)
    assert_matches(out, torch.full((1, 1, 256), 4.0, dtype=torch.float64, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_append_writes_its_rows_and_no_others(dtype, device):
    cache = cache_of(3, 2, torch.float32, device, fill=7.0)
    keys, values = torch.randn(2, 4, 2, 256, dtype=dtype, device=device)
    slots = torch.tensor([130, 0, 63, 64], device=device)
    kv_append(keys, values, cache, slots)
    for rows, stored in ((keys, cache.keys), (values, cache.values)):
        flat = stored.flatten(0, 1)
        assert torch.equal(flat[slots], rows.float())
        others = torch.ones(len(flat), dtype=torch.bool, device=device)
        others[slots] = False
        assert (flat[others] == 7.0).all()
