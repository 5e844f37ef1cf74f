"""Mixers and feed-forwards at the dimensions of the published models, on a CUDA GPU, against the reference in fp64.

Each is given the same rows, keys, values and states on both sides: what a whole model makes of a difference is another
question, and so is which expert a router takes whose input differs in its last bit.
"""

from dataclasses import replace

import pytest
import torch

from engine.batch import BlockTables, RequestRows, build_batch
from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS
from engine.cache.state_cache import StateCache
from engine.layers.norm import RMSNorm
from engine.models.weights import load_model
from engine.ops.coded_kv import CodedKV
from engine.ops.delta_state import DeltaState
from tests.bench.random_artifact import NAMES, write_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
# relative L2 error of a part's rows, the residual among them: bf16 alone is 1.1e-3
TOLERANCE = 4e-3
CONTEXT, PROMPT, SLOTS = 300, 96, 3
DELTA, ATTENTION = 2, 3


class RoundedNorm(RMSNorm):
    """As the rows of a prompt are kept between norm and product."""

    def __call__(self, x):
        return super().__call__(x).bfloat16().double()

    def of_prompt(self, x):
        return tuple(part.bfloat16().double() for part in super().of_prompt(x))


class Passes:
    """One part of one layer after another over the same memory, as a GPU left it."""

    def __init__(self, directory, codec):
        self.there = load_model(directory, GPU, torch.bfloat16, drafts=False)
        self.here = load_model(directory, CPU, torch.float64, drafts=False)
        config = self.there.config
        self.hidden = config.hidden_size
        blocks = 8
        self.tables = {device: BlockTables(SLOTS, blocks, device) for device in (GPU, CPU)}
        for tables in self.tables.values():
            for slot in range(SLOTS):
                tables.extend(slot, [slot * blocks + (block * 3) % blocks for block in range(blocks)])
        self.kv = KVCache(config, SLOTS * blocks, GPU, torch.bfloat16, CODECS[codec])
        self.states = StateCache(config, SLOTS, GPU)

    def memory(self, layer):
        return self.kv.layers[0] if layer == ATTENTION else self.states.layers[layer]

    def rows(self, model, device, requests, commits):
        return model._rows(build_batch(requests, self.tables[device], commits))

    def both(self, layer, requests, commits):
        """What mixer and feed-forward make of their rows: (name, on the GPU, in fp64 on the CPU)."""
        there, here = self.there._layers[layer], self.here._layers[layer]
        x = torch.randn(sum(len(each.token_ids) for each in requests), self.hidden, device=GPU).bfloat16()
        before, x_here = on_cpu(self.memory(layer)), x.cpu().double()
        mixed = there.mixer(x, there.mixer_norm, self.rows(self.there, GPU, requests, commits), self.memory(layer))
        expected = here.mixer(x_here, here.mixer_norm, self.rows(self.here, CPU, requests, commits), before)
        yield "mixer", mixed, expected
        y = there.feed_forward(mixed, there.feed_forward_norm, is_prompt=commits)
        norm = here.feed_forward_norm
        norm = RoundedNorm(norm.weight, norm.eps) if commits else norm
        yield "feed-forward", y, here.feed_forward(mixed.cpu().double(), norm, is_prompt=commits)


def on_cpu(memory):
    """A copy, its floating-point numbers in fp64."""
    if isinstance(memory, DeltaState):
        tensors = (tensor.cpu() for tensor in memory.tensors())
        return DeltaState(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors))
    codes = {name: getattr(memory, name).cpu() for name in ("keys", "values", "key_scales", "value_scales")}
    assert isinstance(memory, CodedKV)
    return replace(memory, **codes)


@pytest.fixture(scope="module", params=["35b-a3b", "27b"])
def artifact(request, tmp_path_factory):
    """Four layers of the real dimensions."""
    directory = tmp_path_factory.mktemp("artifact") / request.param
    write_artifact(directory, NAMES[request.param], "w4", num_layers=4)
    return directory


@pytest.mark.parametrize("codec", ["int8-g64", "rk4v4-e8"])
def test_layers_match_their_reference(artifact, codec):
    torch.manual_seed(0)
    passes, errors = Passes(artifact, codec), {}
    for layer in (DELTA, ATTENTION):
        if layer == DELTA and codec != "int8-g64":
            continue
        first = [RequestRows(slot, 0, [0] * CONTEXT) for slot in range(SLOTS)]
        x = torch.randn(SLOTS * CONTEXT, passes.hidden, device=GPU).bfloat16()
        one = passes.there._layers[layer]
        one.mixer(x, one.mixer_norm, passes.rows(passes.there, GPU, first, True), passes.memory(layer))
        plan = [
            ("prompt", [RequestRows(slot, CONTEXT, [0] * (PROMPT // SLOTS)) for slot in range(SLOTS)]),
            ("decode", [RequestRows(slot, CONTEXT + PROMPT // SLOTS, [0] * 4) for slot in (1,)]),
            # of the four rows before, two stand
            ("decode", [RequestRows(1, CONTEXT + PROMPT // SLOTS + 2, [0], 2)]),
            ("decode", [RequestRows(slot, CONTEXT + PROMPT // SLOTS, [0]) for slot in (0, 2)]),
        ]
        for step, (kind, requests) in enumerate(plan):
            for name, actual, expected in passes.both(layer, requests, kind == "prompt"):
                assert torch.isfinite(actual).all()
                error = ((actual.cpu().double() - expected).norm() / expected.norm()).item()
                errors[layer, step, kind, name] = round(error, 5)
    print(errors)
    assert all(error < TOLERANCE for error in errors.values()), errors
