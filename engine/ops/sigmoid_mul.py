"""Multiplication by a sigmoid gate."""

import torch


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y = x * sigmoid(gate)

    x       [..., width]
    gate    [..., width] or [..., 1]
    return  shape and dtype of x
    """
    return sigmoid_mul_reference(x, gate)


def sigmoid_mul_reference(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(gate)
