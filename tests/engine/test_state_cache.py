import pytest
import torch

from engine.batch import MAX_PENDING_ROWS
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.models.config import read_config
from engine.ops.gated_delta_fold import gated_delta_fold
from tests.engine.checkpoints import MOE, Geometry, write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return read_config(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, Geometry()))


def filled(config, seed=0):
    """A cache in which every slot holds something."""
    cache = StateCache(config, 3, CPU)
    generator = torch.Generator().manual_seed(seed)
    for memory in cache.layers:
        for tensor in memory.tensors():
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return cache


def fold_all(cache, slot, count):
    for memory in cache.layers:
        gated_delta_fold(memory, torch.tensor([slot]), torch.tensor([count], dtype=torch.int32))


@pytest.mark.parametrize("first", [1, 3, 7])
def test_folding_in_two_parts_equals_folding_at_once(config, first):
    parts, whole = filled(config), filled(config)
    parts.fold(1, first)
    fold_all(parts, 1, MAX_PENDING_ROWS - first)
    fold_all(whole, 1, MAX_PENDING_ROWS)
    for mine, expected in zip(parts.committed(1), whole.committed(1), strict=True):
        assert torch.equal(mine, expected)


def test_folding_leaves_other_slots_alone(config):
    folded, before = filled(config), filled(config)
    folded.fold(1, 2)
    for slot in (0, 2):
        for mine, expected in zip(folded.layers, before.layers, strict=True):
            assert all(torch.equal(a[slot], b[slot]) for a, b in zip(mine.tensors(), expected.tensors(), strict=True))


def test_a_snapshot_outlives_its_slot_and_goes_to_another(config):
    cache, original = filled(config), filled(config)
    snapshots = StateSnapshots(config, 2, CPU, torch.float32)
    hidden = torch.rand(config.hidden_size)
    snapshots.save(1, cache, 0, hidden)
    cache.reset(0)
    cache.reset(2)
    snapshots.restore(1, cache, 2)
    for mine, expected in zip(cache.committed(2), original.committed(0), strict=True):
        assert torch.equal(mine, expected)
    assert all(not tensor.any() for tensor in cache.committed(0))
    assert torch.equal(snapshots.hidden(1), hidden)
    assert not snapshots.hidden(0).any()
