"""The comparison runs what is served, in decode steps, and sees more loss where there are fewer bits."""

import pytest
import torch

from engine.convert.convert import convert
from engine.embedded.compare_recipes import Altered, Setting, Text, best_codes, decoded, divergence, rounded_to
from engine.embedded.decoder import Decoder, generate
from engine.embedded.evaluate import CHECKPOINT
from engine.embedded.export import load_parameters
from engine.embedded.served import ServedDecoder
from engine.embedded.train_model import working_weights
from engine.models.quantized import build_model
from engine.models.weights import load_model
from engine.ops.quantized_weight import dequantize_weight, quantize_weight

CPU = torch.device("cpu")
IDS = torch.randint(0, 8000, (2, 44), generator=torch.Generator().manual_seed(0))
TEXT = Text(IDS, prompt=32)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("artifacts")
    for recipe in ("bf16", "w8", "w4"):
        convert(CHECKPOINT, directory / recipe, recipe)
    return directory


@pytest.fixture(scope="module")
def reference():
    exact = load_model(CHECKPOINT, CPU, torch.float32)
    return list(decoded(ServedDecoder(exact, CPU, torch.float32), TEXT))


def decoder(artifacts, recipe, activations=8, codec="bf16", has_outliers=False):
    setting = Setting(recipe, activations, codec, has_outliers)
    with Altered(artifacts / ("bf16" if ":" in recipe else recipe), CPU, setting) as artifact:
        return ServedDecoder(build_model(artifact, CPU, torch.float32, drafts=False), CPU, torch.float32, codec)


def nats(artifacts, reference, *setting):
    return divergence(reference, decoder(artifacts, *setting), TEXT).nats.mean().item()


def test_fewer_bits_diverge_more(artifacts, reference):
    found = [nats(artifacts, reference, *each) for each in (("bf16", 16), ("w8", 16), ("w8", 8), ("w4", 16))]
    assert found == sorted(found) and 0 < found[0] < 1e-3 and found[3] > 5 * found[2]


def test_bits_that_no_storage_has_lie_between(artifacts, reference):
    names = [f"w8:experts.gate_up={bits},experts.down={bits}" for bits in (4, 5, 8)]
    found = [nats(artifacts, reference, name, 16) for name in names]
    assert found == sorted(found, reverse=True) and found[0] > 3 * found[2]


def test_coded_keys_and_values_diverge(artifacts, reference):
    found = [nats(artifacts, reference, "bf16", 16, codec) for codec in ("bf16", "int8-g64", "rk4v4-e8")]
    assert found == sorted(found) and found[2] > 5 * found[1]


def test_planted_outliers_change_no_score(artifacts, reference):
    plain, planted = (nats(artifacts, reference, "bf16", 16, "bf16", each) for each in (False, True))
    assert planted == pytest.approx(plain, abs=1e-5)
    coded, coarse = (nats(artifacts, reference, "bf16", 16, "int8-g64", each) for each in (False, True))
    assert coarse > 1.5 * coded


def test_measures_by_hand():
    found = divergence([torch.tensor([[0.5, 0.5]]).log()], Fixed(torch.tensor([[0.25, 0.75]]).log()), Two)
    assert found.nats.item() == pytest.approx(0.5 * torch.tensor(2.0 * 2 / 3).log().item())
    assert (found.loss.exp().item(), found.reference_loss.exp().item()) == pytest.approx((4 / 3, 2.0))
    assert found.agreed.item() == 0


Two = Text(torch.tensor([[0, 0, 1]]), prompt=1)


class Fixed:
    """Says the same after every token."""

    def __init__(self, log_probabilities):
        self._logits = log_probabilities

    def prefill(self, prompts, room):
        assert (prompts, room) == ([[0]], 2)

    def step(self, token_ids):
        return token_ids

    def logits(self, hidden):
        return self._logits


def test_codes_of_other_bits_are_as_good_as_those_that_are_stored():
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = best_codes(weight.unflatten(-1, (-1, 64)), 4)
    error = (codes * scales.float().unsqueeze(-1)).flatten(-2) - weight
    assert error.norm() < 1.02 * (dequantize_weight(quantize_weight(weight, 4)[0]) - weight).norm()
    five = dequantize_weight(rounded_to(weight, 5))
    assert 1.7 < error.norm() / (five - weight).norm() < 2.3


def test_replies_are_those_of_the_training_model(artifacts):
    geometry, parameters = load_parameters(CHECKPOINT)
    trained = Decoder(geometry, working_weights(parameters, torch.float32, rounds_to_fp8=False))
    prompts = [IDS[0].tolist(), IDS[1, :30].tolist()]
    expected = generate(trained, prompts, max_tokens=6, stops={0})
    assert generate(decoder(artifacts, "bf16"), prompts, max_tokens=6, stops={0}) == expected
