"""The decoder put together: which layers it has, and of which tensors, whatever form those are stored in."""

from typing import Protocol

import torch

from engine.layers.attention import GatedAttention
from engine.layers.decoder_layer import DecoderLayer
from engine.layers.embedding import Embedding, Head
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.layers.moe import SparseMoe
from engine.layers.mtp import Mtp
from engine.layers.norm import GatedRMSNorm, RMSNorm
from engine.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedMlp, QuantizedMoe
from engine.layers.rope import Rope
from engine.models.config import GDN_HEAD_DIM, HEAD_DIM, ModelConfig, MoeConfig
from engine.models.qwen3_5 import Qwen3_5


class Weights(Protocol):
    """One stored form. Every call reads what it returns; matrices that read the same input come as one.

    layer   what the names of a layer's tensors begin with: `layers.0.`
    raises  CheckpointError naming the tensor that is missing or damaged, CapacityError
    """

    def embedding(self) -> Embedding | QuantizedEmbedding: ...

    def head(self, tied: Embedding | QuantizedEmbedding | None) -> Linear | QuantizedLinear:
        """tied  the embedding, where its table is the head's too"""
        ...

    def wide(self, name: str) -> torch.Tensor:
        """A small tensor, fp32."""
        ...

    def matrix(self, name: str) -> Linear | QuantizedLinear:
        """One that is called the same in every form; its name is without `.weight`."""
        ...

    def attention_projection(self, layer: str) -> Linear | QuantizedLinear:
        """In the order of GatedAttention."""
        ...

    def delta_projection(self, layer: str) -> Linear | QuantizedLinear:
        """In the order of GatedDeltaNet."""
        ...

    def mlp(self, layer: str) -> Mlp | QuantizedMlp: ...

    def moe(self, layer: str, ffn: MoeConfig) -> SparseMoe | QuantizedMoe: ...


def assemble(weights: Weights, config: ModelConfig, rope: Rope) -> Qwen3_5:
    """In the order of an artifact's files, which are read ahead in that order. raises  as Weights"""
    embedding = weights.embedding()
    return Qwen3_5(
        config=config,
        embedding=embedding,
        layers=[_layer(weights, config, f"layers.{i}.", kind) for i, kind in enumerate(config.layer_types)],
        norm=_norm(weights, config, "norm.weight"),
        head=Head(weights.head(embedding if config.tie_word_embeddings else None), config.num_ids),
        rope=rope,
        mtp=_mtp(weights, config) if config.has_mtp else None,
    )


def _mtp(weights: Weights, config: ModelConfig) -> Mtp:
    return Mtp(
        embedding_norm=_norm(weights, config, "mtp.pre_fc_norm_embedding.weight"),
        hidden_norm=_norm(weights, config, "mtp.pre_fc_norm_hidden.weight"),
        fc=weights.matrix("mtp.fc"),
        layer=_layer(weights, config, "mtp.layers.0.", "full_attention"),
        norm=_norm(weights, config, "mtp.norm.weight"),
    )


def _layer(weights: Weights, config: ModelConfig, layer: str, kind: str) -> DecoderLayer:
    mixer, ffn = _attention if kind == "full_attention" else _delta, config.feed_forward
    return DecoderLayer(
        mixer_norm=_norm(weights, config, layer + "input_layernorm.weight"),
        mixer=mixer(weights, config, layer),
        feed_forward_norm=_norm(weights, config, layer + "post_attention_layernorm.weight"),
        feed_forward=weights.moe(layer, ffn) if isinstance(ffn, MoeConfig) else weights.mlp(layer),
    )


def _attention(weights: Weights, config: ModelConfig, layer: str) -> GatedAttention:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    factors = [
        _factor(weights, f"{layer}self_attn.{name}.weight").expand(count, -1)
        for name, count in (("q_norm", heads), ("k_norm", kv_heads))
    ]
    return GatedAttention(
        projection=weights.attention_projection(layer),
        norm=RMSNorm(torch.cat(factors), config.rms_norm_eps),
        output=weights.matrix(layer + "self_attn.o_proj"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
    )


def _delta(weights: Weights, config: ModelConfig, layer: str) -> GatedDeltaNet:
    prefix = layer + "linear_attn."
    return GatedDeltaNet(
        projection=weights.delta_projection(layer),
        conv=weights.wide(prefix + "conv1d.weight").squeeze(1),
        decay=-weights.wide(prefix + "A_log").exp(),
        dt_bias=weights.wide(prefix + "dt_bias"),
        norm=GatedRMSNorm(weights.wide(prefix + "norm.weight"), config.rms_norm_eps),
        output=weights.matrix(prefix + "out_proj"),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=GDN_HEAD_DIM,
        value_dim=GDN_HEAD_DIM,
    )


def _norm(weights: Weights, config: ModelConfig, name: str) -> RMSNorm:
    return RMSNorm(_factor(weights, name), config.rms_norm_eps)


def _factor(weights: Weights, name: str) -> torch.Tensor:
    """Stored zero-centred."""
    return 1 + weights.wide(name)
