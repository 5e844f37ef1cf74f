"""Commit of accepted pending rows to the Gated DeltaNet state."""

import torch
import triton
import triton.language as tl

from engine.ops.delta_state import DeltaState
from engine.ops.launch import cdiv, plain_options


def gated_delta_fold(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """For j < num_accepted[i], in order: S = alpha_j S + u_j k_jT; the convolution's inputs move on by as many rows.

    state_slots   [requests] int64, all different
    num_accepted  [requests] int32, at most MAX_PENDING_ROWS
    writes        state and committed inputs of those slots
    """
    if state_slots.is_cuda:
        return gated_delta_fold_triton(memory, state_slots, num_accepted)
    return gated_delta_fold_reference(memory, state_slots, num_accepted)


def gated_delta_fold_reference(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    for slot, count in zip(state_slots.tolist(), num_accepted.tolist(), strict=True):
        if count:
            _fold_slot(memory, slot, count)


def _fold_slot(memory: DeltaState, slot: int, count: int) -> None:
    state, inputs, keys, u, alpha = (tensor[slot] for tensor in memory.tensors())
    # value heads by the key head that they share
    state, u, alpha = (x.unflatten(dim, (keys.shape[1], -1)) for x, dim in ((state, 0), (u, 1), (alpha, 1)))
    for j in range(count):
        write(state, alpha[j].unsqueeze(-1), u[j], keys[j], out=state)
    kept = len(inputs) - len(keys)
    inputs[:kept] = inputs[count : count + kept].clone()


def write(
    state: torch.Tensor, alpha: torch.Tensor, u: torch.Tensor, key: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """alpha S + u kT, the one arithmetic by which a row enters the state.

    state  [..., key_heads, group, value_dim, key_dim]
    alpha  [..., key_heads, group, 1]
    u      [..., key_heads, group, value_dim]
    key    [..., key_heads, key_dim]
    """
    decayed = torch.mul(state, alpha.unsqueeze(-1), out=out)
    return decayed.addcmul_(u.unsqueeze(-1), key[..., None, None, :])


def gated_delta_fold_triton(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    pending, key_heads, dim = memory.pending_key.shape[1:]
    value_heads, channels = memory.state.shape[1], memory.inputs.shape[2]
    assert memory.state.shape[2:] == (128, 128) and memory.inputs.shape[1] == 3 + pending
    assert all(tensor.is_contiguous() for tensor in memory.tensors())
    options = plain_options(8)
    gated_delta_fold_kernel[(value_heads + cdiv(channels, 1024), len(state_slots))](
        *memory.tensors(), state_slots, num_accepted, channels, KEY_HEADS=key_heads, VALUE_HEADS=value_heads,
        PENDING=pending, DIM=dim, BLOCK=1024, **options,
    )  # fmt: skip


@triton.jit
def tile_offsets(DIM: tl.constexpr, ROWS: tl.constexpr = None):
    """ROWS of a head's state [value_dim, key_dim], all if not given, as [ROWS, key_dim / 32, 32]: a sum over the key
    dimension then crosses eight threads, not thirty-two."""
    rows: tl.constexpr = DIM if ROWS is None else ROWS
    return tl.arange(0, rows)[:, None, None] * DIM + key_offsets(DIM)[None, :, :]


@triton.jit
def key_offsets(DIM: tl.constexpr):
    """[DIM / 32, 32], the order of a key beside such a tile."""
    return tl.arange(0, DIM // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def write_row(tile, alpha, u, key):
    """alpha S + u kT: the one arithmetic by which a row enters the state.  u [value_dim], key [key_dim / 32, 32]"""
    return tl.fma(u[:, None, None], key[None, :, :], alpha * tile)


@triton.jit
def fold_rows(tile, keys_ptr, u_ptr, alpha_ptr, count, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr):
    """The tile with the first `count` pending rows in it. u_ptr  of the tile's first value dimension"""
    dim: tl.constexpr = tile.shape[1] * tile.shape[2]
    for j in range(count):
        alpha = tl.load(alpha_ptr + j * VALUE_HEADS)
        u = tl.load(u_ptr + j * (VALUE_HEADS * dim) + tl.arange(0, tile.shape[0]))
        key = tl.load(keys_ptr + j * (KEY_HEADS * dim) + key_offsets(dim))
        tile = write_row(tile, alpha, u, key)
    return tile


@triton.jit
def gated_delta_fold_kernel(
    state_ptr, inputs_ptr, keys_ptr, u_ptr, alpha_ptr, slots_ptr, accepted_ptr, channels,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, PENDING: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs of a request fold one value head each, the others move the inputs on."""
    part, request = tl.program_id(0), tl.program_id(1)
    count = tl.minimum(tl.load(accepted_ptr + request), PENDING)
    if count > 0:
        slot = tl.load(slots_ptr + request).to(tl.int64)
        if part < VALUE_HEADS:
            at = state_ptr + (slot * VALUE_HEADS + part) * (DIM * DIM) + tile_offsets(DIM)
            keys_ptr += slot * (PENDING * KEY_HEADS * DIM) + part // (VALUE_HEADS // KEY_HEADS) * DIM
            u_ptr += slot * (PENDING * VALUE_HEADS * DIM) + part * DIM
            alpha_ptr += slot * (PENDING * VALUE_HEADS) + part
            tile = fold_rows(tl.load(at), keys_ptr, u_ptr, alpha_ptr, count, KEY_HEADS, VALUE_HEADS)
            tl.store(at, tile)
        else:
            channel = (part - VALUE_HEADS) * BLOCK + tl.arange(0, BLOCK)
            mask = channel < channels
            first = inputs_ptr + slot * (3 + PENDING) * channels + channel
            move_inputs(first, count, channels, mask)


@triton.jit
def move_inputs(at, count, channels, mask):
    """The three inputs from number `count` on come to the front."""
    first = tl.load(at + count * channels, mask=mask)
    second = tl.load(at + (count + 1) * channels, mask=mask)
    third = tl.load(at + (count + 2) * channels, mask=mask)
    # what is read may be what is overwritten
    tl.debug_barrier()
    tl.store(at, first, mask=mask)
    tl.store(at + channels, second, mask=mask)
    tl.store(at + 2 * channels, third, mask=mask)
