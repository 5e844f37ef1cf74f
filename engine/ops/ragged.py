"""Rows of several requests, one after another, and the same rows padded to a rectangle."""

from collections.abc import Sequence
from itertools import pairwise

import torch


def lengths(query_starts: torch.Tensor) -> list[int]:
    """Rows of each request."""
    return [end - start for start, end in pairwise(query_starts.tolist())]


def pad_rows(x: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
    """[rows, ...] -> [requests, longest, ...], zeros after a request's last row; a view when all are equally long."""
    requests, longest = len(num_rows), max(num_rows)
    if min(num_rows) == longest:
        return x.unflatten(0, (requests, longest))
    padded = x.new_zeros(requests, longest, *x.shape[1:])
    for target, rows in zip(padded, x.split(num_rows), strict=True):
        target[: len(rows)] = rows
    return padded


def unpad_rows(x: torch.Tensor, num_rows: Sequence[int]) -> torch.Tensor:
    """[requests, longest, ...] -> [rows, ...]; undoes pad_rows."""
    if min(num_rows) == x.shape[1]:
        return x.flatten(0, 1)
    return torch.cat([rows[:count] for rows, count in zip(x, num_rows, strict=True)])


def of_slots(x: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """[slots, ...] -> [requests, ...]; a view when there is one request."""
    return x[slots[0]].unsqueeze(0) if len(slots) == 1 else x[slots]
