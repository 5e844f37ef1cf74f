"""Models over artifacts: layers against plain ones with the same numbers, and whole models against their source."""

from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from engine.convert.convert import convert
from engine.layers.linear import Linear
from engine.layers.mlp import Mlp
from engine.layers.moe import SparseMoe
from engine.layers.mtp import Mtp
from engine.layers.norm import RMSNorm
from engine.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedMlp, QuantizedMoe
from engine.models.artifact import Artifact, read_manifest
from engine.models.quantized import build_model
from engine.models.weights import load_model
from engine.ops.quantized_experts import QuantizedExperts
from engine.ops.quantized_weight import dequantize_weight, quantize_weight
from tests.engine.checkpoints import DENSE, MOE, Geometry, write_checkpoint
from tests.engine.passes import CPU, Runner, relative_error

GEOMETRY = Geometry(hidden_size=128, num_experts=4, experts_per_token=2, width=64, vocab_size=96)
TOKEN_IDS = tuple(range(24))
# rounding activations to 8 bits, twice
CLOSE = 0.02
NORM = RMSNorm(torch.ones(128), 1e-6)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def matrix(bits, *shape):
    weight, _ = quantize_weight(torch.randn(*shape) * shape[-1] ** -0.5, bits)
    return weight, dequantize_weight(weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_linear_stacks_its_matrices(bits):
    (one, plain_one), (two, plain_two) = matrix(bits, 32, 128), matrix(8, 20, 128)
    x = torch.randn(3, 128)
    expected = x @ torch.cat([plain_one, plain_two]).T
    assert relative_error(QuantizedLinear((one, two))(x), expected) < CLOSE
    assert QuantizedLinear((one,))(x.bfloat16()).dtype == torch.bfloat16
    assert QuantizedLinear((one,), torch.float32)(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("bits", [4, 8])
def test_mlp(bits):
    (gate_up, plain_gate_up), (down, plain_down) = matrix(bits, 256, 128), matrix(bits, 128, 128)
    x = torch.randn(3, 128)
    expected = Mlp(Linear(plain_gate_up), Linear(plain_down))(x, NORM) - x
    assert relative_error(QuantizedMlp(gate_up, down)(x, NORM) - x, expected) < CLOSE


def test_moe():
    parts = [matrix(4, 4, 128, 128), matrix(4, 4, 128, 64), matrix(8, 128, 128), matrix(8, 128, 64)]
    stored, plain = zip(*parts, strict=True)
    router = Linear(torch.randn(5, 128))
    x = torch.randn(6, 128)
    expected = SparseMoe(router, plain[0], plain[1], Linear(plain[2]), Linear(plain[3]), 2)(x, NORM) - x
    assert relative_error(QuantizedMoe(router, QuantizedExperts(*stored), 2)(x, NORM) - x, expected) < CLOSE


@pytest.mark.parametrize("is_prompt", [False, True])
def test_mtp_rounds_no_row_of_a_prompt(is_prompt):
    weight, plain = matrix(4, 128, 256)
    embedded, hidden = torch.randn(3, 128), torch.randn(3, 128)
    mtp = Mtp(NORM, NORM, QuantizedLinear((weight,)), layer=lambda x, rows, cache: x, norm=lambda x: x)
    actual = mtp(embedded, hidden, SimpleNamespace(commits=is_prompt), cache=None)
    error = relative_error(actual, torch.cat([NORM(embedded), NORM(hidden)], dim=-1) @ plain.T)
    assert (error < 1e-6) == is_prompt and error < CLOSE


def test_embedding():
    weight, plain = matrix(8, 40, 64)
    token_ids = torch.tensor([3, 39, 3])
    assert torch.equal(QuantizedEmbedding(weight, torch.float32)(token_ids), plain[token_ids])


@pytest.mark.parametrize("profile, limits", [(DENSE, (0.02, 0.06, 0.4)), (MOE, (0.1, 0.25, 0.5))])
def test_recipes_stay_near_their_source(profile, limits, tmp_path):
    """Finer recipes must be nearer. Random weights forgive nothing, and a flipped choice of experts costs most."""
    source = write_checkpoint(tmp_path / "source", profile, GEOMETRY)
    model = load_model(source, CPU, torch.float32)
    expected = model.compute_logits(Runner(model).prefill(TOKEN_IDS))
    errors = []
    for recipe in ("bf16", "w8", "w4"):
        convert(source, tmp_path / recipe, recipe)
        model = load_model(tmp_path / recipe, CPU, torch.float32)
        errors.append(relative_error(model.compute_logits(Runner(model).prefill(TOKEN_IDS)), expected))
    assert errors == sorted(errors)
    assert all(error < limit for error, limit in zip(errors, limits, strict=True)), errors


@pytest.mark.parametrize("profile", [DENSE, MOE])
def test_decode_follows_prefill(profile, tmp_path):
    source = write_checkpoint(tmp_path / "source", profile, GEOMETRY)
    convert(source, tmp_path / "artifact", "w8")
    model = load_model(tmp_path / "artifact", CPU, torch.float32)
    prefilled = Runner(model).prefill(TOKEN_IDS)
    runner = Runner(model)
    runner.prefill(TOKEN_IDS[:10])
    decoded = runner.decode(TOKEN_IDS[10:], start=10)
    # decode rounds what goes into each product to 8 bits, a prompt's rows do not
    assert 0 < relative_error(decoded, prefilled[10:]) < 0.1


class Watched(Artifact):
    """One that remembers from which file each tensor was asked for."""

    def read(self, name):
        self.asked.append(self.tensors[name].file)
        return super().read(name)


@pytest.mark.parametrize("profile", [DENSE, MOE])
def test_layers_are_built_in_the_order_of_their_files(profile, tmp_path):
    """Files are read ahead in that order: whoever asks for a late one first waits for all of them."""
    convert(write_checkpoint(tmp_path / "source", profile, GEOMETRY), tmp_path / "artifact", "w4")
    with Watched(tmp_path / "artifact", CPU) as artifact:
        artifact.asked = []
        build_model(artifact, CPU, torch.float32)
    assert [file for file, _ in groupby(artifact.asked)] == list(read_manifest(tmp_path / "artifact").files)
