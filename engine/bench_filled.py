"""The engine process of a measurement that does not wait for prompts: `python -m engine.bench_filled ADDRESS`.

Decoding at 260,000 tokens of context takes as long whatever the tokens are, so only the last rows of each chunk of a
prompt are computed, over a cache and states of random numbers. Everything after that is the engine as it is served.
"""

from dataclasses import fields, replace

import torch

from config import EngineConfig
from config.engine import BLOCK_SIZE
from engine import process
from engine.cache.state_cache import StateCache
from engine.device_runner import DeviceRunner
from engine.engine import EngineCore
from engine.loading import load_engine
from engine.models.qwen3_5 import AllKVLayers
from engine.schedule import Chunk, Schedule

# a chunk of no more tokens is computed whole: what is new of a prompt that comes back costs what it costs
SHORT = 512


class FilledRunner(DeviceRunner):
    """Computes the last block of each long chunk alone."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        fill_kv(self._state.kv)

    def launch_forward(self, schedule: Schedule) -> None:
        chunks = tuple(replace(chunk, start=_first_computed(chunk)) for chunk in schedule.chunks)
        # no state stands inside of what is left out
        ends = {(chunk.state.slot, chunk.end) for chunk in chunks}
        copies = tuple(copy for copy in schedule.copies if (copy.slot, copy.position) in ends)
        super().launch_forward(replace(schedule, chunks=chunks, copies=copies))

    def _begin(self, chunk: Chunk) -> None:
        super()._begin(chunk)
        fill_state(self._states, chunk.state.slot)


def _first_computed(chunk: Chunk) -> int:
    return chunk.start if chunk.end - chunk.start <= SHORT else chunk.end - BLOCK_SIZE


def fill_kv(kv: AllKVLayers) -> None:
    """Numbers, codes and scales under which no token is worth much more than another."""
    for layer in kv.layers:
        for tensor in (value for each in fields(layer) if isinstance(value := getattr(layer, each.name), torch.Tensor)):
            if tensor.dtype == torch.int32:
                tensor.random_(-(2**31), 2**31 - 1)
            elif tensor.dtype == torch.float16:
                tensor.uniform_(0.005, 0.015)
            else:
                tensor.normal_(std=0.5)


def fill_state(states: StateCache, slot: int) -> None:
    state, taps = states.committed(slot)
    state.normal_(std=0.02)
    taps.normal_(std=0.5)


def load_filled(config: EngineConfig) -> EngineCore:
    return load_engine(config, is_ahead=True, runner_type=FilledRunner)


if __name__ == "__main__":
    process.main(load_filled)
