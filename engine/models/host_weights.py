"""Weights that stay in host memory, where the kernels of a GPU read them over the bus."""

import math
import mmap
from typing import TypeVar

import torch

from engine.errors import CapacityError
from engine.ops.quantized_weight import QuantizedWeight

T = TypeVar("T", torch.Tensor, QuantizedWeight)


def in_host_memory(weight: T) -> T:
    """The same in pinned host memory: a tensor of the CPU whose address is one of the GPU too.

    raises  CapacityError when it cannot be pinned
    """
    if isinstance(weight, QuantizedWeight):
        words, scales = _pinned(weight.words), _pinned(weight.scales)
        return QuantizedWeight(words, scales, weight.rows, weight.bits)
    return _pinned(weight)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # torch's own pinned memory comes in powers of two
    num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
    pages = mmap.mmap(-1, num_bytes)
    held = torch.frombuffer(pages, dtype=tensor.dtype).view(tensor.shape)
    held.copy_(tensor)
    error = int(torch.cuda.cudart().cudaHostRegister(held.data_ptr(), num_bytes, 0))
    if error:
        raise CapacityError(
            f"{num_bytes} bytes of host memory for the embedding cannot be pinned (CUDA error {error}): "
            "raise the limit of locked memory, or set embedding_memory device"
        )
    return held
