"""The shape of the small checkpoint, and its config.json."""

from dataclasses import dataclass

UNCONVERTED = ["lm_head", "model.embed_tokens", "mtp.fc"]
UNCONVERTED_IN_LAYER = ["linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate"]


@dataclass(frozen=True)
class Geometry:
    """MoE profile of the family; head sizes are the family's own, everything else is small."""

    vocab_size: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 256
    rotary: int = 64
    delta_key_heads: int = 2
    delta_value_heads: int = 4
    delta_head_dim: int = 128
    conv_width: int = 4
    experts: int = 8
    experts_chosen: int = 4
    expert_width: int = 128
    rope_theta: float = 1e7
    eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        return self.delta_key_heads * self.delta_head_dim

    @property
    def value_dim(self) -> int:
        return self.delta_value_heads * self.delta_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    def has_full_attention(self, layer: int) -> bool:
        return (layer + 1) % 4 == 0


def checkpoint_config(geometry: Geometry, eos_id: int, pad_id: int, is_quantised: bool) -> dict:
    """config.json of the text model, in the form transformers writes for Qwen3_5MoeForCausalLM."""
    config = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": eos_id,
        "full_attention_interval": 4,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden,
        "initializer_range": 0.02,
        "layer_types": [
            "full_attention" if geometry.has_full_attention(layer) else "linear_attention"
            for layer in range(geometry.layers)
        ],
        "linear_conv_kernel_dim": geometry.conv_width,
        "linear_key_head_dim": geometry.delta_head_dim,
        "linear_num_key_heads": geometry.delta_key_heads,
        "linear_num_value_heads": geometry.delta_value_heads,
        "linear_value_head_dim": geometry.delta_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": geometry.expert_width,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": geometry.heads,
        "num_experts": geometry.experts,
        "num_experts_per_tok": geometry.experts_chosen,
        "num_hidden_layers": geometry.layers,
        "num_key_value_heads": geometry.kv_heads,
        "output_router_logits": False,
        "pad_token_id": pad_id,
        "rms_norm_eps": geometry.eps,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": geometry.rotary / geometry.head_dim,
            "rope_theta": geometry.rope_theta,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": geometry.expert_width,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": geometry.vocab_size,
    }
    if is_quantised:
        config["quantization_config"] = quantisation_config(geometry)
    return config


def quantisation_config(geometry: Geometry) -> dict:
    prefixes = [f"model.layers.{layer}" for layer in range(geometry.layers)] + ["mtp.layers.0"]
    skipped = UNCONVERTED + [
        f"{prefix}.{name}"
        for layer, prefix in enumerate(prefixes)
        for name in [*UNCONVERTED_IN_LAYER, "mlp.shared_expert_gate"]
        if not name.startswith("linear_attn") or not (prefix.startswith("mtp") or geometry.has_full_attention(layer))
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": skipped,
    }
