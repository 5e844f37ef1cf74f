"""Where the time of a decode step goes, kernel by kernel."""

import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from config import EngineConfig
from engine.bench_filled import load_filled
from engine.engine import EngineCore
from engine.request import Request, SamplingParams

STEPS = 32
WARM_STEPS = 8
SHOWN = 40


def breakdown(config: EngineConfig, num_prompt_tokens: int) -> dict[str, Any]:
    """Of one request that decodes behind a prompt of this length.

    return  step_us: of a step without the profiler; kernel_us: sum over its kernels, which may overlap;
            kernels: name, how often a step runs it, and its share of kernel_us in us, the longest first
    """
    core = load_filled(config.model_copy(update={"prefix_caching": False}))
    output = SamplingParams(max_tokens=4 * (STEPS + WARM_STEPS) * (1 + core.info.num_drafts), temperature=0.0)
    core.add(Request("breakdown", tuple(index % 1000 for index in range(num_prompt_tokens)), output))
    while not any(event.token_ids for event in core.step()):
        pass
    _run(core, WARM_STEPS)
    step_s = _run(core, STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _run(core, STEPS)
    kernels = _by_name(profiler)
    total_us = sum(us for _, us in kernels.values())
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:SHOWN]
    return {
        "prompt_tokens": num_prompt_tokens,
        "step_us": round(step_s * 1e6, 1),
        "kernel_us": round(total_us / STEPS, 1),
        "kernels": [
            {"name": name, "count": round(count / STEPS, 2), "us": round(us / STEPS, 2)}
            for name, (count, us) in longest
        ],
    }


def _run(core: EngineCore, steps: int) -> float:
    """Seconds of each."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        core.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def _by_name(profiler: profile) -> dict[str, tuple[int, float]]:
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            count, us = found[event.name]
            found[event.name] = count + 1, us + event.time_range.elapsed_us()
    return found
