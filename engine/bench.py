"""Measures a checkpoint through the real engine: `python -m engine.bench --model DIR`. Prints JSON.

Prefill is prompt tokens over the time to the first token, decode the tokens after the first over the time that they
took, of several requests while all of them decode; both as a reader of the streams sees them, so the process boundary
is part of it. Nothing is reused.
"""

import asyncio
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from pydantic import Field

from config import ConfigError, EngineConfig, load
from config.load import usage
from config.output import while_read
from config.section import Section
from engine import EngineClient, EngineError, EngineInfo, Request, SamplingParams
from engine.models.config import MoeConfig, read_config

# an RTX 4090's memory as specified. The projection takes it for as well used as this card's; where the host or the
# launches decide, a smaller card would do better than that
RTX_4090_BYTES_PER_S = 1.008e12


class BenchConfig(Section):
    """What is measured: every prompt length with every number of requests at once."""

    prompt_tokens: tuple[int, ...] = (512, 2048)
    requests: tuple[int, ...] = (1, 4)

    fills: bool = False
    """Fill the KV cache and the states with random numbers instead of computing prompts, to measure decoding behind
    long ones at once. Rows say so, and have no prefill figures."""

    breakdown: int | None = Field(default=None, ge=1)
    """Then run a request behind a prompt of so many tokens, filled as above, and list the kernels of a step; needs a
    GPU."""

    output_tokens: int = Field(default=128, ge=2)
    """Tokens that each request generates, whatever they are."""

    temperature: float = Field(default=0.0, ge=0)

    prompt_file: Path | None = None
    """JSON list of token ids to take prompts from; random ids, which no draft foresees, when not set."""

    out: Path | None = None
    """File for the JSON, beside standard output."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When a request was submitted, and when how many of its tokens came."""

    submitted: float
    arrivals: tuple[tuple[float, int], ...]

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]

    @property
    def first_s(self) -> float:
        """From submission to the first token."""
        return self.first - self.submitted


def decode_rate(timings: Sequence[Timing]) -> float:
    """Tokens a second from the first token of the last request to begin to the end of the first to end; where no such
    time is, from the first token of all to the last."""
    began, ended = max(t.first for t in timings), min(t.last for t in timings)
    if ended <= began:
        began, ended = min(t.first for t in timings), max(t.last for t in timings)
    tokens = sum(count for t in timings for time, count in t.arrivals if began < time <= ended)
    return tokens / (ended - began)


def main() -> int:
    sections = {"engine": EngineConfig, "bench": BenchConfig}
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(usage("engine.bench", sections))
        return 0
    try:
        settings = load(sections, sys.argv[1:])
        report = asyncio.run(measure(settings["engine"], settings["bench"]))
    except (ConfigError, EngineError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2))
    return 0


async def measure(engine: EngineConfig, bench: BenchConfig) -> dict[str, Any]:
    """raises  CheckpointError, CapacityError, ContextLengthError"""
    changes: dict[str, Any] = {"prefix_caching": False}
    if bench.fills:
        # chunks of which one block is computed are no measure for the size of the next ones
        changes["longest_gap_ms"] = 1e6
    engine = engine.model_copy(update=changes)
    copied = copy_bytes_per_s()
    client = EngineClient(engine, "engine.bench_filled" if bench.fills else "engine.process")
    began = time.monotonic()
    await client.start()
    load_s = time.monotonic() - began
    try:
        pool = prompt_pool(bench, client.info.vocab_size)
        await run_round(client, bench, pool, num_prompt_tokens=64, count=1, name="warm-up")
        report = about(engine, client) | {"load_s": round(load_s, 2), "copy_bytes_per_s": copied, "rows": []}
        for num_prompt_tokens, count in product(bench.prompt_tokens, bench.requests):
            report["rows"].append(await measure_row(client, engine, bench, pool, num_prompt_tokens, count, copied))
            print(json.dumps(report["rows"][-1]), file=sys.stderr, flush=True)
            keep(report, bench.out)
    finally:
        await client.close()
    if bench.breakdown is not None:
        # torch takes seconds to import, and only this needs it here
        from engine.breakdown import breakdown

        report["breakdown"] = breakdown(engine, bench.breakdown)
        keep(report, bench.out)
    return report


def keep(report: dict[str, Any], out: Path | None) -> None:
    """After every row: what comes next may not end."""
    if out is not None:
        out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


