"""Keys and values of all requests, in blocks of tokens."""

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
        self._storage = torch.zeros(shape, device=device, dtype=dtype)
        self.num_blocks = num_blocks
        self.layers = [PagedKV(keys, values) for keys, values in self._storage]

    @property
    def num_bytes(self) -> int:
        return self._storage.nbytes
