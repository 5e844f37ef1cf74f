"""What the host spends on a pass over a prompt, without a GPU: everything but the driver's own part of each launch.

    python -O tests/bench/launch_time.py --model DIR [--rows 64] [--profile]

DIR is an artifact, as of `tests/bench/random_artifact.py --layers 8`. Kernels are compiled for compute capability 9.0
and handed to a driver that launches nothing; tensors lie in host memory and say that they do not. -O, because some of
the matrices have another order there, which kernels assert.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from config import EngineConfig
from engine.batch import RequestRows, build_batch
from engine.loading import load_engine

PASSES = 31


class NoDriver:
    """As Triton asks its driver, of a card that is not there."""

    def __init__(self) -> None:
        self.num_launches = 0
        properties = {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 64, 0, 1024), get_device_properties=lambda _: properties
        )

    def launcher_cls(self, *_: object) -> "NoDriver":
        return self

    def __call__(self, *_: object) -> None:
        self.num_launches += 1

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    config = EngineConfig(
        model=asked.model, device="cpu", dtype="bfloat16", kv_codec="int8-g64", max_num_requests=1,
        max_model_len=asked.rows + 64, prefix_caching=False, num_drafts=0,
    )  # fmt: skip
    runner = load_engine(config, is_ahead=True)._runner
    nowhere = NoDriver()
    driver.set_active(nowhere)
    pretend()
    runner._tables.begin(0)
    runner._tables.extend(0, list(range(-(-asked.rows // 64))))

    @torch.inference_mode()
    def run() -> None:
        batch = build_batch([RequestRows(0, 0, [0] * asked.rows)], runner._tables, commits=True)
        runner._model.forward(batch, runner._state.kv, runner._states)

    # compiles
    run()
    nowhere.num_launches = 0
    profile = cProfile.Profile() if asked.profile else None
    taken = [timed(run, profile) for _ in range(PASSES)]
    report = {"layers": len(runner._model._layers), "rows": asked.rows, "launches": nowhere.num_launches // PASSES}
    report |= {"ms": round(statistics.median(taken) * 1000, 2), "least_ms": round(min(taken) * 1000, 2)}
    print(json.dumps(report | {"torch": torch.__version__, "triton": version("triton")}))
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def timed(run, profile: cProfile.Profile | None) -> float:
    began = time.perf_counter()
    if profile is None:
        run()
    else:
        profile.runcall(run)
    return time.perf_counter() - began


def pretend() -> None:
    """What decides between kernels and references, and between cards, answers as on an H200."""
    torch.cuda.get_device_capability = lambda _=None: (9, 0)
    torch.cuda.get_device_properties = lambda _=None: SimpleNamespace(multi_processor_count=132)
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


if __name__ == "__main__":
    main()
