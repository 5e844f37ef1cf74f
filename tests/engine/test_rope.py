import math
from itertools import pairwise

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from engine.checkpoint_dir import EMBEDDED_DIR
from engine.layers.rope import plain_rope, yarn_rope
from engine.models.config import PROFILES, YARN_LIMIT
from engine.models.qwen3_5 import rope_of
from engine.models.weights import load_model

CPU = torch.device("cpu")
CONFIG = next(iter(PROFILES.values()))
ROPE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10], "mrope_interleaved": True}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144}
POSITIONS = torch.tensor([0, 1, 63, 4096, 262_143, 262_144, 777_777, YARN_LIMIT - 1])


def peer_angles(rope):
    config = Qwen3_5TextConfig(head_dim=256, max_position_embeddings=262_144, rope_parameters={**ROPE, **rope})
    rotary = Qwen3_5TextRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, 1), POSITIONS.expand(3, 1, -1))
    return cos[0, :, :32], sin[0, :, :32]


@pytest.mark.parametrize("is_stretched, rope", [(True, YARN), (False, {"rope_type": "default"})])
def test_angles_are_those_of_transformers(is_stretched, rope):
    ours, theirs = rope_of(CONFIG, is_stretched, CPU)(POSITIONS), peer_angles(rope)
    for mine, its in zip(ours, theirs, strict=True):
        assert torch.equal(mine, its)


def test_pairs_by_hand():
    """Pairs 0 to 14 stay, 22 to 31 turn four times as slowly, between them lies the ramp."""
    plain, stretched = (rope_of(CONFIG, is_stretched, CPU) for is_stretched in (False, True))
    ratios = (plain.inverse_frequencies / stretched.inverse_frequencies).tolist()
    assert ratios[:15] == [1.0] * 15
    assert ratios[22:] == pytest.approx([4.0] * 10, rel=1e-6)
    assert all(1 < a < b < 4 for a, b in pairwise(ratios[15:22]))
    assert stretched.scale == pytest.approx(1.13863, abs=1e-5)
    assert plain.scale == 1


def test_a_factor_of_one_changes_nothing():
    same = yarn_rope(64, 1e7, 1, 262_144, CPU)
    assert torch.allclose(same.inverse_frequencies, plain_rope(64, 1e7, CPU).inverse_frequencies, rtol=1e-6)
    assert same.scale == 1 + 0.1 * math.log(1)


def test_a_model_is_stretched_only_where_asked():
    plain, stretched = (load_model(EMBEDDED_DIR, CPU, torch.float32, s)._rope.scale for s in (False, True))
    assert (plain, stretched > 1.1) == (1.0, True)
