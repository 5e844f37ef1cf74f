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


def integers(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("count", [1, 3, MAX_PENDING_ROWS])
def test_a_snapshot_among_pending_rows_is_what_they_commit_to(config, count):
    cache, folded = filled(config), filled(config)
    snapshots, hidden = StateSnapshots(config, 3, CPU, torch.float32), torch.rand(2, config.hidden_size)
    counts = integers(count, -1, dtype=torch.int32)
    snapshots.save_pending(integers(2, 0), cache, integers(1, 0), counts, hidden)
    for memory in folded.layers:
        gated_delta_fold(memory, integers(1), counts[:1])
    snapshots.restore(2, cache, 0)
    for mine, expected in zip(cache.committed(0), folded.committed(1), strict=True):
        assert torch.equal(mine, expected)
    assert torch.equal(snapshots.hidden(2), hidden[0])
    # of what does not stand no state is written
    assert not any(part.any() for part in snapshots.parts(0)[:2])


def test_a_snapshot_among_pending_rows_leaves_the_slots_alone(config):
    cache, before = filled(config), filled(config)
    counts, hidden = integers(2, dtype=torch.int32), torch.rand(1, config.hidden_size)
    StateSnapshots(config, 1, CPU, torch.float32).save_pending(integers(0), cache, integers(1), counts, hidden)
    for mine, expected in zip(cache.layers, before.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors(), expected.tensors(), strict=True))


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
