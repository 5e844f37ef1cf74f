"""Holds what an engine takes of a GPU against its plan, part by part.

    python3 -m tests.bench.plan_peaks --models 35b=DIR 27b=DIR --out FILE

starts an engine of each configuration in a process of its own and runs it: a prompt of one chunk, one that ends with
a whole chunk behind the longest context, as many requests as there may be, and sampling with log probabilities. Only
the last rows of the chunks before are computed, over keys, values and states of random numbers.

The bytes taken are those that torch has reserved, at the most, and what the driver counts for the process beside them:
its context, loaded kernels and graphs. A driver inside a container may name no processes: then nothing else may run on
the card.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from config import EngineConfig
from engine.bench_filled import FilledRunner
from engine.child import ENGINE_ENVIRONMENT
from engine.device_runner import DeviceRunner
from engine.engine import EngineCore
from engine.loading import load_engine
from engine.request import Request, SamplingParams
from engine.schedule import Schedule

LONG = 262_144
# planned for what comes and goes; all else is held from the start to the end
WORK = ("CUDA graphs", "decode workspace", "prefill workspace", "staging of the host cache", "CUDA context", "reserve")
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "35b int8 four": ("35b", {"max_num_requests": 4, "kv_codec": "int8-g64"}),
    "35b int8 one, small chunks": ("35b", {"max_num_requests": 1, "kv_codec": "int8-g64", "prefill_chunk": 1024}),
    "35b e8 four, window, host embedding": (
        "35b",
        {"max_num_requests": 4, "kv_codec": "rk4v4-e8", "mtp_window": 4096, "embedding_memory": "host"},
    ),
    "35b e8 four, no drafts, host embedding, 24 GiB": (
        "35b",
        {"max_num_requests": 4, "kv_codec": "rk4v4-e8", "num_drafts": 0, "embedding_memory": "host"}
        | {"memory_bytes": 24 * 2**30, "prefix_caching": False},
    ),
    "27b int8 two": ("27b", {"max_num_requests": 2, "kv_codec": "int8-g64"}),
    "27b e8 one, no drafts": ("27b", {"max_num_requests": 1, "kv_codec": "rk4v4-e8", "num_drafts": 0}),
}


class EndRunner(FilledRunner):
    """Computes the chunk that ends a prompt as a whole, and of the others the last block."""

    def launch_forward(self, schedule: Schedule) -> None:
        runner = DeviceRunner if any(chunk.ends_prompt for chunk in schedule.chunks) else FilledRunner
        runner.launch_forward(self, schedule)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], help="NAME=DIRECTORY of artifacts")
    parser.add_argument("--only", nargs="*", help="names of configurations; all when not given")
    parser.add_argument("--one", help="a configuration to run in this process")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    models = dict(each.split("=", 1) for each in chosen.models)
    if chosen.one:
        print(json.dumps(measure(settings(chosen.one, models))))
        return 0
    rows = [apart(name, chosen.models) for name in chosen.only or CONFIGURATIONS if CONFIGURATIONS[name][0] in models]
    report = {"device": torch.cuda.get_device_name(), "torch": version("torch"), "date": time.strftime("%Y-%m-%d")}
    if chosen.out:
        chosen.out.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["planned"] < row["taken"] for row in rows))


def settings(name: str, models: dict[str, str]) -> EngineConfig:
    model, changes = CONFIGURATIONS[name]
    context = changes.get("max_model_len", LONG)
    defaults = {"max_model_len": context, "kv_cache_tokens": context * changes["max_num_requests"]}
    return EngineConfig(model=models[model], device="cuda", longest_gap_ms=1e6, **defaults | changes)


def apart(name: str, models: Sequence[str]) -> dict[str, Any]:
    """One configuration in a process of its own, printed."""
    command = [sys.executable, "-m", "tests.bench.plan_peaks", "--one", name, "--models", *models]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=ENGINE_ENVIRONMENT | os.environ)
    if done.returncode:
        print(f"{name}: ended with {done.returncode}", flush=True)
        return {"name": name, "planned": 0, "taken": 1}
    row = {"name": name} | json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: planned {row['planned']:,} taken {row['taken']:,}: {row['unused_share']:.2%} unused", flush=True)
    for part, (planned, taken) in row["parts"].items():
        print(f"  {part:<28}{planned:>18,}{taken:>18,}{planned - taken:>18,}", flush=True)
    return row


def measure(config: EngineConfig) -> dict[str, Any]:
    began = time.monotonic()
    core = load_engine(config, is_ahead=True, runner_type=EndRunner)
    started_s = time.monotonic() - began
    torch.cuda.synchronize()
    at_start = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    exercise(core, config)
    torch.cuda.synchronize()
    reserved = max(at_start["reserved"], torch.cuda.max_memory_reserved())
    allocated = max(at_start["allocated"], torch.cuda.max_memory_allocated())
    outside = used_bytes() - torch.cuda.memory_reserved()
    graphs = sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0))
    parts = by_part(core.info.planned_bytes, held, graphs, allocated, reserved, outside)
    planned, taken = sum(core.info.planned_bytes.values()), reserved + outside
    return {
        "planned": planned,
        "taken": taken,
        "unused_share": (planned - taken) / planned,
        "parts": parts,
        "reserved_at_start": at_start["reserved"],
        "reserved_after": torch.cuda.max_memory_reserved(),
        "held": held,
        "start_s": round(started_s, 1),
        "settings": config.model_dump(mode="json", exclude_unset=True),
        "plan": core.info.planned_bytes,
    }


def used_bytes() -> int:
    """Of this process, as the driver counts it; where it names no processes, of the whole card."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    pairs = (line.split(",") for line in listed.splitlines())
    found = {int(pid): int(mib) * 2**20 for pid, mib in pairs if mib.strip().isdigit()}
    free, total = torch.cuda.mem_get_info()
    return found.get(os.getpid(), total - free)


