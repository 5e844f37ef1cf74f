"""An artifact's tensors as the decoder's layers have them."""

from dataclasses import dataclass

import torch

from engine.errors import CheckpointError
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, linear
from engine.layers.mlp import Mlp
from engine.layers.moe import SparseMoe
from engine.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedMlp, QuantizedMoe
from engine.models.artifact import Artifact
from engine.models.assemble import assemble
from engine.models.config import MoeConfig
from engine.models.host_weights import in_host_memory
from engine.models.qwen3_5 import Qwen3_5, rope_of
from engine.ops.quantized_experts import QuantizedExperts
from engine.ops.quantized_weight import QuantizedWeight, stack_rows


def build_model(
    artifact: Artifact,
    device: torch.device,
    dtype: torch.dtype,
    is_stretched: bool = False,
    drafts: bool = True,
) -> Qwen3_5:
    """Over an artifact that is open on that device.  dtype  of activations and of what the recipe left unrounded"""
    config = artifact.config if drafts else artifact.config.without_mtp()
    return assemble(ArtifactWeights(artifact, device, dtype), config, rope_of(config, is_stretched, device))


@dataclass(frozen=True, slots=True)
class ArtifactWeights:
    """Each matrix as it is stored where that is rounded, in dtype where not."""

    artifact: Artifact
    device: torch.device
    dtype: torch.dtype

    def embedding(self) -> Embedding | QuantizedEmbedding:
        table = self._read("embed_tokens")
        is_quantized = isinstance(table, QuantizedWeight)
        table = table if is_quantized else table.to(self.dtype)
        if table.device.type != self.device.type:
            table = in_host_memory(table)
        return QuantizedEmbedding(table, self.dtype) if is_quantized else Embedding(table)

    def head(self, tied: Embedding | QuantizedEmbedding | None) -> Linear | QuantizedLinear:
        return self.matrix("embed_tokens" if tied else "lm_head", dtype=torch.float32)

    def wide(self, name: str) -> torch.Tensor:
        return self._read(name)

    def matrix(self, *names: str, dtype: torch.dtype | None = None) -> Linear | QuantizedLinear:
        """Several stand one above the other.  dtype  of a rounded one's products, that of their rows when not given"""
        parts = [self._read(name) for name in names]
        if isinstance(parts[0], QuantizedWeight):
            return QuantizedLinear(tuple(stack_rows(parts)), dtype)
        return linear(torch.cat(parts).to(self.dtype))

    def attention_projection(self, layer: str) -> Linear | QuantizedLinear:
        return self.matrix(layer + "self_attn.projection")

    def delta_projection(self, layer: str) -> Linear | QuantizedLinear:
        return self.matrix(layer + "linear_attn.in_proj", layer + "linear_attn.in_proj_gates")

    def mlp(self, layer: str) -> Mlp | QuantizedMlp:
        gate_up, down = (self._read(f"{layer}mlp.{name}") for name in ("gate_up", "down"))
        if isinstance(gate_up, QuantizedWeight):
            return QuantizedMlp(gate_up, down)
        return Mlp(linear(gate_up.to(self.dtype)), linear(down.to(self.dtype)))

    def moe(self, layer: str, ffn: MoeConfig) -> SparseMoe | QuantizedMoe:
        names = ("experts.gate_up", "experts.down", "shared_expert.gate_up", "shared_expert.down")
        parts = [self._read(f"{layer}mlp.{name}") for name in names]
        router = self.matrix(layer + "mlp.router")
        if isinstance(parts[0], QuantizedWeight):
            return QuantizedMoe(router, QuantizedExperts(*parts), ffn.num_experts_per_tok)
        gate_up, down, *shared = (part.to(self.dtype) for part in parts)
        return SparseMoe(router, gate_up, down, *map(linear, shared), ffn.num_experts_per_tok)

    def _read(self, name: str) -> torch.Tensor | QuantizedWeight:
        if name not in self.artifact:
            raise CheckpointError(f"tensor {name} is missing from the artifact: convert the checkpoint again")
        return self.artifact.read(name)
