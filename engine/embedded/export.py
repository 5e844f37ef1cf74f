"""Writes and reads the checkpoint in the family's Hugging Face FP8 form."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from engine.embedded.geometry import Geometry, checkpoint_config
from engine.embedded.train_model import dequantise, is_quantised, quantise

# name in the training model -> name in a decoder layer of the checkpoint
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "router": "mlp.gate.weight",
    "shared_gate": "mlp.shared_expert_gate.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "qkv": "linear_attn.in_proj_qkv.weight",
    "z": "linear_attn.in_proj_z.weight",
    "a": "linear_attn.in_proj_a.weight",
    "b": "linear_attn.in_proj_b.weight",
    "conv": "linear_attn.conv1d.weight",
    "A_log": "linear_attn.A_log",
    "dt_bias": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
    "out": "linear_attn.out_proj.weight",
}
TOP_NAMES = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "norm": "model.norm.weight",
    "mtp.fc": "mtp.fc.weight",
    "mtp.norm_embedding": "mtp.pre_fc_norm_embedding.weight",
    "mtp.norm_hidden": "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm": "mtp.norm.weight",
}
EXPERT_PARTS = ("gate", "up", "down")


def checkpoint_tensors(parameters: dict[str, torch.Tensor], geometry: Geometry) -> dict[str, torch.Tensor]:
    """Training parameters under the checkpoint's names: one tensor per expert, all fp32."""
    tensors = {}
    for name, value in parameters.items():
        prefix, part = checkpoint_prefix(name)
        if name in TOP_NAMES:
            tensors[TOP_NAMES[name]] = value
        elif part in EXPERT_PARTS:
            tensors |= split_experts(f"{prefix}.mlp", part, value, geometry)
        else:
            tensors[f"{prefix}.{LAYER_NAMES[part]}"] = value.unsqueeze(1) if part == "conv" else value
    return tensors


def checkpoint_prefix(name: str) -> tuple[str, str]:
    prefix, _, part = name.rpartition(".")
    return ("mtp.layers.0" if prefix == "mtp.layer" else f"model.{prefix}"), part


def split_experts(prefix: str, part: str, value: torch.Tensor, geometry: Geometry) -> dict[str, torch.Tensor]:
    pieces = value.split(geometry.expert_width, dim=1 if part == "down" else 0)
    owners = [f"experts.{expert}" for expert in range(geometry.experts)] + ["shared_expert"]
    return {f"{prefix}.{owner}.{part}_proj.weight": piece for owner, piece in zip(owners, pieces, strict=True)}


def quantised_tensors(parameters: dict[str, torch.Tensor], geometry: Geometry) -> dict[str, torch.Tensor]:
    """As stored: e4m3 with `weight_scale_inv` where the family has it, bf16 for everything else, fp32 for A_log."""
    eight_bit = set(checkpoint_tensors(only_quantised(parameters), geometry))
    stored = {}
    for name, value in checkpoint_tensors(parameters, geometry).items():
        value = value.detach().cpu().contiguous()
        if name in eight_bit:
            stored[name], stored[f"{name}_scale_inv"] = quantise(value)
        else:
            stored[name] = value if name.endswith("A_log") else value.to(torch.bfloat16)
    return stored


def only_quantised(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in parameters.items() if is_quantised(name, value)}


def save_checkpoint(parameters: dict[str, torch.Tensor], geometry: Geometry, directory: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors beside the tokenizer already there."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    eos, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = checkpoint_config(geometry, eos, pad, is_quantised=True)
    write_json(directory / "config.json", config)
    sampling = {"do_sample": True, "eos_token_id": [eos, pad], "pad_token_id": pad, "temperature": 0.6, "top_p": 0.95}
    write_json(directory / "generation_config.json", sampling)
    save_file(quantised_tensors(parameters, geometry), directory / "model.safetensors", metadata={"format": "pt"})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """All weights of a saved checkpoint in fp32, under the checkpoint's names."""
    stored = load_file(directory / "model.safetensors")
    return {
        name: dequantise(value, stored[f"{name}_scale_inv"]) if f"{name}_scale_inv" in stored else value.float()
        for name, value in stored.items()
        if not name.endswith("_scale_inv")
    }


def load_parameters(directory: Path) -> tuple[Geometry, dict[str, torch.Tensor]]:
    """A saved checkpoint as training parameters."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_tensors(directory)
    geometry = read_geometry(config)
    parameters = {name: tensors[stored] for name, stored in TOP_NAMES.items()}
    for prefix in [*(f"layers.{layer}" for layer in range(geometry.layers)), "mtp.layer"]:
        parameters |= load_layer(tensors, geometry, prefix)
    return geometry, parameters


def load_layer(tensors, geometry, prefix) -> dict[str, torch.Tensor]:
    stored_prefix = checkpoint_prefix(f"{prefix}.q")[0]
    parameters = {}
    for part, stored in LAYER_NAMES.items():
        if f"{stored_prefix}.{stored}" in tensors:
            value = tensors[f"{stored_prefix}.{stored}"]
            parameters[f"{prefix}.{part}"] = value.squeeze(1) if part == "conv" else value
    for part in EXPERT_PARTS:
        owners = [f"experts.{expert}" for expert in range(geometry.experts)] + ["shared_expert"]
        pieces = [tensors[f"{stored_prefix}.mlp.{owner}.{part}_proj.weight"] for owner in owners]
        parameters[f"{prefix}.{part}"] = torch.cat(pieces, dim=1 if part == "down" else 0)
    return parameters


def read_geometry(config: dict) -> Geometry:
    return Geometry(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rotary=int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        delta_key_heads=config["linear_num_key_heads"],
        delta_value_heads=config["linear_num_value_heads"],
        delta_head_dim=config["linear_key_head_dim"],
        experts=config["num_experts"],
        experts_chosen=config["num_experts_per_tok"],
        expert_width=config["moe_intermediate_size"],
        rope_theta=config["rope_parameters"]["rope_theta"],
    )
