"""From an artifact to a model that is ready to run."""

from pathlib import Path

import torch

from engine.errors import CheckpointError
from engine.layers.attention import GatedAttention
from engine.layers.decoder_layer import DecoderLayer
from engine.layers.embedding import Embedding, Head
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.linear import Linear, linear
from engine.layers.mlp import Mlp
from engine.layers.moe import SparseMoe
from engine.layers.mtp import Mtp
from engine.layers.norm import GatedRMSNorm, RMSNorm
from engine.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedMlp, QuantizedMoe
from engine.models.artifact import Artifact
from engine.models.config import GDN_HEAD_DIM, HEAD_DIM, MoeConfig
from engine.models.host_weights import in_host_memory
from engine.models.qwen3_5 import Qwen3_5, rope_of
from engine.ops.quantized_experts import QuantizedExperts
from engine.ops.quantized_weight import QuantizedWeight, stack_rows


def load_artifact(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool = False,
    drafts: bool = True,
    is_embedding_on_host: bool = False,
) -> Qwen3_5:
    """dtype  of activations and of what the recipe left unrounded. raises  CheckpointError, CapacityError"""
    with Artifact(directory, device, ("embed_tokens",) if is_embedding_on_host else ()) as artifact:
        return build_model(artifact, device, dtype, is_stretched, drafts)


def build_model(
    artifact: Artifact,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool = False,
    drafts: bool = True,
) -> Qwen3_5:
    """Over an artifact that is open on that device."""
    return _Builder(artifact, device, dtype, is_stretched, drafts).model()


class _Builder:
    """Layers over the tensors of an artifact, rounded or not."""

    def __init__(
        self,
        artifact: Artifact,
        device: torch.device,
        dtype: torch.dtype,
        is_stretched: bool = False,
        drafts: bool = True,
    ) -> None:
        self._artifact = artifact
        self._config = artifact.config if drafts else artifact.config.without_mtp()
        self._device = device
        self._dtype = dtype
        self._is_stretched = is_stretched

    def model(self) -> Qwen3_5:
        config = self._config
        head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
        return Qwen3_5(
            config=config,
            embedding=self._embedding(),
            layers=[self._layer(f"layers.{i}.", layer_type) for i, layer_type in enumerate(config.layer_types)],
            norm=self._norm("norm.weight"),
            head=Head(self._linear(head, dtype=torch.float32), config.num_ids),
            rope=rope_of(config, self._is_stretched, self._device),
            mtp=self._mtp() if config.has_mtp else None,
        )

    def _embedding(self) -> Embedding | QuantizedEmbedding:
        weight = self._read("embed_tokens")
        is_quantized = isinstance(weight, QuantizedWeight)
        weight = weight if is_quantized else weight.to(self._dtype)
        if weight.device.type != self._device.type:
            weight = in_host_memory(weight)
        return QuantizedEmbedding(weight, self._dtype) if is_quantized else Embedding(weight)

    def _mtp(self) -> Mtp:
        return Mtp(
            embedding_norm=self._norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=self._norm("mtp.pre_fc_norm_hidden.weight"),
            fc=self._linear("mtp.fc"),
            layer=self._layer("mtp.layers.0.", "full_attention"),
            norm=self._norm("mtp.norm.weight"),
        )

    def _layer(self, prefix: str, layer_type: str) -> DecoderLayer:
        is_attention = layer_type == "full_attention"
        is_moe = isinstance(self._config.feed_forward, MoeConfig)
        return DecoderLayer(
            mixer_norm=self._norm(prefix + "input_layernorm.weight"),
            mixer=self._attention(prefix + "self_attn.") if is_attention else self._delta(prefix + "linear_attn."),
            feed_forward_norm=self._norm(prefix + "post_attention_layernorm.weight"),
            feed_forward=self._moe(prefix + "mlp.") if is_moe else self._mlp(prefix + "mlp."),
        )

    def _attention(self, prefix: str) -> GatedAttention:
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        factors = [
            self._norm(prefix + name).weight.expand(count, -1)
            for name, count in (("q_norm.weight", heads), ("k_norm.weight", kv_heads))
        ]
        return GatedAttention(
            projection=self._linear(prefix + "projection"),
            norm=RMSNorm(torch.cat(factors), self._config.rms_norm_eps),
            output=self._linear(prefix + "o_proj"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
        )

    def _delta(self, prefix: str) -> GatedDeltaNet:
        return GatedDeltaNet(
            projection=self._linear(prefix + "in_proj", prefix + "in_proj_gates"),
            conv=self._read(prefix + "conv1d.weight").squeeze(1),
            decay=-self._read(prefix + "A_log").exp(),
            dt_bias=self._read(prefix + "dt_bias"),
            norm=GatedRMSNorm(self._read(prefix + "norm.weight"), self._config.rms_norm_eps),
            output=self._linear(prefix + "out_proj"),
            key_heads=self._config.linear_num_key_heads,
            value_heads=self._config.linear_num_value_heads,
            key_dim=GDN_HEAD_DIM,
            value_dim=GDN_HEAD_DIM,
        )

    def _moe(self, prefix: str) -> SparseMoe | QuantizedMoe:
        names = ("experts.gate_up", "experts.down", "shared_expert.gate_up", "shared_expert.down")
        gate_up, down, shared_gate_up, shared_down = (self._read(prefix + name) for name in names)
        router = self._linear(prefix + "router")
        num_chosen = self._config.feed_forward.num_experts_per_tok
        if isinstance(gate_up, QuantizedWeight):
            return QuantizedMoe(router, QuantizedExperts(gate_up, down, shared_gate_up, shared_down), num_chosen)
        shared = (linear(matrix.to(self._dtype)) for matrix in (shared_gate_up, shared_down))
        return SparseMoe(router, gate_up.to(self._dtype), down.to(self._dtype), *shared, num_chosen)

    def _mlp(self, prefix: str) -> Mlp | QuantizedMlp:
        gate_up, down = self._read(prefix + "gate_up"), self._read(prefix + "down")
        if isinstance(gate_up, QuantizedWeight):
            return QuantizedMlp(gate_up, down)
        return Mlp(linear(gate_up.to(self._dtype)), linear(down.to(self._dtype)))

    def _linear(self, *names: str, dtype: torch.dtype | None = None) -> Linear | QuantizedLinear:
        parts = [self._read(name) for name in names]
        if isinstance(parts[0], QuantizedWeight):
            return QuantizedLinear(tuple(stack_rows(parts)), dtype)
        return linear(torch.cat(parts).to(self._dtype))

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(1 + self._read(name), self._config.rms_norm_eps)

    def _read(self, name: str) -> torch.Tensor | QuantizedWeight:
        if name not in self._artifact:
            raise CheckpointError(f"tensor {name} is missing from the artifact: convert the checkpoint again")
        return self._artifact.read(name)
