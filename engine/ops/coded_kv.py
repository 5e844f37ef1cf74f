"""Coded keys and values of one layer in blocks of tokens."""

from dataclasses import dataclass
from typing import Self

import torch

from engine.ops.hadamard import GROUP, hadamard_reference
from engine.ops.kv_codec_e8 import e8_decode, e8_encode
from engine.ops.kv_codec_int8 import int8_decode, int8_encode
from engine.ops.paged_kv import PagedKV

# dimensions that one stored element holds -> how vectors become words and scales, and how they come back
ENCODERS = {4: int8_encode, 8: e8_encode}
DECODERS = {4: int8_decode, 8: e8_decode}


@dataclass(frozen=True, slots=True)
class CodedKV:
    """One layer's share of the KV cache. Words of head_dim / 4 hold int8 codes, of head_dim / 8 points of E8.

    keys, values              [blocks, block_size, kv_heads, words] int32
    key_scales, value_scales  [blocks, block_size, kv_heads, head_dim / 64] fp16
    is_rotated                what is coded has gone through hadamard
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    is_rotated: bool

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        folds: tuple[int, int],
        is_rotated: bool,
        device: torch.device | str,
    ) -> Self:
        """Storage in which a KV head's part of a block is contiguous.

        folds  dimensions per word of the keys and of the values, 4 or 8
        """

        def blocks(width: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (num_blocks, kv_heads, block_size, width)
            return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)

        words = [blocks(head_dim // fold, torch.int32) for fold in folds]
        scales = [blocks(head_dim // GROUP, torch.float16) for _ in folds]
        return cls(*words, *scales, is_rotated)

    @property
    def head_dim(self) -> int:
        return self.key_scales.shape[-1] * GROUP

    @property
    def folds(self) -> tuple[int, int]:
        return self.head_dim // self.keys.shape[-1], self.head_dim // self.values.shape[-1]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, self.key_scales, self.value_scales))


def decoded(cache: CodedKV, dtype: torch.dtype) -> PagedKV:
    """The whole cache as the values that attention sees, rotated back."""
    key_fold, value_fold = cache.folds
    keys = DECODERS[key_fold](cache.keys, cache.key_scales, dtype)
    values = DECODERS[value_fold](cache.values, cache.value_scales, dtype)
    return PagedKV(hadamard_reference(keys), hadamard_reference(values)) if cache.is_rotated else PagedKV(keys, values)
