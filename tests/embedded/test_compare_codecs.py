"""The codec comparison sees what a codec loses, and nothing where it loses nothing."""

import pytest
import torch

from engine.cache.kv_codecs import CODECS
from engine.embedded.compare_codecs import CodedModel, Divergence, log_probabilities, plant_outliers, stored
from engine.embedded.evaluate import CHECKPOINT
from engine.embedded.export import load_parameters
from engine.embedded.train_model import Packing, TrainModel, working_weights

# relative error of one stored vector
LARGEST_ERROR = {"bf16": 0.005, "int8-g64": 0.01, "rk8v4": 0.15, "rk4v4-e8": 0.15}


@pytest.mark.parametrize("codec", CODECS.values(), ids=list(CODECS))
def test_storage_error_is_bounded(codec):
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for form in (codec.keys, codec.values):
        error = (stored(x, form, codec.is_rotated) - x).norm() / x.norm()
        assert 0 < error < LARGEST_ERROR[codec.name]


def test_divergence_by_hand():
    reference = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
    coded = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    found = Divergence()
    found.add(reference, coded, torch.tensor([0, 1]))
    expected = 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()
    assert found.nats == pytest.approx(float(expected), abs=1e-6)
    assert (found.tokens, found.agreed) == (2, 1)
    assert found.loss == pytest.approx(2 * float(torch.tensor(2.0).log()))


def test_coarser_codecs_diverge_more():
    geometry, parameters = load_parameters(CHECKPOINT)
    weights = working_weights(parameters, torch.float32, rounds_to_fp8=False)
    ids = torch.randint(0, 8000, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        exact = TrainModel(geometry, weights).hidden(ids, Packing.of(torch.arange(64).unsqueeze(0)))
        reference = TrainModel(geometry, weights).logits(exact[0, :-1]).log_softmax(-1)
        losses = []
        for name in ("bf16", "int8-g64", "rk4v4-e8"):
            found = Divergence()
            found.add(reference, log_probabilities(CodedModel(geometry, weights), CODECS[name], ids), ids[0, 1:])
            losses.append(found.nats)
    assert 0 <= losses[0] < losses[1] < losses[2]


def test_planted_outliers_change_no_score():
    geometry, parameters = load_parameters(CHECKPOINT)
    weights = working_weights(parameters, torch.float32, rounds_to_fp8=False)
    planted = plant_outliers(weights)
    ids = torch.randint(0, 8000, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        packing = Packing.of(torch.arange(64).unsqueeze(0))
        before, after = (TrainModel(geometry, each).hidden(ids, packing) for each in (weights, planted))
    assert not torch.equal(weights["layers.3.k_norm"], planted["layers.3.k_norm"])
    assert torch.allclose(before, after, atol=1e-3)
