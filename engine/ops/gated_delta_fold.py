"""Commit of accepted pending rows to the Gated DeltaNet state."""

import torch

from engine.ops.delta_state import DeltaState


def gated_delta_fold(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """For j < num_accepted[i], in order: S = alpha_j S + u_j k_jT; the convolution's inputs move on by as many rows.

    state_slots   [requests] int64, all different
    num_accepted  [requests] int32, at most MAX_PENDING_ROWS
    writes        state and committed inputs of those slots
    """
    gated_delta_fold_reference(memory, state_slots, num_accepted)


def gated_delta_fold_reference(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    for slot, count in zip(state_slots.tolist(), num_accepted.tolist(), strict=True):
        if count:
            _fold_slot(memory, slot, count)


def _fold_slot(memory: DeltaState, slot: int, count: int) -> None:
    state, inputs, keys, u, alpha = (tensor[slot] for tensor in memory.tensors())
    for j in range(count):
        write(state, alpha[j], u[j], keys[j], out=state)
    kept = len(inputs) - len(keys)
    inputs[:kept] = inputs[count : count + kept].clone()


def write(
    state: torch.Tensor, alpha: torch.Tensor, u: torch.Tensor, key: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """alpha S + u kT, the one arithmetic by which a row enters the state.

    state  [..., value_heads, value_dim, key_dim]
    alpha  [..., value_heads]
    u      [..., value_heads, value_dim]
    key    [..., key_heads, key_dim]
    """
    decayed = torch.mul(state, alpha[..., None, None], out=out)
    grouped = decayed.unflatten(-3, (key.shape[-2], -1))
    grouped.addcmul_(u.unflatten(-2, grouped.shape[-4:-2]).unsqueeze(-1), key[..., None, None, :])
    return decayed
