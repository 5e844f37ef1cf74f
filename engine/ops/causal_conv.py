"""Depthwise causal convolution over the rows of each request, followed by SiLU."""

import torch
import torch.nn.functional as F

from engine.ops.ragged import lengths, pad_rows, unpad_rows


def causal_conv(
    x: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor, query_starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """y[t] = silu(sum_j weight[:, j] * x[t + j - width + 1]), where a request's rows follow upon its taps.

    x             [rows, channels]
    taps          [requests, width - 1, channels]  inputs before the first row, oldest first
    weight        [channels, width]
    query_starts  [requests + 1] int32
    return        [rows, channels] dtype of x, and the taps after the last row, shape and dtype of taps
    """
    return causal_conv_reference(x, taps, weight, query_starts)


def causal_conv_reference(
    x: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor, query_starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = lengths(query_starts)
    inputs = torch.cat([taps, pad_rows(x, num_rows).to(taps.dtype)], dim=1)
    longest = max(num_rows)
    columns = weight.to(taps.dtype).unbind(1)
    y = inputs[:, :longest] * columns[0]
    for j, column in enumerate(columns[1:], start=1):
        y.addcmul_(inputs[:, j : j + longest], column)
    return unpad_rows(F.silu(y).to(x.dtype), num_rows), windows(inputs, num_rows, taps.shape[1])


def windows(inputs: torch.Tensor, firsts: list[int], width: int) -> torch.Tensor:
    """[requests, length, channels] -> [requests, width, channels], beginning at firsts[i] in request i."""
    return torch.stack([rows[first : first + width] for rows, first in zip(inputs, firsts, strict=True)])