async def measure_row(
    client: EngineClient,
    engine: EngineConfig,
    bench: BenchConfig,
    pool: list[int],
    num_prompt_tokens: int,
    count: int,
    copied: float | None,
) -> dict[str, Any]:
    """copied  bytes that the device copies in a second, if it is a GPU"""
    before = client.stats
    name = f"{num_prompt_tokens}-{count}"
    timings = await run_round(client, bench, pool, num_prompt_tokens, count, name)
    drafted = client.stats.num_draft_tokens - before.num_draft_tokens
    accepted = client.stats.num_accepted_tokens - before.num_accepted_tokens
    first_s, rate = max(t.first_s for t in timings), decode_rate(timings)
    context = num_prompt_tokens + bench.output_tokens // 2
    step_bytes = decode_bytes(client.info.planned_bytes, Path(client.info.checkpoint_dir), context, count, client.info)
    return {
        "prompt_tokens": num_prompt_tokens,
        "recipe": recipe_of(client, engine),
        "codec": client.info.kv_codec,
        "requests": count,
        "drafts": client.info.num_drafts,
        "accepted_share": round(accepted / drafted, 3) if drafted else None,
        "prefilled": not bench.fills,
        "ttft_s": None if bench.fills else round(min(t.first_s for t in timings), 3),
        "prefill_tok_s": None if bench.fills else round(num_prompt_tokens * count / first_s, 1),
        "decode_tok_s": round(rate, 1),
        "decode_tok_s_each": round(rate / count, 1),
        "decode_tok_s_each_on_4090": None if copied is None else round(rate / count * RTX_4090_BYTES_PER_S / copied, 1),
        "step_bytes": step_bytes,
        # with drafts, a step gives several tokens and reads MTP's weights too
        "bandwidth_share": None
        if copied is None or client.info.num_drafts
        else round(step_bytes * rate / count / copied, 3),
        "peak_bytes": client.stats.peak_bytes,
        "plan_bytes": sum(client.info.planned_bytes.values()),
    }


def decode_bytes(planned: Mapping[str, int], checkpoint_dir: Path, context: int, count: int, info: EngineInfo) -> int:
    """Bytes that a pass over `count` requests without drafts has to read, each of this context: all weights but the
    embedding and MTP's, of routed experts those that so many tokens choose on average, keys and values, and states.

    planned  bytes by what they are for, as the planner names it
    """
    config = read_config(checkpoint_dir)
    weights = sum(
        num_bytes
        for name, num_bytes in planned.items()
        if name.startswith("weights: ") and name.removeprefix("weights: ") not in ("embedding", "experts", "MTP")
    )
    if isinstance(config.feed_forward, MoeConfig):
        skipped = 1 - config.feed_forward.num_experts_per_tok / config.feed_forward.num_experts
        weights += round(planned["weights: experts"] * (1 - skipped**count))
    keys_values = planned["KV blocks"] // info.kv_cache_tokens * context
    states = planned["GDN states"] // info.max_num_requests
    return weights + count * (keys_values + states)


def recipe_of(client: EngineClient, engine: EngineConfig) -> str:
    """Of an artifact; of a checkpoint the type that its weights are in."""
    manifest = Path(client.info.checkpoint_dir) / "longlane.json"
    return json.loads(manifest.read_text(encoding="utf-8"))["recipe"] if manifest.exists() else engine.dtype


def copy_bytes_per_s() -> float | None:
    """Of the GPU, if there is one; in a process of its own, which gives all memory back."""
    command = [sys.executable, "-m", "engine.copy_speed"]
    found = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
    return None if found.stdout.strip() == "no GPU" else float(found.stdout)


async def run_round(
    client: EngineClient, bench: BenchConfig, pool: list[int], num_prompt_tokens: int, count: int, name: str
) -> list[Timing]:
    """Requests of one length at once, each with a prompt of its own."""
    sampling = SamplingParams(max_tokens=bench.output_tokens, temperature=bench.temperature, seed=0)
    requests = [
        # a tenant of its own each: prompts of other lengths begin alike, and what is measured must be computed
        Request(f"{name}-{index}", cut(pool, index * num_prompt_tokens, num_prompt_tokens), sampling, f"{name}-{index}")
        for index in range(count)
    ]
    return await asyncio.gather(*(run_request(client, request) for request in requests))


async def run_request(client: EngineClient, request: Request) -> Timing:
    began = time.monotonic()
    await client.submit(request)
    arrivals = [(time.monotonic(), len(event.token_ids)) async for event in client.stream(request.request_id)]
    return Timing(began, tuple(arrivals))


def prompt_pool(bench: BenchConfig, vocab_size: int) -> list[int]:
    if bench.prompt_file is not None:
        return json.loads(bench.prompt_file.read_text(encoding="utf-8"))
    return Random(0).choices(range(vocab_size), k=max(bench.prompt_tokens) * max(bench.requests))


def cut(pool: list[int], start: int, count: int) -> tuple[int, ...]:
    """`count` ids from `start` on, from the beginning again where the pool ends."""
    return tuple(pool[(start + index) % len(pool)] for index in range(count))


def about(engine: EngineConfig, client: EngineClient) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "machine": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "device": client.info.device,
        "python": platform.python_version(),
        "torch": version("torch"),
        "triton": _version("triton"),
        "model": engine.model,
        "dtype": engine.dtype,
        "threads": engine.num_threads or len(os.sched_getaffinity(0)),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of the source tree, where it is a git checkout."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(while_read(main))