def by_part(
    planned: dict[str, int], held: int, graphs: int, allocated: int, reserved: int, outside: int
) -> dict[str, tuple[int, int]]:
    """Planned and taken. A part's memory may be another's too, one after the other: what is taken adds up."""
    whole = sum(count for name, count in planned.items() if name not in WORK)
    work = {name: planned.get(name, 0) for name in WORK}
    return {
        "weights, caches, tables": (whole, held - graphs),
        "passes as graphs": (work["decode workspace"], graphs),
        "prompts and samplings": (work["prefill workspace"] + work["staging of the host cache"], allocated - held),
        "between allocations": (work["reserve"], reserved - allocated),
        "outside of torch": (work["CUDA context"] + work["CUDA graphs"], outside),
    }


def exercise(core: EngineCore, config: EngineConfig) -> None:
    """Every form of choosing tokens, after chunks near and far, alone and together."""
    assert config.max_model_len is not None
    longest = config.max_model_len - 64
    lengths = [("short", 70), ("chunk", config.prefill_chunk or 4096), ("long", longest)]
    for name, count in lengths:
        run(core, [request(name, count, temperature=0.0)])
    together = range(config.max_num_requests)
    run(core, [request(f"greedy {i}", 100 + i, temperature=0.0) for i in together])
    run(core, [request(f"logprobs {i}", 2000 + i, temperature=1.0, top_p=0.9, logprobs=20) for i in together])
    run(core, [request(f"penalties {i}", 100, temperature=1.0, presence_penalty=0.5, top_k=20) for i in together])


def request(name: str, num_prompt_tokens: int, **sampling: Any) -> Request:
    prompt = tuple(index * 7919 % 100_000 for index in range(num_prompt_tokens))
    return Request(name, prompt, SamplingParams(max_tokens=24, **sampling), name)


def run(core: EngineCore, requests: Sequence[Request]) -> None:
    for each in requests:
        core.add(each)
    while not core.is_idle:
        core.step()


if __name__ == "__main__":
    sys.exit(main())
