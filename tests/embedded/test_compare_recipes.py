"""The recipe comparison runs what is served, and sees more loss where there are fewer bits."""

import pytest
import torch

from engine.embedded.compare_recipes import recipe_divergences, served
from engine.embedded.decoder import Decoder, generate
from engine.embedded.evaluate import CHECKPOINT
from engine.embedded.export import load_parameters
from engine.embedded.train_model import working_weights

IDS = torch.randint(0, 8000, (1, 100), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def decoders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("artifacts")
    return {name: served(CHECKPOINT, name, directory / name)[0] for name in ("bf16", "w8", "w4")}


def test_fewer_bits_diverge_more(decoders):
    found = recipe_divergences(decoders, [IDS])
    assert found["bf16"].nats == 0
    assert found["bf16"].agreed == found["bf16"].tokens == 99
    assert 0 < found["w8"].nats < found["w4"].nats


def test_replies_are_those_of_the_training_model(decoders):
    geometry, parameters = load_parameters(CHECKPOINT)
    trained = Decoder(geometry, working_weights(parameters, torch.float32, rounds_to_fp8=False))
    prompts = [IDS[0, :70].tolist(), IDS[0, 70:].tolist()]
    expected = generate(trained, prompts, max_tokens=6, stops={0})
    assert generate(decoders["bf16"], prompts, max_tokens=6, stops={0}) == expected
