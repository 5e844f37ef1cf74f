"""What a checkpoint of the family is made of: config.json parsed, checked and in one spelling."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from engine.errors import CheckpointError

SUPPORTED = (
    "Qwen3.6-35B-A3B, Qwen3.6-27B, Qwen3.8-27B, and other sizes of the same two architectures "
    "(model_type qwen3_5_moe and qwen3_5)"
)
FULL_ATTENTION_INTERVAL = 4
HEAD_DIM = 256
ROTATED_DIMS = 64
GDN_HEAD_DIM = 128
CONV_WIDTH = 4
FP8_BLOCK = 128
# how far the published checkpoints document that their positions may be stretched
YARN_FACTOR = 4
YARN_LIMIT = 1_010_000

LayerType = Literal["linear_attention", "full_attention"]

# vocabulary rows of the published checkpoints -> ids that stand for a token; the rest is padding
_PUBLISHED_IDS = {248_320: 248_077}
_IS_MOE = {"qwen3_5_moe": True, "qwen3_5_moe_text": True, "qwen3_5": False, "qwen3_5_text": False}


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One SwiGLU in every layer."""

    intermediate_size: int


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts and a shared one in every layer; widths are of one expert."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry of one checkpoint. The fields have the names that config.json has for them.

    num_ids         token ids below this stand for a token; vocab_size counts rows of the embedding
    is_fp8          matrices may be stored as 8-bit floats with a scale per 128 x 128 block
    """

    vocab_size: int
    num_ids: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    feed_forward: DenseConfig | MoeConfig
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    mtp_num_hidden_layers: int
    tie_word_embeddings: bool
    is_fp8: bool = False

    @property
    def has_mtp(self) -> bool:
        return self.mtp_num_hidden_layers > 0

    def without_mtp(self) -> "ModelConfig":
        """The same for an engine that makes no drafts: nothing of MTP is loaded, and it has no keys and values."""
        return replace(self, mtp_num_hidden_layers=0)

    @property
    def head_dim(self) -> int:
        return HEAD_DIM

    @property
    def layer_types(self) -> tuple[LayerType, ...]:
        return layer_pattern(self.num_hidden_layers)

    @property
    def num_attention_layers(self) -> int:
        """Full-attention layers of the decoder, without MTP's."""
        return self.num_hidden_layers // FULL_ATTENTION_INTERVAL

    @property
    def num_kv_layers(self) -> int:
        """Layers that keep keys and values, MTP's included."""
        return self.num_attention_layers + self.mtp_num_hidden_layers

    @property
    def num_gdn_layers(self) -> int:
        return self.num_hidden_layers - self.num_attention_layers

    @property
    def gdn_channels(self) -> int:
        """Width of query|key|value of Gated DeltaNet, which passes the convolution."""
        return (2 * self.linear_num_key_heads + self.linear_num_value_heads) * GDN_HEAD_DIM


PROFILES = {
    "Qwen3.6-35B-A3B": ModelConfig(
        vocab_size=248_320,
        num_ids=248_077,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        feed_forward=MoeConfig(
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        max_position_embeddings=262_144,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        mtp_num_hidden_layers=1,
        tie_word_embeddings=False,
    ),
    "Qwen3.6-27B and Qwen3.8-27B": ModelConfig(
        vocab_size=248_320,
        num_ids=248_077,
        hidden_size=5120,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        feed_forward=DenseConfig(intermediate_size=17_408),
        max_position_embeddings=262_144,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        mtp_num_hidden_layers=1,
        tie_word_embeddings=False,
    ),
}


def layer_pattern(num_hidden_layers: int) -> tuple[LayerType, ...]:
    return tuple(
        "linear_attention" if (i + 1) % FULL_ATTENTION_INTERVAL else "full_attention" for i in range(num_hidden_layers)
    )


def read_config(checkpoint_dir: Path) -> ModelConfig:
    """config.json of a checkpoint directory; token ids are counted in its tokenizer files where it has them.

    raises  CheckpointError naming the file or the field
    """
    config = read_json(checkpoint_dir / "config.json")
    return parse_config(config, _count_ids(checkpoint_dir))


def read_json(file: Path) -> dict[str, Any]:
    """raises  CheckpointError when there is no such file or it holds no JSON object"""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} is no checkpoint directory: {file.name} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    return content


