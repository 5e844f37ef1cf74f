"""Causal attention over keys and values held in blocks."""

import torch
import torch.nn.functional as F

from engine.ops.paged_kv import PagedKV


def paged_attention(
    query: torch.Tensor,
    cache: PagedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q kT) v, where the rows of a request are the last tokens of its context and see no later ones.

    query         [rows, heads, head_dim]; query head h reads KV head h // (heads / kv_heads)
    query_starts  [requests + 1] int32  request i owns rows query_starts[i] : query_starts[i + 1]
    context_lens  [requests] int32      tokens in the cache, the rows' own included
    block_tables  [requests, blocks] int32
    return        shape and dtype of query
    """
    return paged_attention_reference(query, cache, query_starts, context_lens, block_tables, scale)


def paged_attention_reference(
    query: torch.Tensor,
    cache: PagedKV,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    starts, lens = query_starts.tolist(), context_lens.tolist()
    outputs = [
        _attend(query[start:end], gathered(cache.keys, table, length), gathered(cache.values, table, length), scale)
        for start, end, length, table in zip(starts, starts[1:], lens, block_tables, strict=False)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def gathered(blocks: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of one request.  [length, kv_heads, head_dim]"""
    num_blocks = -(-length // blocks.shape[1])
    return blocks.index_select(0, table[:num_blocks]).flatten(0, 1)[:length]


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    rows, heads, head_dim = query.shape
    length, kv_heads, _ = keys.shape
    group = heads // kv_heads
    # the KV heads stand in the batch dimension, so that a group of query heads shares its keys without a copy
    q = query.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x.to(query.dtype).transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))
    mask = None if rows == 1 else _causal_mask(rows, length, query.device)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def _causal_mask(rows: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, length, dtype=torch.bool, device=device).tril(length - rows)
