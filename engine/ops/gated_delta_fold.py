"""Commit of accepted pending rows to the Gated DeltaNet state."""

import torch

from engine.ops.causal_conv import windows
from engine.ops.delta_state import DeltaState


def gated_delta_fold(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    """For j < num_accepted[i], in order: S = alpha_j S + u_j k_jT; the taps move on by the same rows.

    state_slots   [requests] int64, all different
    num_accepted  [requests] int32, at most MAX_PENDING_ROWS
    writes        state and taps of those slots
    """
    gated_delta_fold_reference(memory, state_slots, num_accepted)


def gated_delta_fold_reference(memory: DeltaState, state_slots: torch.Tensor, num_accepted: torch.Tensor) -> None:
    for slot, count in zip(state_slots.tolist(), num_accepted.tolist(), strict=True):
        if count:
            _fold_slot(memory, slot, count)


def _fold_slot(memory: DeltaState, slot: int, count: int) -> None:
    state = memory.state[slot]
    group = state.shape[0] // memory.pending_key.shape[2]
    for j in range(count):
        key = memory.pending_key[slot, j].repeat_interleave(group, dim=0)
        write(state, memory.pending_alpha[slot, j], memory.pending_u[slot, j], key, out=state)
    inputs = torch.cat([memory.taps[slot], memory.pending_input[slot, :count]]).unsqueeze(0)
    memory.taps[slot] = windows(inputs, [count], memory.taps.shape[1])[0]


def write(
    state: torch.Tensor, alpha: torch.Tensor, u: torch.Tensor, key: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """alpha S + u kT, the one arithmetic by which a row enters the state.

    state  [..., heads, value_dim, key_dim];  alpha [..., heads];  u [..., heads, value_dim];  key [..., heads, key_dim]
    """
    decayed = torch.mul(state, alpha[..., None, None], out=out)
    return decayed.addcmul_(u.unsqueeze(-1), key.unsqueeze(-2))
