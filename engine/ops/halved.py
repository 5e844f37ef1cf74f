"""The order in which columns stand for products of prompts with matrices in 4 bits."""

import torch
import triton
import triton.language as tl  # noqa: F401 - the interpreter asks for it


def halved(x: torch.Tensor) -> torch.Tensor:
    """In every group of 64 columns first those of the low nibbles, then those of the high ones; its own inverse."""
    return x.unflatten(-1, (-1, 2, 2, 16)).transpose(-3, -2).flatten(-4)


@triton.jit
def halved_column(column):
    """Where halved puts a column."""
    return column - column % 64 + (column // 16 % 2) * 32 + (column // 32 % 2) * 16 + column % 16
