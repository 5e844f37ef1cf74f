"""Where the time of a chunk of a prompt goes on a GPU: kernel by kernel, and what the host takes to launch them.

    python3 -m tests.bench.prefill_breakdown --model DIR --out FILE [--chunk START:ROWS ...]

A chunk of ROWS rows behind START tokens of random numbers goes through the whole model. `host_ms` passes until the last
kernel is launched, `ms` until it has ended; kernels are listed with how often a chunk runs them and for how long.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from datetime import date
from pathlib import Path

import torch
import triton
from torch.profiler import ProfilerActivity, profile

from config import EngineConfig
from config.engine import BLOCK_SIZE
from engine.batch import RequestRows, build_batch
from engine.bench_filled import load_filled

REPEATS = 5
SHOWN = 30


class Chunks:
    """Runs chunks in the first slot of an engine whose cache is full of random numbers."""

    def __init__(self, runner):
        self._runner = runner

    @torch.inference_mode()
    def run(self, start, rows):
        """Returns once everything is launched."""
        tables = self._runner._tables
        tables.begin(0)
        tables.extend(0, list(range(-(-(start + rows) // BLOCK_SIZE))))
        batch = build_batch([RequestRows(0, start, [i * 7919 % 100_000 for i in range(rows)])], tables, commits=True)
        self._runner._forward(batch)


def timed(chunks, start, rows):
    """Medians of the host's time and of the whole, in ms."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        chunks.run(start, rows)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        times.append((launched - began, time.perf_counter() - began))
    return [round(1e3 * statistics.median(column), 2) for column in zip(*times[1:], strict=True)]


def kernels_of(chunks, start, rows):
    """Name -> [count, ms], the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        chunks.run(start, rows)
        torch.cuda.synchronize()
    found = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name[:100]][0] += 1
            found[event.name[:100]][1] += event.time_range.elapsed_us() / 1e3
    return sorted(found.items(), key=lambda item: -item[1][1])


def measured(chunks, start, rows):
    host_ms, ms = timed(chunks, start, rows)
    kernels = kernels_of(chunks, start, rows)
    return {
        "start": start,
        "rows": rows,
        "host_ms": host_ms,
        "ms": ms,
        "tok_s": round(rows / ms * 1e3),
        "launches": sum(count for _, (count, _) in kernels),
        "kernel_ms": round(sum(each for _, (_, each) in kernels), 2),
        "kernels": [[name, count, round(each, 3)] for name, (count, each) in kernels[:SHOWN]],
    }


def pair(text):
    start, _, rows = text.partition(":")
    return int(start), int(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codec", default="int8-g64")
    parser.add_argument("--chunk", type=pair, nargs="*", default=[(0, 8192), (0, 64), (90_048, 64), (90_048, 512)])
    asked = parser.parse_args()
    context = max(start + rows for start, rows in asked.chunk) + BLOCK_SIZE
    config = EngineConfig(
        model=asked.model, device="cuda", kv_codec=asked.codec, max_num_requests=1, max_model_len=context,
        prefix_caching=False, prefill_chunk=max(BLOCK_SIZE, *(rows for _, rows in asked.chunk)), num_drafts=0,
    )  # fmt: skip
    chunks = Chunks(load_filled(config)._runner)
    report = {
        "date": date.today().isoformat(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "codec": asked.codec, "chunks": [],
    }  # fmt: skip
    for start, rows in asked.chunk:
        report["chunks"].append(measured(chunks, start, rows))
        asked.out.write_text(json.dumps(report, indent=1))
        print(json.dumps({key: value for key, value in report["chunks"][-1].items() if key != "kernels"}), flush=True)
        for name, count, each in report["chunks"][-1]["kernels"]:
            print(f"  {each:9.3f} ms {count:5d} x {name}")


if __name__ == "__main__":
    main()
