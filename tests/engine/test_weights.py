import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.models.checkpoint import Checkpoint, dequantised
from engine.models.config import read_config
from engine.models.weights import load_model
from tests.engine.checkpoints import MOE, Geometry, in_eight_bits, quantised, write_checkpoint, write_shards
from tests.engine.passes import CPU, Runner, relative_error

GEOMETRY = Geometry(hidden_size=40, num_experts=4, experts_per_token=2, width=24, vocab_size=96)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Tensors and config.json of one MoE checkpoint, experts one by one."""
    directory = write_checkpoint(tmp_path_factory.mktemp("stored"), MOE, GEOMETRY)
    tensors = {}
    for shard in directory.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors, json.loads((directory / "config.json").read_text())


def write(directory, tensors, config):
    write_shards(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory):
    return load_model(directory, CPU, torch.float32)


def logits(model, token_ids=tuple(range(20))):
    return model.compute_logits(Runner(model).prefill(token_ids))


def without(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def test_single_file_is_the_same_as_shards(tmp_path, stored):
    tensors, config = stored
    sharded = load(write(tmp_path / "shards", tensors, config))
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "single" / "model.safetensors")
    assert torch.equal(logits(sharded), logits(load(tmp_path / "single")))


def test_vision_tensors_are_ignored_by_name(tmp_path, stored):
    tensors, config = stored
    vision = {"model.visual.patch_embed.proj.weight": torch.ones(3), "visual.merger.norm.weight": torch.ones(2)}
    plain = load(write(tmp_path / "plain", tensors, config))
    assert torch.equal(logits(load(write(tmp_path / "vision", tensors | vision, config))), logits(plain))


def test_mtp_is_absent_when_the_config_says_so(tmp_path, stored):
    tensors, config = stored
    text = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    model = load(write(tmp_path, text, without(config, "mtp_num_hidden_layers")))
    assert not model.config.has_mtp
    runner = Runner(model)
    assert len(runner.kv.layers) == 1
    batch = runner.batch({0: [1]}, {0: 0}, commits=True)
    with pytest.raises(ValueError, match="no MTP layer"):
        model.forward_mtp(batch, torch.zeros(1, 40), runner.kv)


def test_tied_embeddings_serve_as_the_head(tmp_path, stored):
    tensors, config = stored
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    expected = logits(load(write(tmp_path / "untied", untied, config)))
    tied = write(tmp_path / "tied", without(tensors, "lm_head.weight"), config | {"tie_word_embeddings": True})
    assert torch.equal(logits(load(tied)), expected)


def test_padding_ids_get_no_probability(tmp_path, stored):
    tensors, config = stored
    directory = write(tmp_path, tensors, config)
    tokenizer = {"model": {"vocab": {chr(i): i for i in range(90)}}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = logits(load(directory))
    assert rows.shape == (20, 96)
    assert (rows[:, 90:] == float("-inf")).all()
    assert torch.isfinite(rows[:, :90]).all()


@pytest.mark.parametrize("form", ["experts", "language_model.experts"])
def test_fp8_is_the_dequantised_checkpoint(tmp_path, form):
    """128 x 128 blocks, and sizes that are no multiple of 128."""
    geometry = Geometry(hidden_size=200, num_experts=4, experts_per_token=2, width=72, vocab_size=96)
    directory = write_checkpoint(tmp_path / "fp8", MOE, geometry, form, fp8=True)
    tensors = {}
    for shard in directory.glob("*.safetensors"):
        tensors |= load_file(shard)
    plain = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor
    assert len(plain) < len(tensors)
    config = without(json.loads((directory / "config.json").read_text()), "quantization_config")
    expected = logits(load(write(tmp_path / "plain", plain, config)))
    assert torch.equal(logits(load(directory)), expected)
    original = logits(load(write_checkpoint(tmp_path / "original", MOE, geometry, form)))
    assert 1e-4 < relative_error(expected, original) < 0.2


@pytest.mark.parametrize("shape", [(128, 128), (130, 300), (1, 1)])
def test_quantised_blocks_come_back(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    eight_bit, scale = quantised(weight)
    back = dequantised(eight_bit, scale)
    assert back.shape == weight.shape
    assert relative_error(back, weight) < 0.04


def test_dequantised_by_hand():
    weight = torch.ones(129, 257).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    wide = dequantised(weight, scale)
    assert (wide[0, 0], wide[127, 128], wide[128, 127], wide[128, 256]) == (1.0, 2.0, 4.0, 6.0)


Q_PROJ = "model.layers.3.self_attn.q_proj.weight"
EXPERT = "model.layers.0.mlp.experts.1.down_proj.weight"


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda t: without(t, Q_PROJ), "layers.3.self_attn.q_proj.weight is missing"),
        (lambda t: without(t, EXPERT), "experts.1.down_proj.weight is missing"),
        (lambda t: without(t, "lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: without(t, "mtp.fc.weight"), "mtp.fc.weight is missing.*mtp_num_hidden_layers"),
        (lambda t: t | {"model.layers.4.mlp.gate.weight": torch.ones(1)}, "layers.4.mlp.gate.weight is not part"),
        (lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(1)}, "q_proj.bias is not part"),
        (lambda t: t | {"transformer.h.0.weight": torch.ones(1)}, "transformer.h.0.weight does not belong"),
        (lambda t: t | {"model.language_model.norm.weight": torch.ones(40)}, "are the same one"),
        (changed(Q_PROJ, lambda w: w[:-1].contiguous()), r"q_proj.weight has shape \[2047, 40\].*\[2048, 40\]"),
        (changed(EXPERT, lambda w: w.T.contiguous()), r"down_proj.weight has shape \[24, 40\]"),
        (changed(Q_PROJ, lambda w: w.to(torch.int8)), "q_proj.weight has type I8"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, stored, edit, named):
    tensors, config = stored
    with pytest.raises(CheckpointError, match=named):
        load(write(tmp_path, edit(tensors), config))


@pytest.mark.parametrize(
    "edit, fields, named",
    [
        (lambda t: t, {"quantization_config": None}, "quantization_config is missing"),
        (lambda t: without(t, Q_PROJ + "_scale_inv"), {}, "q_proj.weight_scale_inv is missing.*8 bits"),
        (changed(Q_PROJ + "_scale_inv", lambda w: w[:1]), {}, r"scale_inv has shape \[1, 1\].*\[16, 1\]"),
        (changed(Q_PROJ, lambda w: w.float()), {}, "q_proj.weight_scale_inv is not part"),
        (changed("model.norm.weight", lambda w: w.to(torch.float8_e4m3fn)), {}, "model.norm.weight has type F8_E4M3"),
    ],
)
def test_wrong_eight_bit_tensors_are_named(tmp_path, stored, edit, fields, named):
    tensors, config = stored
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    with pytest.raises(CheckpointError, match=named):
        load(write(tmp_path, edit(in_eight_bits(tensors)), config | fp8 | fields))


def cut_short(directory):
    shard = next(iter(sorted(directory.glob("*.safetensors"))))
    shard.write_bytes(shard.read_bytes()[:-100])


def lose_a_shard(directory):
    next(iter(sorted(directory.glob("*.safetensors")))).unlink()


def edit_index(change):
    def edit(directory):
        file = directory / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        change(index["weight_map"])
        file.write_text(json.dumps(index))

    return edit


@pytest.mark.parametrize(
    "damage, named",
    [
        (cut_short, "model-00001-of-00003.safetensors cannot be read"),
        (lose_a_shard, "model-00001-of-00003.safetensors is missing"),
        (edit_index(lambda m: m.pop(Q_PROJ)), "q_proj.weight of .* is not in model.safetensors.index.json"),
        (edit_index(lambda m: m.update({"mtp.x": "model-00001-of-00003.safetensors"})), "mtp.x is missing"),
        (edit_index(lambda m: m.update({"mtp.x": "../model.safetensors"})), "file of mtp.x"),
        (edit_index(lambda m: m.clear()), "weight_map"),
    ],
)
def test_damaged_files_are_named(tmp_path, stored, damage, named):
    directory = write(tmp_path, *stored)
    damage(directory)
    with pytest.raises(CheckpointError, match=named):
        load(directory)


def test_no_weights_at_all_are_named(tmp_path, stored):
    (tmp_path / "config.json").write_text(json.dumps(stored[1]))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        load(tmp_path)


def test_a_refused_checkpoint_leaves_no_file_open(tmp_path, stored):
    tensors, config = stored
    directory = write(tmp_path, without(tensors, Q_PROJ), config)
    checkpoint = Checkpoint(directory, read_config(directory))
    with pytest.raises(CheckpointError), checkpoint:
        pass
    assert Q_PROJ.removeprefix("model.") not in checkpoint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_has_the_asked_type(tmp_path, stored, dtype):
    model = load_model(write(tmp_path, *stored), CPU, dtype)
    rows = logits(model)
    assert rows.dtype == torch.float32
    assert relative_error(rows, logits(load(tmp_path))) < (1e-9 if dtype == torch.float32 else 0.1)
