"""How bytes get to the slab and back, and in which order."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS
from engine.cache.tiers import Transfer
from engine.models.config import read_config
from engine.schedule import Chunk, Schedule, SnapshotCopy
from engine.tier_copy import pack, runs, unpack, written
from tests.engine.checkpoints import MOE, Geometry, write_checkpoint
from tests.engine.runtime import drain, engine, finish, request


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, Geometry(vocab_size=320, num_layers=8))


@given(st.lists(st.integers(0, 50), unique=True, max_size=20))
def test_runs_are_neighbours_and_all_there_is(cells):
    found = list(runs(cells))
    assert [cell + i for _, cell, count in found for i in range(count)] == cells
    assert [row + i for row, _, count in found for i in range(count)] == list(range(len(cells)))
    assert all(first[1] + first[2] != second[1] for first, second in itertools.pairwise(found))


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_come_back_as_they_were_elsewhere(checkpoint_dir, codec):
    kv = KVCache(read_config(checkpoint_dir), 6, torch.device("cpu"), torch.float32, CODECS[codec])
    layer = kv.layers[0]
    names = [name for name in ("keys", "values", "key_scales", "value_scales") if hasattr(layer, name)]
    tensors = [getattr(layer, name) for name in names]
    for number, tensor in enumerate(tensors):
        tensor.copy_((torch.arange(tensor.numel()).view(tensor.shape) + number) % 1000)
    packed = pack(layer, torch.tensor([4, 1]))
    assert packed.shape == (2, kv.layers[0].num_bytes // 6)
    before = [tensor.clone() for tensor in tensors]
    unpack(layer, torch.tensor([0, 5]), packed)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[[0, 5]], old[[4, 1]])
        assert torch.equal(tensor[1:5], old[1:5])


def test_a_layer_is_waited_for_when_it_is_launched(checkpoint_dir):
    core = engine(checkpoint_dir, is_ahead=True, max_model_len=512, kv_cache_tokens=512, host_cache_bytes=64 * 2**20)
    text = list(range(300))
    finish(core, request("a", text, max_tokens=1))
    finish(core, request("b", text[::-1], max_tokens=1))
    runner, order = core._runner, []
    model, copier = runner._model, runner._copier
    wait, layers = copier.layer, model._layers

    def waited(index):
        order.append(f"wait {index}")
        return wait(index)

    def launched(number, layer):
        return lambda *args: order.append(f"layer {number}") or layer(*args)

    copier.layer = waited
    model._layers = [launched(number, layer) for number, layer in enumerate(layers)]
    core.add(request("c", text, max_tokens=1))
    core.step()
    kinds = model.config.layer_types
    attention = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    expected = []
    for number in range(len(kinds)):
        expected += [f"wait {attention.index(number)}"] if number in attention else []
        expected.append(f"layer {number}")
    assert len(attention) == 2 and order == expected
    drain(core)
    assert core.stats().num_host_tokens == 256


def test_what_a_pass_writes():
    request_state = SimpleNamespace(block_ids=[10, 11, 12, 13], num_computed_tokens=130)
    other = SimpleNamespace(block_ids=[20, 21, 22], num_computed_tokens=128)
    transfer = Transfer(blocks=((20, 0), (21, 1)), state=(3, 0))
    chunk = Chunk(other, 128, 192, is_first=True, restored=3, transfer=transfer)
    schedule = Schedule((chunk,), (request_state,), copies=(SnapshotCopy(0, 5, 192),))
    assert written(schedule) == ({12, 13, 20, 21, 22}, {3, 5})


def test_behind_a_hit_a_pass_writes_the_last_row_that_is_reused():
    """MTP's, of the token before: in a block that may be on its way out."""
    hit = Chunk(SimpleNamespace(block_ids=[20, 21, 22]), 128, 192, is_first=True, restored=3)
    anew = Chunk(SimpleNamespace(block_ids=[30]), 0, 64, is_first=True)
    assert written(Schedule((hit, anew))) == ({21, 22, 30}, set())
