"""A checkpoint's tensors as the decoder's layers have them."""

from dataclasses import dataclass

import torch

from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, linear
from engine.layers.mlp import Mlp
from engine.layers.moe import SparseMoe
from engine.models.assemble import assemble
from engine.models.checkpoint import Checkpoint
from engine.models.config import HEAD_DIM, ModelConfig, MoeConfig
from engine.models.host_weights import in_host_memory
from engine.models.layout import FUSED_DOWN, FUSED_GATE_UP
from engine.models.qwen3_5 import Qwen3_5, rope_of


def build_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool = False,
    is_embedding_on_host: bool = False,
) -> Qwen3_5:
    """Over a checkpoint that is open.  config  the checkpoint's, or the same without MTP"""
    assert not (is_embedding_on_host and config.tie_word_embeddings)
    weights = CheckpointWeights(checkpoint, config, device, dtype, is_embedding_on_host)
    return assemble(weights, config, rope_of(config, is_stretched, device))


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """Every matrix in dtype, whatever its file has."""

    checkpoint: Checkpoint
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    is_embedding_on_host: bool

    def embedding(self) -> Embedding:
        table = self._read("embed_tokens.weight")
        return Embedding(in_host_memory(table) if self.is_embedding_on_host else table.to(self.device))

    def head(self, tied: Embedding | None) -> Linear:
        return linear(tied.weight) if tied else self.matrix("lm_head")

    def wide(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name, torch.float32).to(self.device)

    def matrix(self, *names: str) -> Linear:
        """Several stand one above the other."""
        return linear(torch.cat([self._read(name + ".weight") for name in names]).to(self.device))

    def attention_projection(self, layer: str) -> Linear:
        query_gate, key, value = (self._read(f"{layer}self_attn.{name}_proj.weight") for name in "qkv")
        # stored with each head's query followed by its gate
        by_head = query_gate.unflatten(0, (self.config.num_attention_heads, 2, HEAD_DIM))
        query, gate = (part.flatten(0, 1) for part in by_head.unbind(1))
        return linear(torch.cat([query, key, value, gate]).to(self.device))

    def delta_projection(self, layer: str) -> Linear:
        return self.matrix(*(f"{layer}linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b")))

    def mlp(self, layer: str) -> Mlp:
        return Mlp(*self._swiglu(layer + "mlp."))

    def moe(self, layer: str, ffn: MoeConfig) -> SparseMoe:
        router = self.matrix(layer + "mlp.gate", layer + "mlp.shared_expert_gate")
        shared = self._swiglu(layer + "mlp.shared_expert.")
        return SparseMoe(router, *self._experts(layer, ffn), *shared, ffn.num_experts_per_tok)

    def _swiglu(self, prefix: str) -> tuple[Linear, Linear]:
        return self.matrix(prefix + "gate_proj", prefix + "up_proj"), self.matrix(prefix + "down_proj")

    def _experts(self, layer: str, ffn: MoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
        if layer + FUSED_GATE_UP in self.checkpoint:
            return tuple(self._read(layer + name).to(self.device) for name in (FUSED_GATE_UP, FUSED_DOWN))
        width, hidden, count = ffn.moe_intermediate_size, self.config.hidden_size, ffn.num_experts
        gate_up = torch.empty(count, 2 * width, hidden, dtype=self.dtype, device=self.device)
        down = torch.empty(count, hidden, width, dtype=self.dtype, device=self.device)
        for e in range(count):
            expert = f"{layer}mlp.experts.{e}."
            gate_up[e, :width] = self._read(expert + "gate_proj.weight")
            gate_up[e, width:] = self._read(expert + "up_proj.weight")
            down[e] = self._read(expert + "down_proj.weight")
        return gate_up, down

    def _read(self, name: str) -> torch.Tensor:
        return self.checkpoint.read(name, self.dtype)
