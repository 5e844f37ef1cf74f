"""The Gated DeltaNet state after some of the rows that wait beside it, written elsewhere."""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from engine.ops.delta_state import DeltaState
from engine.ops.gated_delta_fold import fold_rows, gated_delta_fold_reference, tile_offsets
from engine.ops.launch import cdiv, plain_options

# channels of the convolution's inputs that one program copies
BLOCK = 1024


def gated_delta_copy(
    memory: DeltaState,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """What gated_delta_fold would leave in every layer: for j < counts[i], in order, S = alpha_j S + u_j k_jT, and the
    convolution's inputs as many rows further on.

    memory   of all layers: [layers, slots, ...]
    slots    [requests] int64
    counts   [requests] int32, at most MAX_PENDING_ROWS; of -1 nothing is written
    state    [copies, layers, value_heads, value_dim, key_dim] fp32
    taps     [copies, layers, width - 1, channels] fp32
    indices  [requests] int64, all different
    writes   state and taps at those indices
    """
    if slots.is_cuda:
        return gated_delta_copy_triton(memory, slots, counts, state, taps, indices)
    return gated_delta_copy_reference(memory, slots, counts, state, taps, indices)


def gated_delta_copy_reference(
    memory: DeltaState,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    for slot, count, index in zip(slots.tolist(), counts.tolist(), indices.tolist(), strict=True):
        for layer in range(len(memory.state)) if count >= 0 else ():
            own = DeltaState(*(tensor[layer, slot : slot + 1] for tensor in memory.tensors()))
            own = replace(own, state=own.state.clone(), inputs=own.inputs.clone())
            gated_delta_fold_reference(own, slots.new_zeros(1), counts.new_tensor([count]))
            state[index, layer], taps[index, layer] = own.state[0], own.inputs[0, : taps.shape[2]]


def gated_delta_copy_triton(
    memory: DeltaState,
    slots: torch.Tensor,
    counts: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    layers, num_slots, pending, key_heads, dim = memory.pending_key.shape
    value_heads, channels = memory.state.shape[2], memory.inputs.shape[3]
    assert state.shape[1:] == (layers, value_heads, 128, 128) and taps.shape[1:] == (layers, 3, channels)
    assert memory.inputs.shape[2] == 3 + pending
    assert all(tensor.is_contiguous() for tensor in (*memory.tensors(), state, taps))
    options = plain_options(8)
    gated_delta_copy_kernel[(value_heads + cdiv(channels, BLOCK), layers, len(slots))](
        *memory.tensors(), slots, counts, state, taps, indices, num_slots, channels, KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads, PENDING=pending, DIM=dim, BLOCK=BLOCK, **options,
    )  # fmt: skip


@triton.jit
def gated_delta_copy_kernel(
    state_ptr, inputs_ptr, keys_ptr, u_ptr, alpha_ptr, slots_ptr, counts_ptr, copies_ptr, taps_ptr, indices_ptr,
    num_slots, channels, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, PENDING: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs of a request's layer take one value head each, the others the inputs."""
    part, layer, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.minimum(tl.load(counts_ptr + request), PENDING)
    if count >= 0:
        # int64: all layers' states of all slots pass 2**31 bytes
        slot = layer.to(tl.int64) * num_slots + tl.load(slots_ptr + request)
        copy = tl.load(indices_ptr + request).to(tl.int64) * tl.num_programs(1) + layer
        if part < VALUE_HEADS:
            at = part * (DIM * DIM) + tile_offsets(DIM)
            keys_ptr += slot * (PENDING * KEY_HEADS * DIM) + part // (VALUE_HEADS // KEY_HEADS) * DIM
            u_ptr += slot * (PENDING * VALUE_HEADS * DIM) + part * DIM
            alpha_ptr += slot * (PENDING * VALUE_HEADS) + part
            tile = tl.load(state_ptr + slot * (VALUE_HEADS * DIM * DIM) + at)
            tile = fold_rows(tile, keys_ptr, u_ptr, alpha_ptr, count, KEY_HEADS, VALUE_HEADS)
            tl.store(copies_ptr + copy * (VALUE_HEADS * DIM * DIM) + at, tile)
        else:
            channel = (part - VALUE_HEADS) * BLOCK + tl.arange(0, BLOCK)
            mask = channel < channels
            for tap in range(3):
                value = tl.load(inputs_ptr + (slot * (3 + PENDING) + count + tap) * channels + channel, mask=mask)
                tl.store(taps_ptr + (copy * 3 + tap) * channels + channel, value, mask=mask)
