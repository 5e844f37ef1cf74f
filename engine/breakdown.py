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

    return  step_us: of a step without the profiler, and profiled_us with it; kernel_us: sum over its kernels, which may
            overlap; kernels: name, how often a step runs it, its share of kernel_us, by how much it ended later than
            all before it (added_us; these add up to the step) and of that the time in which nothing ran (idle_us), the
            longest first
    """
    core = load_filled(config.model_copy(update={"prefix_caching": False}))
    output = SamplingParams(max_tokens=4 * (STEPS + WARM_STEPS) * (1 + core.info.num_drafts), temperature=0.0)
    core.add(Request("breakdown", tuple(index % 1000 for index in range(num_prompt_tokens)), output))
    while not any(event.token_ids for event in core.step()):
        pass
    _run(core, WARM_STEPS)
    step_s = _run(core, STEPS)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        profiled_s = _run(core, STEPS)
    kernels = _by_name(profiler)
    longest = sorted(kernels.items(), key=lambda item: -item[1]["added_us"])[:SHOWN]
    return {
        "prompt_tokens": num_prompt_tokens,
        "step_us": round(step_s * 1e6, 1),
        "profiled_us": round(profiled_s * 1e6, 1),
        "kernel_us": round(sum(found["us"] for found in kernels.values()) / STEPS, 1),
        "kernels": [
            {"name": name} | {key: round(number / STEPS, 2) for key, number in found.items()} for name, found in longest
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


def _by_name(profiler: profile) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0, "us": 0.0, "added_us": 0.0, "idle_us": 0.0})
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    ended = events[0].time_range.start if events else 0.0
    for event in events:
        kernel, span = found[event.name], event.time_range
        kernel["count"] += 1
        kernel["us"] += span.elapsed_us()
        kernel["added_us"] += max(span.end - ended, 0.0)
        kernel["idle_us"] += max(span.start - ended, 0.0)
        ended = max(ended, span.end)
    return found
