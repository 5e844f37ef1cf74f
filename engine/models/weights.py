"""From a checkpoint directory to a model that is ready to run."""

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
from engine.models.artifact import is_artifact
from engine.models.checkpoint import Checkpoint
from engine.models.config import GDN_HEAD_DIM, HEAD_DIM, ModelConfig, MoeConfig, read_config
from engine.models.host_weights import in_host_memory
from engine.models.layout import FUSED_DOWN, FUSED_GATE_UP
from engine.models.qwen3_5 import Qwen3_5, rope_of


def load_model(
    checkpoint_dir: Path,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool = False,
    drafts: bool = True,
    is_embedding_on_host: bool = False,
) -> Qwen3_5:
    """A checkpoint, or an artifact made of one.

    is_stretched          positions reach four times as far, as the checkpoint documents (YaRN)
    drafts                with MTP, if there is one
    is_embedding_on_host  the table of inputs lies in pinned host memory, where the GPU reads it; not with a tied head
    raises  CheckpointError naming the file, field or tensor that is not as the family has it, CapacityError
    """
    if is_artifact(checkpoint_dir):
        return _load_artifact(checkpoint_dir, device, dtype, is_stretched, drafts, is_embedding_on_host)
    config = read_config(checkpoint_dir)
    with Checkpoint(checkpoint_dir, config) as checkpoint:
        config = config if drafts else config.without_mtp()
        return _Builder(checkpoint, config, device, dtype, is_stretched, is_embedding_on_host).model()


def _load_artifact(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool,
    drafts: bool,
    is_embedding_on_host: bool,
) -> Qwen3_5:
    try:
        # only here: Triton is large, and a checkpoint is served on a CPU without it
        from engine.models.quantized import load_artifact
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{directory} is an artifact, which needs the extra `gpu`: {error}") from error
    return load_artifact(directory, device, dtype, is_stretched, drafts, is_embedding_on_host)


class _Builder:
    """Layers from stored tensors; matrices that read the same input become one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        is_stretched: bool = False,
        is_embedding_on_host: bool = False,
    ) -> None:
        assert not (is_embedding_on_host and config.tie_word_embeddings)
        self._checkpoint = checkpoint
        self._config = config
        self._device = device
        self._dtype = dtype
        self._is_stretched = is_stretched
        self._is_embedding_on_host = is_embedding_on_host

    def model(self) -> Qwen3_5:
        config = self._config
        embedding = self._read("embed_tokens.weight")
        embedding = in_host_memory(embedding) if self._is_embedding_on_host else embedding.to(self._device)
        return Qwen3_5(
            config=config,
            embedding=Embedding(embedding),
            layers=[self._layer(f"layers.{i}.", layer_type) for i, layer_type in enumerate(config.layer_types)],
            norm=self._norm("norm.weight"),
            head=Head(linear(embedding) if config.tie_word_embeddings else self._linear("lm_head"), config.num_ids),
            rope=rope_of(config, self._is_stretched, self._device),
            mtp=self._mtp() if config.has_mtp else None,
        )

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
            feed_forward=self._moe(prefix) if is_moe else self._mlp(prefix + "mlp."),
        )

    def _attention(self, prefix: str) -> GatedAttention:
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        # stored with each head's query followed by its gate
        query_gate = self._read(prefix + "q_proj.weight").unflatten(0, (heads, 2, HEAD_DIM))
        query, gate = (part.flatten(0, 1) for part in query_gate.unbind(1))
        key, value = (self._read(prefix + name) for name in ("k_proj.weight", "v_proj.weight"))
        factors = [
            self._norm(prefix + name).weight.expand(count, -1)
            for name, count in (("q_norm.weight", heads), ("k_norm.weight", kv_heads))
        ]
        return GatedAttention(
            projection=linear(torch.cat([query, key, value, gate]).to(self._device)),
            norm=RMSNorm(torch.cat(factors), self._config.rms_norm_eps),
            output=self._linear(prefix + "o_proj"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
        )

    def _delta(self, prefix: str) -> GatedDeltaNet:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
        return GatedDeltaNet(
            projection=self._linear(*(prefix + name for name in names)),
            conv=self._wide(prefix + "conv1d.weight").squeeze(1),
            decay=-self._wide(prefix + "A_log").exp(),
            dt_bias=self._wide(prefix + "dt_bias"),
            norm=GatedRMSNorm(self._wide(prefix + "norm.weight"), self._config.rms_norm_eps),
            output=self._linear(prefix + "out_proj"),
            key_heads=self._config.linear_num_key_heads,
            value_heads=self._config.linear_num_value_heads,
            key_dim=GDN_HEAD_DIM,
            value_dim=GDN_HEAD_DIM,
        )

    def _moe(self, prefix: str) -> SparseMoe:
        ffn = self._config.feed_forward
        gate_up, down = self._experts(prefix, ffn)
        return SparseMoe(
            router=self._linear(prefix + "mlp.gate", prefix + "mlp.shared_expert_gate"),
            gate_up=gate_up,
            down=down,
            shared_gate_up=self._linear(*(f"{prefix}mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj"))),
            shared_down=self._linear(prefix + "mlp.shared_expert.down_proj"),
            num_chosen=ffn.num_experts_per_tok,
        )

    def _experts(self, prefix: str, ffn: MoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
        if prefix + FUSED_GATE_UP in self._checkpoint:
            return tuple(self._read(prefix + name).to(self._device) for name in (FUSED_GATE_UP, FUSED_DOWN))
        width, hidden, count = ffn.moe_intermediate_size, self._config.hidden_size, ffn.num_experts
        gate_up = torch.empty(count, 2 * width, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(count, hidden, width, dtype=self._dtype, device=self._device)
        for e in range(count):
            expert = f"{prefix}mlp.experts.{e}."
            gate_up[e, :width] = self._read(expert + "gate_proj.weight")
            gate_up[e, width:] = self._read(expert + "up_proj.weight")
            down[e] = self._read(expert + "down_proj.weight")
        return gate_up, down

    def _mlp(self, prefix: str) -> Mlp:
        return Mlp(self._linear(prefix + "gate_proj", prefix + "up_proj"), self._linear(prefix + "down_proj"))

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(1 + self._wide(name), self._config.rms_norm_eps)

    def _linear(self, *names: str) -> Linear:
        return linear(torch.cat([self._read(name + ".weight") for name in names]).to(self._device))

    def _wide(self, name: str) -> torch.Tensor:
        return self._checkpoint.read(name, torch.float32).to(self._device)

    def _read(self, name: str) -> torch.Tensor:
        return self._checkpoint.read(name, self._dtype)