def parse_config(config: Mapping[str, Any], num_ids: int | None = None) -> ModelConfig:
    """The content of config.json, flat or with a text_config, in any of the published spellings.

    num_ids  how many token ids the tokenizer has; the published number, or every row, when not known
    raises   CheckpointError naming the field
    """
    model_type = _supported("model_type", config.get("model_type"))
    fields = _Fields(config)
    _check_fixed(fields)
    _check_rope(fields)
    _check_layers(fields)
    parsed = ModelConfig(
        vocab_size=fields.count("vocab_size"),
        num_ids=_num_ids(fields.count("vocab_size"), num_ids),
        hidden_size=fields.count("hidden_size"),
        num_hidden_layers=fields.count("num_hidden_layers"),
        num_attention_heads=fields.count("num_attention_heads"),
        num_key_value_heads=fields.count("num_key_value_heads"),
        linear_num_key_heads=fields.count("linear_num_key_heads"),
        linear_num_value_heads=fields.count("linear_num_value_heads"),
        feed_forward=_moe(fields) if _IS_MOE[model_type] else DenseConfig(fields.count("intermediate_size")),
        max_position_embeddings=fields.count("max_position_embeddings"),
        rope_theta=fields.positive("rope_theta", fields.rope.get("rope_theta", fields.get("rope_theta"))),
        rms_norm_eps=fields.positive("rms_norm_eps", fields.get("rms_norm_eps")),
        mtp_num_hidden_layers=fields.count("mtp_num_hidden_layers", default=0, least=0),
        tie_word_embeddings=fields.is_tied(),
        is_fp8=_is_fp8(config.get("quantization_config") or fields.get("quantization_config")),
    )
    _check_multiples(parsed)
    return parsed


def _supported(field: str, model_type: Any) -> str:
    if not isinstance(model_type, str) or model_type not in _IS_MOE:
        raise CheckpointError(f"config.json: {field} {model_type!r} is not supported; supported are {SUPPORTED}")
    return model_type


