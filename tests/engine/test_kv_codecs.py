"""Sizes of the KV codecs: what the planner counts is what the storage takes."""

import pytest
import torch

from engine.cache.kv_codecs import CODECS
from engine.ops.coded_kv import CodedKV


def test_bytes_by_hand():
    sizes = {name: codec.bytes_per_token(kv_heads=1, head_dim=256) for name, codec in CODECS.items()}
    assert sizes == {"bf16": 1024, "int8-g64": 528, "rk8v4": 400, "rk4v4-e8": 272}


def test_bytes_of_a_model_by_hand():
    # ten layers of two KV heads over 262,144 tokens: 1.33 GiB
    assert 10 * 262_144 * CODECS["rk4v4-e8"].bytes_per_token(2, 256) == 1_426_063_360


@pytest.mark.parametrize("codec", [codec for codec in CODECS.values() if codec.is_coded], ids=lambda codec: codec.name)
def test_storage_takes_what_is_counted(codec):
    storage = CodedKV.zeros(3, 64, 2, 256, codec.folds, codec.is_rotated, "cpu")
    assert storage.num_bytes == 3 * 64 * codec.bytes_per_token(2, 256)
    assert storage.folds == codec.folds
    assert storage.keys.shape == (3, 64, 2, 256 // codec.folds[0]) and storage.keys.dtype == torch.int32
