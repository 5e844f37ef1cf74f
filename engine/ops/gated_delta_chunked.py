"""The gated delta rule over many rows, in chunks that are dense products, committed to the state at once."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

CHUNK = 64


def gated_delta_chunked_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_alpha: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    num_rows: Sequence[int],
) -> torch.Tensor:
    """S = alpha S;  u = beta (v - S k);  S = S + u kT;  o = S q / sqrt(key_dim)

    query, key       [rows, key_heads, key_dim]  of unit length; value head j uses key head j // (heads / key_heads)
    value            [rows, value_heads, value_dim]
    log_alpha, beta  [rows, value_heads]
    state            [slots, value_heads, value_dim, key_dim]
    num_rows         of each request
    return           [rows, value_heads, value_dim]
    writes           the state of state_slots, as it is after each request's last row
    """
    rows = zip(*(x.split(num_rows) for x in (query, key, value, log_alpha, beta)), strict=True)
    return torch.cat(
        [_one_request(*request, state[slot]) for request, slot in zip(rows, state_slots.tolist(), strict=True)]
    )


def _one_request(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_alpha: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    rows, group = len(query), value.shape[1] // key.shape[1]
    chunk = min(CHUNK, rows)
    query, key = (x.repeat_interleave(group, dim=1) for x in (query * query.shape[-1] ** -0.5, key))
    query, key, value, beta, log_alpha = (
        _in_chunks(x, chunk) for x in (query, key, value, beta[..., None], log_alpha[..., None])
    )
    output = _scan(query, key, value, beta, log_alpha.squeeze(-1).cumsum(-1), state)
    return output.flatten(1, 2)[:, :rows].transpose(0, 1)


def _in_chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """[rows, heads, width] -> [heads, chunks, chunk, width]; zero rows at the end change neither state nor output."""
    rows, heads, width = x.shape
    return F.pad(x.transpose(0, 1), (0, 0, 0, -rows % chunk)).reshape(heads, -1, chunk, width)


def _scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Within a chunk, u solves (I + A) u = beta v - beta exp(decay) S k with A[i, j] = beta_i exp(decay_i - decay_j)
    k_i . k_j below the diagonal: everything but the terms in S is computed for all chunks together.

    decay  [heads, chunks, chunk]  sums of log alpha since the chunk began
    """
    between = (decay[..., :, None] - decay[..., None, :]).tril()
    between = between.exp().tril()
    since_start = decay.exp().unsqueeze(-1)
    system = (beta * key) @ key.mT * between
    right = torch.cat([beta * value, beta * since_start * key], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, stale = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within = query @ key.mT * between
    query = query * since_start
    last = decay[..., -1:]
    key = key * (last - decay).exp().unsqueeze(-1)
    last = last.exp().unsqueeze(-1)
    outputs = []
    for c in range(query.shape[1]):
        u = fresh[:, c] - stale[:, c] @ state.mT
        outputs.append(query[:, c] @ state.mT + within[:, c] @ u)
        state.mul_(last[:, c]).add_(u.mT @ key[:, c])
    return torch.stack(outputs, dim=1)
