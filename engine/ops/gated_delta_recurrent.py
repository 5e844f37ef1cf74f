"""The gated delta rule, row by row, leaving the rows pending beside the state."""

from collections.abc import Sequence

import torch

from engine.ops.delta_state import DeltaState
from engine.ops.gated_delta_fold import write
from engine.ops.ragged import of_slots, pad_rows, unpad_rows


def gated_delta_recurrent_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_alpha: torch.Tensor,
    beta: torch.Tensor,
    memory: DeltaState,
    state_slots: torch.Tensor,
    num_rows: Sequence[int],
) -> torch.Tensor:
    """S = alpha S;  u = beta (v - S k);  S = S + u kT;  o = S q / sqrt(key_dim), from the slot's committed state.

    query, key       [rows, key_heads, key_dim]  of unit length; value head j uses key head j // (heads / key_heads)
    value            [rows, value_heads, value_dim]
    log_alpha, beta  [rows, value_heads]
    num_rows         of each request
    return           [rows, value_heads, value_dim]
    writes           pending_key, pending_u and pending_alpha of each slot's first rows; not the state
    bounds           at most MAX_PENDING_ROWS rows per request
    """
    slots = state_slots.tolist()
    query, key, value, log_alpha, beta = (pad_rows(x, num_rows) for x in (query, key, value, log_alpha, beta))
    alpha = log_alpha.exp()
    output, u = recur(query, key, value, alpha, beta, of_slots(memory.state, slots))
    for pending, rows in ((memory.pending_key, key), (memory.pending_u, u), (memory.pending_alpha, alpha)):
        for slot, row, count in zip(slots, rows, num_rows, strict=True):
            pending[slot, :count] = row[:count]
    return unpad_rows(output, num_rows)


def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and u of [requests, rows, ...] from state [requests, heads, value_dim, key_dim], which is not written."""
    key_heads, key_dim = key.shape[2:]
    rows = key.shape[1]
    # both products of a row in one reading of the state: u = beta v - beta alpha S k,  o = alpha S q + u (k . q)
    both = torch.stack([key, query * key_dim**-0.5], dim=3)
    overlap = both.prod(3).sum(-1)[..., None, None]
    alpha, beta = (x.unflatten(2, (key_heads, -1)).unsqueeze(-1) for x in (alpha, beta))
    target, taken = beta * value.unflatten(2, (key_heads, -1)), -alpha * beta
    state = state.unflatten(1, (key_heads, -1))
    outputs, written = [], []
    for t in range(rows):
        products = torch.matmul(both[:, t], state.flatten(2, 3).mT).unflatten(-1, state.shape[2:4])
        u = torch.addcmul(target[:, t], taken[:, t], products[:, :, 0])
        outputs.append(torch.addcmul(products[:, :, 1] * alpha[:, t], u, overlap[:, t]))
        written.append(u)
        if t + 1 < rows:
            state = write(state, alpha[:, t], u, key[:, t])
    return torch.stack(outputs, dim=1).flatten(2, 3), torch.stack(written, dim=1).flatten(2, 3)