class _Fields:
    """The text part of a config, wherever it stands."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config") or {}
        if not isinstance(text, Mapping):
            raise CheckpointError("config.json: text_config must be an object")
        if "model_type" in text:
            _supported("text_config.model_type", text["model_type"])
        self.outer = config
        self.text = text or config
        self.prefix = "text_config." if text else ""
        self.rope = self._object("rope_parameters") or self._object("rope_scaling") or {}

    def get(self, name: str, default: Any = None) -> Any:
        return self.text.get(name, default)

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(name, default)
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(name, f"is {value!r}; it must be an integer of at least {least}")
        return value

    def positive(self, name: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(name, f"is {value!r}; it must be a number above 0")
        return float(value)

    def is_tied(self) -> bool:
        value = self.outer.get("tie_word_embeddings", self.get("tie_word_embeddings", False))
        if not isinstance(value, bool):
            raise self.error("tie_word_embeddings", f"is {value!r}; it must be true or false")
        return value

    def error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self.prefix}{name} {what}")

    def _object(self, name: str) -> Mapping[str, Any] | None:
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, "must be an object")
        return value


def _check_fixed(fields: _Fields) -> None:
    """What is the same in every checkpoint of the family, and what the engine's formulas take for granted."""
    required = {
        "head_dim": HEAD_DIM,
        "linear_key_head_dim": GDN_HEAD_DIM,
        "linear_value_head_dim": GDN_HEAD_DIM,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "hidden_act": "silu",
    }
    optional = {
        "attention_bias": False,
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mtp_use_dedicated_embeddings": False,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    for name, expected in required.items():
        if fields.get(name) != expected:
            raise fields.error(name, f"is {fields.get(name)!r}; only {expected!r} is supported")
    for name, expected in optional.items():
        if fields.get(name, expected) != expected:
            raise fields.error(name, f"is {fields.get(name)!r}; only {expected!r} is supported")


def _check_rope(fields: _Fields) -> None:
    rope_type = fields.rope.get("rope_type", fields.rope.get("type", "default"))
    if rope_type == "yarn":
        raise fields.error("rope_parameters.rope_type", "is 'yarn'; set it to 'default', and the engine's yarn to true")
    if rope_type not in ("default", "mrope"):
        raise fields.error("rope_parameters.rope_type", f"is {rope_type!r}; only 'default' is supported")
    factor = fields.rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    if factor != ROTATED_DIMS / HEAD_DIM:
        raise fields.error("partial_rotary_factor", f"is {factor!r}; only {ROTATED_DIMS / HEAD_DIM} is supported")
    sections = fields.rope.get("mrope_section", [11, 11, 10])
    is_list = isinstance(sections, list) and all(isinstance(section, int) for section in sections)
    if not is_list or sum(sections) != ROTATED_DIMS // 2:
        raise fields.error("rope_parameters.mrope_section", f"is {sections!r}; it must add up to {ROTATED_DIMS // 2}")


def _check_layers(fields: _Fields) -> None:
    interval = fields.get("full_attention_interval", FULL_ATTENTION_INTERVAL)
    if interval != FULL_ATTENTION_INTERVAL:
        raise fields.error("full_attention_interval", f"is {interval!r}; only {FULL_ATTENTION_INTERVAL} is supported")
    num_layers = fields.count("num_hidden_layers", least=FULL_ATTENTION_INTERVAL)
    layer_types = fields.get("layer_types")
    if layer_types is not None and layer_types != list(layer_pattern(num_layers)):
        raise fields.error("layer_types", f"must name {num_layers} layers, every fourth one full_attention")


def _check_multiples(config: ModelConfig) -> None:
    for large, small in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(config, large) % getattr(config, small):
            raise CheckpointError(
                f"config.json: {large} {getattr(config, large)} is no multiple of {small} {getattr(config, small)}"
            )
    if config.mtp_num_hidden_layers > 1:
        raise CheckpointError(
            f"config.json: mtp_num_hidden_layers is {config.mtp_num_hidden_layers}; only 0 and 1 are supported"
        )


def _moe(fields: _Fields) -> MoeConfig:
    moe = MoeConfig(
        num_experts=fields.count("num_experts"),
        num_experts_per_tok=fields.count("num_experts_per_tok"),
        moe_intermediate_size=fields.count("moe_intermediate_size"),
        shared_expert_intermediate_size=fields.count("shared_expert_intermediate_size"),
    )
    if moe.num_experts_per_tok > moe.num_experts:
        raise fields.error("num_experts_per_tok", f"{moe.num_experts_per_tok} exceeds num_experts {moe.num_experts}")
    return moe


def _is_fp8(quantization: Any) -> bool:
    if quantization is None:
        return False
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") != "fp8":
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise CheckpointError(f"config.json: quantization_config.quant_method {method!r} is not supported; 'fp8' is")
    block = quantization.get("weight_block_size")
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise CheckpointError(
            f"config.json: quantization_config.weight_block_size is {block!r}; only [128, 128] is supported"
        )
    return True


def _num_ids(vocab_size: int, num_ids: int | None) -> int:
    if num_ids is None:
        return _PUBLISHED_IDS.get(vocab_size, vocab_size)
    if num_ids > vocab_size:
        raise CheckpointError(f"tokenizer.json has {num_ids} token ids, but vocab_size is {vocab_size}")
    return num_ids


def _count_ids(checkpoint_dir: Path) -> int | None:
    """One more than the largest id in the tokenizer files. Some added tokens stand in only one of the two."""
    if not (checkpoint_dir / "tokenizer.json").exists():
        return None
    tokenizer = read_json(checkpoint_dir / "tokenizer.json")
    settings = checkpoint_dir / "tokenizer_config.json"
    added = read_json(settings).get("added_tokens_decoder", {}) if settings.exists() else {}
    try:
        ids = [*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])]
        return 1 + max([*ids, *(int(token_id) for token_id in added)])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint_dir / 'tokenizer.json'} is not in the expected form: {error!r}") from error
