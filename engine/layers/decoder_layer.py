"""One layer of the decoder."""

from dataclasses import dataclass

import torch

from engine.layers.attention import GatedAttention
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.mlp import Mlp
from engine.layers.moe import SparseMoe
from engine.layers.norm import RMSNorm
from engine.layers.quantized import QuantizedMlp, QuantizedMoe
from engine.layers.rows import Rows
from engine.ops.coded_kv import CodedKV
from engine.ops.delta_state import DeltaState
from engine.ops.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """x += mixer(norm(x));  x += feed_forward(norm(x))

    Mixer and feed-forward take the norm before them and add x themselves, so that a kernel can do it on the way.
    """

    mixer_norm: RMSNorm
    mixer: GatedAttention | GatedDeltaNet
    feed_forward_norm: RMSNorm
    feed_forward: Mlp | SparseMoe | QuantizedMlp | QuantizedMoe

    def __call__(self, x: torch.Tensor, rows: Rows, memory: PagedKV | CodedKV | DeltaState) -> torch.Tensor:
        """memory  the KV cache or the state of this layer, as its mixer needs"""
        x = self.mixer(x, self.mixer_norm, rows, memory)
        return self.feed_forward(x, self.feed_forward_norm, is_prompt=rows.commits)
