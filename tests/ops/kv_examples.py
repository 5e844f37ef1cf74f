"""Small caches of every codec, their blocks in random order and everything that no request owns poisoned."""

import torch

from engine.cache.kv_codecs import CODECS
from engine.ops.coded_kv import CodedKV, decoded
from engine.ops.kv_append_coded import kv_append_coded_reference
from engine.ops.paged_kv import PagedKV

BLOCK = 64
HEAD_DIM = 256
NAMES = list(CODECS)
CODED_NAMES = [name for name, codec in CODECS.items() if codec.is_coded]


def block_tables_of(context_lens, device):
    """Distinct blocks in random order; unused entries point at block 0, which nobody owns."""
    counts = [-(-length // BLOCK) for length in context_lens]
    order = (1 + torch.randperm(sum(counts), device=device)).int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for table, ids in zip(tables, order.split(counts), strict=True):
        table[: len(ids)] = ids
    return tables


def slots_of(tables, context_lens):
    """Where the tokens of every request lie, one request after another."""
    positions = [torch.arange(length, device=tables.device) for length in context_lens]
    slots = [table[p // BLOCK].long() * BLOCK + p % BLOCK for table, p in zip(tables, positions, strict=True)]
    return torch.cat(slots)


def empty_cache(name, num_blocks, kv_heads, device):
    codec = CODECS[name]
    if not codec.is_coded:
        return PagedKV(
            *torch.full((2, num_blocks, BLOCK, kv_heads, HEAD_DIM), torch.nan, dtype=torch.bfloat16, device=device)
        )
    cache = CodedKV.zeros(num_blocks, BLOCK, kv_heads, HEAD_DIM, codec.folds, codec.is_rotated, device)
    for words, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales)):
        words.random_(-(2**31), 2**31)
        scales.fill_(torch.nan)
    return cache


def filled_cache(name, context_lens, kv_heads, device):
    """A cache and its block tables."""
    tables = block_tables_of(context_lens, device)
    cache = empty_cache(name, int(tables.max()) + 1, kv_heads, device)
    keys, values = torch.randn(2, sum(context_lens), kv_heads, HEAD_DIM, device=device).bfloat16()
    slots = slots_of(tables, context_lens)
    if isinstance(cache, CodedKV):
        kv_append_coded_reference(keys, values, cache, slots)
    else:
        cache.keys.flatten(0, 1)[slots], cache.values.flatten(0, 1)[slots] = keys, values
    return cache, tables


def oracle(query, cache, num_rows, context_lens, tables, scale):
    """Softmax attention in fp64, row by row and head by head, over what the codes stand for."""
    plain = decoded(cache, torch.float64) if isinstance(cache, CodedKV) else cache
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // plain.keys.shape[2]
    first = 0
    for rows, length, table in zip(num_rows, context_lens, tables, strict=True):
        keys, values = (x[table.long()].flatten(0, 1).double() for x in (plain.keys, plain.values))
        for row in range(rows):
            seen = length - rows + row + 1
            for head in range(query.shape[1]):
                scores = keys[:seen, head // group] @ query[first + row, head].double() * scale
                out[first + row, head] = scores.softmax(0) @ values[:seen, head // group]
        first += rows
    return out
