"""Which tensors a checkpoint holds, by the names that all its stored forms are brought to."""

from collections.abc import Collection

from engine.models.config import (
    CONV_WIDTH,
    GDN_HEAD_DIM,
    HEAD_DIM,
    ModelConfig,
    MoeConfig,
)

Shapes = dict[str, tuple[int, ...]]

FUSED_GATE_UP = "mlp.experts.gate_up_proj"
FUSED_DOWN = "mlp.experts.down_proj"


def tensor_shapes(config: ModelConfig, stored: Collection[str] = ()) -> Shapes:
    """Name without the prefix of the text model -> shape.

    stored  the names that a checkpoint has; the experts of a layer are one by one unless it has them fused
    """
    shapes: Shapes = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i, layer_type in enumerate(config.layer_types):
        shapes |= _layer(f"layers.{i}.", config, stored, layer_type == "full_attention")
    return shapes | (_mtp(config, stored) if config.has_mtp else {})


def _layer(prefix: str, config: ModelConfig, stored: Collection[str], is_attention: bool) -> Shapes:
    mixer = _attention(config) if is_attention else _gated_delta_net(config)
    norms = {f"{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}
    is_fused = f"{prefix}{FUSED_GATE_UP}" in stored
    parts = norms | mixer | _feed_forward(config, is_fused)
    return {prefix + name: shape for name, shape in parts.items()}


def _attention(config: ModelConfig) -> Shapes:
    width, kv_width = config.num_attention_heads * HEAD_DIM, config.num_key_value_heads * HEAD_DIM
    return {
        "self_attn.q_proj.weight": (2 * width, config.hidden_size),
        "self_attn.k_proj.weight": (kv_width, config.hidden_size),
        "self_attn.v_proj.weight": (kv_width, config.hidden_size),
        "self_attn.o_proj.weight": (config.hidden_size, width),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
    }


def _gated_delta_net(config: ModelConfig) -> Shapes:
    heads, hidden = config.linear_num_value_heads, config.hidden_size
    return {
        "linear_attn.in_proj_qkv.weight": (config.gdn_channels, hidden),
        "linear_attn.in_proj_z.weight": (heads * GDN_HEAD_DIM, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (config.gdn_channels, 1, CONV_WIDTH),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (GDN_HEAD_DIM,),
        "linear_attn.out_proj.weight": (hidden, heads * GDN_HEAD_DIM),
    }


def _feed_forward(config: ModelConfig, is_fused: bool) -> Shapes:
    ffn, hidden = config.feed_forward, config.hidden_size
    if not isinstance(ffn, MoeConfig):
        return _mlp("mlp.", ffn.intermediate_size, hidden)
    shapes: Shapes = {"mlp.gate.weight": (ffn.num_experts, hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    shapes |= _mlp("mlp.shared_expert.", ffn.shared_expert_intermediate_size, hidden)
    return shapes | (_fused_experts(ffn, hidden) if is_fused else _single_experts(ffn, hidden))


def _fused_experts(ffn: MoeConfig, hidden: int) -> Shapes:
    width = ffn.moe_intermediate_size
    return {
        FUSED_GATE_UP: (ffn.num_experts, 2 * width, hidden),
        FUSED_DOWN: (ffn.num_experts, hidden, width),
    }


def _single_experts(ffn: MoeConfig, hidden: int) -> Shapes:
    shapes: Shapes = {}
    for e in range(ffn.num_experts):
        shapes |= _mlp(f"mlp.experts.{e}.", ffn.moe_intermediate_size, hidden)
    return shapes


def _mlp(prefix: str, width: int, hidden: int) -> Shapes:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


def _mtp(config: ModelConfig, stored: Collection[str]) -> Shapes:
    hidden = config.hidden_size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: Shapes = {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in norms}
    return shapes | _layer("mtp.layers.0.", config, stored, is_attention=True)
