"""Depthwise causal convolution over the rows of each request, followed by SiLU."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.ops.ragged import of_slots, pad_rows, unpad_rows


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    inputs: torch.Tensor,
    state_slots: torch.Tensor,
    num_rows: Sequence[int],
    commits: bool,
) -> torch.Tensor:
    """y[t] = silu(sum_j weight[:, j] * x[t + j - width + 1]), where a request's rows follow upon its slot's inputs.

    x             [rows, channels]
    weight        [channels, width]
    inputs        [slots, width - 1 + MAX_PENDING_ROWS, channels]  width - 1 committed ones, then pending ones
    state_slots   [requests] int64
    num_rows      of each request
    return        [rows, channels]  dtype of x
    writes        inputs of those slots: the committed ones when the rows commit, else the pending ones
    bounds        at most MAX_PENDING_ROWS rows per request unless they commit
    """
    slots, kept = state_slots.tolist(), weight.shape[1] - 1
    padded = pad_rows(x, num_rows).to(inputs.dtype)
    window = torch.cat([of_slots(inputs, slots)[:, :kept], padded], dim=1)
    for slot, row, count in zip(slots, window, num_rows, strict=True):
        if commits:
            inputs[slot, :kept] = row[count : count + kept]
        else:
            inputs[slot, kept : kept + count] = row[kept : kept + count]
    return unpad_rows(_convolved(window, weight.to(inputs.dtype)).to(x.dtype), num_rows)


def _convolved(window: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[requests, width - 1 + rows, channels] -> [requests, rows, channels]"""
    return F.silu((window.unfold(1, weight.shape[1], 1) * weight).sum(-1))
