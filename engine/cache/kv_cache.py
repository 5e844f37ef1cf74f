"""Keys and values of all requests, in blocks of tokens."""

import math
import mmap

import torch

from config.engine import BLOCK_SIZE
from engine.models.config import ModelConfig
from engine.ops.paged_kv import PagedKV


class KVCache:
    """Block b holds the tokens b * BLOCK_SIZE onward of every layer; who owns a block is decided elsewhere.

    layers  the full-attention layers in order, then MTP's if the model has one
    """

    def __init__(self, config: ModelConfig, num_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (config.num_kv_layers, 2, num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self._storage = _zeros(shape, device, dtype)
        self.num_blocks = num_blocks
        self.layers = [PagedKV(keys, values) for keys, values in self._storage]

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, because attention reads whole blocks and masks what no token has written: 0 times NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # pages of an anonymous map are zero already, so that start-up need not write gigabytes
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
