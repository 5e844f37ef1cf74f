import json
from dataclasses import replace

import pytest

from engine.errors import CheckpointError
from engine.models.config import PROFILES, DenseConfig, ModelConfig, MoeConfig, parse_config, read_config
from engine.models.layout import tensor_shapes

ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
COMMON = {
    "attention_bias": False,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "vocab_size": 248320,
}
MOE = COMMON | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
DENSE = COMMON | {
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "linear_num_value_heads": 48,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
}
A3B, DENSE_27B = PROFILES.values()


def nested(text, model_type):
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": model_type},
    }


def old_rope(text):
    """rope_theta and partial_rotary_factor beside the other fields, the sections under rope_scaling."""
    plain = {name: value for name, value in text.items() if name != "rope_parameters"}
    scaling = {"type": "mrope", "mrope_section": [11, 11, 10]}
    return plain | {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_scaling": scaling}


@pytest.mark.parametrize(
    "config, profile",
    [
        (nested(MOE, "qwen3_5_moe"), A3B),
        (MOE, A3B),
        (old_rope(MOE), A3B),
        (nested(DENSE, "qwen3_5"), DENSE_27B),
        (DENSE, DENSE_27B),
        (nested(old_rope(DENSE), "qwen3_5"), DENSE_27B),
    ],
)
def test_published_spellings_give_the_profile(config, profile):
    assert parse_config(config) == profile


def test_layer_types_are_checked_when_written_out():
    pattern = (["linear_attention"] * 3 + ["full_attention"]) * 10
    assert parse_config(MOE | {"layer_types": pattern}) == A3B
    with pytest.raises(CheckpointError, match="layer_types"):
        parse_config(MOE | {"layer_types": pattern[::-1]})


def test_profiles_have_the_published_sizes():
    """Bytes and parameters that the published checkpoints are known by."""
    assert (A3B.num_gdn_layers, A3B.num_attention_layers, A3B.num_kv_layers) == (30, 10, 11)
    assert (DENSE_27B.num_gdn_layers, DENSE_27B.num_attention_layers) == (48, 16)
    assert A3B.layer_types[3::4] == ("full_attention",) * 10
    assert A3B.feed_forward == MoeConfig(256, 8, 512, 512)
    assert DENSE_27B.feed_forward == DenseConfig(17_408)


@pytest.mark.parametrize("profile, billions", [(A3B, 35.5), (DENSE_27B, 27.3)])
def test_profiles_have_the_published_number_of_parameters(profile, billions):
    total = 0
    for shape in tensor_shapes(profile).values():
        size = 1
        for side in shape:
            size *= side
        total += size
    assert total / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "llama"}, "model_type 'llama'.*Qwen3.6-35B-A3B"),
        ({"model_type": "qwen3_next"}, "model_type.*supported are"),
        ({"head_dim": 128}, "head_dim is 128; only 256"),
        ({"linear_key_head_dim": 64}, "linear_key_head_dim"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"full_attention_interval": 2}, "full_attention_interval"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 3}, "num_hidden_layers"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads 16 is no multiple of num_key_value_heads 3"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_parameters": {**ROPE, "rope_type": "llama3"}}, "rope_type"),
        ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {**ROPE, "mrope_section": [16, 16]}}, None),
        ({"rope_parameters": {**ROPE, "mrope_section": [24, 20, 20]}}, "mrope_section"),
        ({"rope_parameters": {**ROPE, "rope_theta": None}}, "rope_theta"),
        ({"rope_parameters": []}, "rope_parameters"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type"),
    ],
)
def test_what_is_not_supported_is_named(changes, named):
    if named is None:
        assert parse_config(MOE | changes) == A3B
        return
    with pytest.raises(CheckpointError, match=named):
        parse_config(MOE | changes)


@pytest.mark.parametrize("field", [*MOE, "layer_types", "text_config", "quantization_config", "rope_scaling"])
def test_no_value_whatever_gives_another_error(field):
    for value in (None, True, -1, 0, 1.5, "x", [], [None], {}, {"rope_type": []}, {"mrope_section": ["x"]}):
        try:
            parsed = parse_config(MOE | {field: value})
        except CheckpointError as error:
            assert str(error).startswith("config.json: ")
        else:
            assert isinstance(parsed, ModelConfig)


def test_nested_fields_are_named_with_their_place():
    with pytest.raises(CheckpointError, match=r"text_config\.head_dim"):
        parse_config(nested(MOE | {"head_dim": 64}, "qwen3_5_moe"))


def test_fp8_is_recognised():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert parse_config(MOE | {"quantization_config": fp8}) == replace(A3B, is_fp8=True)


def write(directory, **files):
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_token_ids_are_counted_in_both_tokenizer_files(tmp_path):
    write(tmp_path, config=MOE)
    assert read_config(tmp_path).num_ids == 248_077
    tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<|im_end|>"}]}
    write(tmp_path, config=MOE, tokenizer=tokenizer)
    assert read_config(tmp_path).num_ids == 3
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"4": {"content": "<tts>"}}})
    assert read_config(tmp_path).num_ids == 5


@pytest.mark.parametrize(
    "files, named",
    [
        ({}, "config.json is missing"),
        ({"config": "{"}, "config.json cannot be read"),
        ({"config": "[]"}, "JSON object"),
        ({"config": MOE, "tokenizer": {"model": {}}}, "tokenizer.json"),
        ({"config": MOE, "tokenizer": {"model": {"vocab": {"a": 300_000}}, "added_tokens": []}}, "300001 token ids"),
    ],
)
def test_broken_files_are_named(tmp_path, files, named):
    write(tmp_path, **files)
    with pytest.raises(CheckpointError, match=named):
        read_config(tmp_path)
