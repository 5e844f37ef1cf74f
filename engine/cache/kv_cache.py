"""Keys and values of all requests, in blocks of tokens."""

import math
import mmap

import torch

from config.engine import BLOCK_SIZE
from engine.cache.kv_codecs import CODECS, GROUP, KVCodec
from engine.models.config import ModelConfig
from engine.ops.coded_kv import CodedKV
from engine.ops.paged_kv import PagedKV


class KVCache:
    """Block b holds the tokens b * BLOCK_SIZE onward of every layer; who owns a block is decided elsewhere.

    layers  the full-attention layers in order, then MTP's if the model has one
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        codec: KVCodec = CODECS["bf16"],
    ) -> None:
        """dtype  of the numbers of a cache that is not coded"""
        self.num_blocks = num_blocks
        make = _coded_layer if codec.is_coded else _plain_layer
        self.layers = [make(config, num_blocks, device, dtype, codec) for _ in range(config.num_kv_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


def _plain_layer(
    config: ModelConfig, num_blocks: int, device: torch.device, dtype: torch.dtype, _codec: KVCodec
) -> PagedKV:
    shape = (2, num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
    return PagedKV(*_zeros(shape, device, dtype))


def _coded_layer(
    config: ModelConfig, num_blocks: int, device: torch.device, _dtype: torch.dtype, codec: KVCodec
) -> CodedKV:
    """A KV head's part of a block is contiguous."""

    def blocks(width: int, dtype: torch.dtype) -> torch.Tensor:
        return _zeros((num_blocks, config.num_key_value_heads, BLOCK_SIZE, width), device, dtype).transpose(1, 2)

    words = [blocks(config.head_dim // fold, torch.int32) for fold in codec.folds]
    scales = [blocks(config.head_dim // GROUP, torch.float16) for _ in codec.folds]
    return CodedKV(*words, *scales, codec.is_rotated)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, because attention reads whole blocks and masks what no token has written: 0 times NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # pages of an anonymous map are zero already, so that start-up need not write gigabytes
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
