"""Keys and values of all requests, in blocks of tokens."""

import math
import mmap

import torch

from config.engine import BLOCK_SIZE
from engine.cache.kv_codecs import CODECS, GROUP, KVCodec
from engine.cache.mtp_window import MtpWindow
from engine.models.config import ModelConfig
from engine.ops.coded_kv import CodedKV
from engine.ops.paged_kv import PagedKV


class KVCache:
    """Block b holds the tokens b * BLOCK_SIZE onward of every layer; who owns a block is decided elsewhere.

    layers  the full-attention layers in order, then MTP's if the model has one
    window  of MTP, whose blocks then belong to slots and hold what it says, instead of those tokens
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        codec: KVCodec = CODECS["bf16"],
        window: MtpWindow | None = None,
        num_slots: int = 0,
    ) -> None:
        """dtype  of the numbers of a cache that is not coded"""
        self.num_blocks = num_blocks
        self.window = window
        self._num_slots = num_slots
        make = _coded_layer if codec.is_coded else _plain_layer
        counts = [num_blocks] * config.num_kv_layers
        if window is not None:
            counts[-1] = num_slots * window.blocks_per_slot
        self.layers = [make(config, count, device, dtype, codec) for count in counts]

    @property
    def shared_layers(self) -> list[PagedKV | CodedKV]:
        """Those whose blocks are the cache's."""
        return self.layers if self.window is None else self.layers[:-1]

    @property
    def window_bytes(self) -> int:
        """Of one slot."""
        return 0 if self.window is None else self.layers[-1].num_bytes // self._num_slots

    def pack_window(self, slot: int) -> torch.Tensor:
        """What MTP sees of a slot's request.  [window_bytes] uint8"""
        return pack(self.layers[-1], self._window_blocks(slot)).flatten()

    def unpack_window(self, slot: int, packed: torch.Tensor) -> None:
        ids = self._window_blocks(slot)
        unpack(self.layers[-1], ids, packed.view(len(ids), -1))

    def _window_blocks(self, slot: int) -> torch.Tensor:
        assert self.window is not None
        count = self.window.blocks_per_slot
        return torch.arange(slot * count, (slot + 1) * count, device=self.layers[-1].keys.device)

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers)


def pack(layer: PagedKV | CodedKV, ids: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes of a layer's block] uint8"""
    return torch.cat([x.index_select(0, ids).reshape(len(ids), -1).view(torch.uint8) for x in _tensors(layer)], dim=1)


def unpack(layer: PagedKV | CodedKV, ids: torch.Tensor, packed: torch.Tensor) -> None:
    """What `pack` gave, into other blocks."""
    start = 0
    for x in _tensors(layer):
        size = x[0].nbytes
        part = packed[:, start : start + size].contiguous().view(x.dtype)
        x.index_copy_(0, ids, part.view(len(ids), *x.shape[1:]))
        start += size


def _tensors(layer: PagedKV | CodedKV) -> list[torch.Tensor]:
    if isinstance(layer, PagedKV):
        return [layer.keys, layer.values]
    return [layer.keys, layer.values, layer.key_scales, layer.value_scales]


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
