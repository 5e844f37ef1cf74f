"""What an artifact holds: which stored tensors each of its own is made of, and in which file it goes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.convert.recipes import Role
from engine.models.config import HEAD_DIM, ModelConfig, MoeConfig
from engine.models.layout import FUSED_DOWN, FUSED_GATE_UP, Shapes

Arrange = Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the artifact: arrange(sources)."""

    name: str
    role: Role
    sources: tuple[str, ...]
    arrange: Arrange


@dataclass(frozen=True, slots=True)
class Unit:
    """The tensors of one file; memory holds one unit at a time."""

    name: str
    parts: tuple[Part, ...]

    @property
    def file(self) -> str:
        return f"{self.name}.safetensors"

    @property
    def sources(self) -> set[str]:
        return {source for part in self.parts for source in part.sources}


def plan(config: ModelConfig, shapes: Shapes) -> list[Unit]:
    """shapes  what the checkpoint stores: experts fused or one by one"""
    units = [Unit("embedding", (_matrix("embed_tokens", "embedding"),))]
    for i, layer_type in enumerate(config.layer_types):
        parts = _layer(f"layers.{i}.", config, shapes, layer_type == "full_attention")
        units.append(Unit(f"layer-{i:03d}", tuple(parts)))
    head = [_plain("norm.weight")] + ([] if config.tie_word_embeddings else [_matrix("lm_head", "head")])
    units.append(Unit("head", tuple(head)))
    if config.has_mtp:
        units.append(Unit("mtp", tuple(_mtp(config, shapes))))
    return units


def _layer(prefix: str, config: ModelConfig, shapes: Shapes, is_attention: bool) -> list[Part]:
    norms = [_plain(prefix + f"{name}.weight") for name in ("input_layernorm", "post_attention_layernorm")]
    mixer = _attention(prefix + "self_attn.", config) if is_attention else _gated_delta_net(prefix + "linear_attn.")
    return norms + mixer + _feed_forward(prefix, config, shapes)


def _attention(prefix: str, config: ModelConfig) -> list[Part]:
    sources = tuple(f"{prefix}{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))
    return [
        Part(prefix + "projection", "attention", sources, _QueryKeyValueGate(config.num_attention_heads)),
        _matrix(prefix + "o_proj", "attention"),
        _plain(prefix + "q_norm.weight"),
        _plain(prefix + "k_norm.weight"),
    ]


def _gated_delta_net(prefix: str) -> list[Part]:
    plain = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
    return [
        _stacked(prefix + "in_proj", "gdn", prefix + "in_proj_qkv", prefix + "in_proj_z"),
        _stacked(prefix + "in_proj_gates", "gdn_gates", prefix + "in_proj_a", prefix + "in_proj_b"),
        _matrix(prefix + "out_proj", "gdn"),
        *(_plain(prefix + name) for name in plain),
    ]


def _feed_forward(prefix: str, config: ModelConfig, shapes: Shapes) -> list[Part]:
    if not isinstance(config.feed_forward, MoeConfig):
        return _swiglu(prefix + "mlp.", "mlp")
    router = _stacked(prefix + "mlp.router", "router", prefix + "mlp.gate", prefix + "mlp.shared_expert_gate")
    experts = _experts(prefix, config.feed_forward, prefix + FUSED_GATE_UP in shapes)
    return [router, *experts, *_swiglu(prefix + "mlp.shared_expert.", "shared_expert")]


def _experts(prefix: str, ffn: MoeConfig, is_fused: bool) -> list[Part]:
    gate_up, down = prefix + "mlp.experts.gate_up", prefix + "mlp.experts.down"
    if is_fused:
        sources = (prefix + FUSED_GATE_UP,), (prefix + FUSED_DOWN,)
    else:
        experts = [f"{prefix}mlp.experts.{e}." for e in range(ffn.num_experts)]
        gates = tuple(e + name for e in experts for name in ("gate_proj.weight", "up_proj.weight"))
        sources = gates, tuple(e + "down_proj.weight" for e in experts)
    return [
        Part(gate_up, "experts", sources[0], _one if is_fused else _stack_of_pairs),
        Part(down, "experts", sources[1], _one if is_fused else torch.stack),
    ]


def _swiglu(prefix: str, role: Role) -> list[Part]:
    return [
        _stacked(prefix + "gate_up", role, prefix + "gate_proj", prefix + "up_proj"),
        _stacked(prefix + "down", role, prefix + "down_proj"),
    ]


def _mtp(config: ModelConfig, shapes: Shapes) -> list[Part]:
    norms = [_plain(f"mtp.{name}.weight") for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    return [_matrix("mtp.fc", "mtp"), *norms, *_layer("mtp.layers.0.", config, shapes, is_attention=True)]


def _plain(name: str) -> Part:
    return Part(name, "plain", (name,), _one)


def _matrix(name: str, role: Role) -> Part:
    return _stacked(name, role, name)


def _stacked(name: str, role: Role, *sources: str) -> Part:
    """Matrices that read the same input, one above the other."""
    arrange = torch.cat if len(sources) > 1 else _one
    return Part(name, role, tuple(f"{source}.weight" for source in sources), arrange)


def _one(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def _stack_of_pairs(tensors: list[torch.Tensor]) -> torch.Tensor:
    """gate, up, gate, up, ... -> [experts, 2 * width, hidden]"""
    return torch.stack(tensors).unflatten(0, (-1, 2)).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class _QueryKeyValueGate:
    """The stored query has each head's gate behind it; the gates go below the values."""

    heads: int

    def __call__(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        query_gate, key, value = tensors
        query, gate = (part.flatten(0, 1) for part in query_gate.unflatten(0, (self.heads, 2, HEAD_DIM)).unbind(1))
        return torch.cat([query, key, value, gate])
