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
