"""Small random checkpoints of the family, written as other programs write them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

MOE = "qwen3_5_moe"
DENSE = "qwen3_5"
PROFILES = (MOE, DENSE)

Tensors = dict[str, torch.Tensor]

# the four forms in which such checkpoints are stored
FORMS = ("experts", "fused", "language_model.experts", "language_model.fused")


@dataclass(frozen=True)
class Geometry:
    """The real head geometry, few layers, little width; `value_heads` per key head as in the two profiles."""

    hidden_size: int = 64
    num_layers: int = 4
    vocab_size: int = 320
    heads: int = 4
    kv_heads: int = 2
    key_heads: int = 2
    num_experts: int = 8
    experts_per_token: int = 3
    width: int = 48
    max_position_embeddings: int = 4096

    def text_config(self, profile: str) -> dict:
        """The fields of config.json, as transformers' text configuration takes them."""
        common = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": 256,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.key_heads * (2 if profile == MOE else 3),
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        }
        return common | (self._moe() if profile == MOE else {"intermediate_size": 2 * self.width})

    def _moe(self) -> dict:
        return {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.width,
            "shared_expert_intermediate_size": self.width,
        }


def oracle_model(profile: str, geometry: Geometry, seed: int = 0, **changes):
    """The model of transformers, with random weights under which every part of the decoder matters."""
    import transformers

    names = {MOE: "Qwen3_5Moe", DENSE: "Qwen3_5"}
    config = getattr(transformers, names[profile] + "TextConfig")(**(geometry.text_config(profile) | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, names[profile] + "ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _disturb(name, parameter)
    return model


def _disturb(name: str, parameter: torch.Tensor) -> None:
    """Norms away from their neutral weight; matrices so large that a layer moves the residual stream."""
    if "norm" in name:
        parameter.add_(torch.randn_like(parameter) * 0.3)
    elif name.endswith("dt_bias"):
        parameter.add_(torch.randn_like(parameter))
    elif "conv1d" in name:
        parameter.normal_(std=0.5)
    elif parameter.dim() >= 2 and "embed" not in name:
        parameter.normal_(std=parameter.shape[-1] ** -0.5)
    elif "embed" in name:
        parameter.normal_()


def mtp_tensors(profile: str, geometry: Geometry, seed: int = 1) -> Tensors:
    """mtp.* of the same geometry: the tensors of a full-attention layer of another random model, and its own four."""
    layer = f"model.layers.{geometry.num_layers - 1}."
    donor = oracle_model(profile, geometry, seed).state_dict()
    tensors = {"mtp.layers.0." + name.removeprefix(layer): t for name, t in donor.items() if name.startswith(layer)}
    generator = torch.Generator().manual_seed(seed)
    hidden = geometry.hidden_size
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = torch.randn(hidden, generator=generator) * 0.3
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * (2 * hidden) ** -0.5
    return tensors


def write_checkpoint(
    directory: Path,
    profile: str,
    geometry: Geometry,
    form: str = "experts",
    with_mtp: bool = True,
    seed: int = 0,
    fp8: bool = False,
    edit: Callable[[Tensors], Tensors] | None = None,
) -> Path:
    """A directory as `save_pretrained` makes it, in shards with an index, plus mtp.*; returns the directory.

    form  one of FORMS
    fp8   the official 8-bit form; experts one by one only
    edit  what is done to the tensors, under their `model.` names, before they are written
    """
    is_fused = form.endswith("fused")
    tensors, config = saved(directory, profile, geometry, seed, is_fused)
    if with_mtp:
        tensors |= unfused(mtp_tensors(profile, geometry), is_fused)
        config["mtp_num_hidden_layers"] = 1
    if edit is not None:
        tensors = edit(tensors)
    if fp8:
        tensors = in_eight_bits(tensors)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if form.startswith("language_model"):
        tensors = {prefixed(name): tensor for name, tensor in tensors.items()}
        config = nested(config, profile)
    write_shards(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def transparent(tensors: Tensors) -> Tensors:
    """A decoder that adds nothing to the embedding, and fc = [I | 0]: MTP alone predicts what the target predicts."""
    silent = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
    edited = {name: torch.zeros_like(t) if name.endswith(silent) else t for name, t in tensors.items()}
    hidden = len(tensors["mtp.fc.weight"])
    edited["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    edited["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
    edited["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    return edited


def in_eight_bits(tensors: Tensors) -> Tensors:
    """Projections of layers as the official FP8 checkpoints store them; everything else as it is."""
    plain = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "shared_expert_gate.weight", "norm.weight")
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2 and not name.endswith(plain):
            stored[name], stored[name + "_scale_inv"] = quantised(tensor)
        else:
            stored[name] = tensor
    return stored


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8-bit floats and one fp32 scale per 128 x 128 block, such that weight = float * scale."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    floats = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return floats.flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous(), scale


def saved(directory: Path, profile: str, geometry: Geometry, seed: int, fused: bool) -> tuple[Tensors, dict]:
    """Tensors and config.json of transformers' own `save_pretrained`."""
    oracle_model(profile, geometry, seed).save_pretrained(directory, save_original_format=not fused)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    return tensors, json.loads((directory / "config.json").read_text())


def unfused(tensors: Tensors, fused: bool) -> Tensors:
    """Experts one by one, unless they are to stay fused."""
    single: Tensors = {}
    for name, tensor in tensors.items():
        if fused or ".experts." not in name:
            single[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for e, expert in enumerate(tensor):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            single |= {f"{prefix}.{e}.{n}.weight": part.contiguous() for n, part in zip(names, parts, strict=True)}
    return single


def prefixed(name: str) -> str:
    return "model.language_" + name if name.startswith("model.") else name


def nested(config: dict, profile: str) -> dict:
    """The published form of config.json: the text model beside a vision model."""
    outer = {"model_type": profile, "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": False}
    return outer | {"text_config": config, "vision_config": {"depth": 27, "hidden_size": 1152}}


def write_shards(directory: Path, tensors: Tensors, num_shards: int = 3) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = {name: f"model-{i % num_shards + 1:05d}-of-{num_shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        shard = {name: tensors[name].contiguous() for name in names if files[name] == file}
        save_file(shard, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
