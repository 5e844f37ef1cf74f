"""`python -m tests.bench.replay simulate|compare|starve|real|write [FILE]`: traces against scheduler and cache."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from engine.chunk_budget import sizes_to_time
from engine.scheduler import Scheduler
from tests.bench.replay.generate import Traffic, generate
from tests.bench.replay.policies import EVICTION, PLACEMENT
from tests.bench.replay.simulate import Costs, Record, Result, Simulation, percentile, result_of
from tests.bench.replay.trace import Call, Piece, read_trace, write_trace

SMALL = Traffic(num_agents=3, num_tasks=2, num_steps=6, num_questions=10)
HEAD = " | ".join(field.name for field in fields(Result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["simulate", "compare", "starve", "real", "write"])
    parser.add_argument("file", nargs="?", type=Path, help="a trace; generated from the seed when not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-tokens", type=int, default=2_000_000)
    parser.add_argument("--snapshots", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--gap-ms", type=float, default=100.0)
    parser.add_argument("--prompts-only", action="store_true", help="keep nothing that was computed token by token")
    parser.add_argument("--cuts", action="store_true", help="chunks end where states are to stand")
    parser.add_argument("--tokens-per-step", type=int, default=3)
    parser.add_argument("--factor", type=int, default=40, help="of `real`: texts are so many times shorter")
    for field in fields(Costs):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=float, default=field.default)
    arguments = parser.parse_args()
    if arguments.what == "write":
        write_trace(arguments.file, generate(Traffic(), arguments.seed))
        return
    calls = read_trace(arguments.file) if arguments.file else generate(Traffic(), arguments.seed)
    print(f"{time.strftime('%Y-%m-%d')}  {' '.join(sys.argv[1:])}\n{costs_of(arguments)}")
    {"simulate": simulate, "compare": compare, "starve": starve, "real": real}[arguments.what](calls, arguments)


def costs_of(arguments: argparse.Namespace) -> Costs:
    return Costs(**{field.name: getattr(arguments, field.name) for field in fields(Costs)})


def scheduler_of(arguments: argparse.Namespace, eviction: str = "chosen", **changes: int) -> Scheduler:
    sizes = {"kv_tokens": arguments.kv_tokens, "snapshots": arguments.snapshots, "chunk": arguments.chunk} | changes
    scheduler = Scheduler(
        num_blocks=sizes["kv_tokens"] // 64,
        num_slots=arguments.slots,
        prefill_chunk=sizes["chunk"],
        num_drafts=0,
        max_queued_requests=10**6,
        max_queued_tokens=10**9,
        num_snapshots=sizes["snapshots"],
        reuses_decoded=not arguments.prompts_only,
        longest_gap_s=arguments.gap_ms / 1000,
        keeps_inside=not arguments.cuts,
    )
    # as an engine on a GPU times them at its start
    for size in sizes_to_time(sizes["chunk"]):
        scheduler.expect(size, costs_of(arguments).of_prompt(size))
    scheduler._reuse._cache = EVICTION[eviction](scheduler._pool, sizes["snapshots"], b"")
    return scheduler


def records_of(
    calls: Sequence[Call],
    arguments: argparse.Namespace,
    eviction: str = "chosen",
    placement: str = "chosen",
    **changes: int,
) -> list[Record]:
    scheduler = scheduler_of(arguments, eviction, **changes)
    simulation = Simulation(
        calls,
        scheduler,
        costs_of(arguments),
        tokens_per_step=arguments.tokens_per_step,
        marks_of=PLACEMENT[placement],
    )
    return list(simulation.run().records.values())


def simulate(calls: Sequence[Call], arguments: argparse.Namespace) -> None:
    records = records_of(calls, arguments)
    print(f"| group | {HEAD} |")
    print(f"| all | {result_of(records).line()} |")
    for group in sorted({record.call.group for record in records}):
        print(f"| {group} | {result_of([r for r in records if r.call.group == group]).line()} |")


def compare(calls: Sequence[Call], arguments: argparse.Namespace) -> None:
    """Each policy with each budget."""
    print(f"| KV tokens | snapshots | eviction | placement | {HEAD} |")
    for kv_tokens, snapshots in ((2_000_000, 64), (2_000_000, 24), (600_000, 16)):
        for eviction, placement in (
            ("lru", "chosen"),
            ("cost", "chosen"),
            ("chosen", "chunk ends"),
            ("chosen", "system"),
            ("chosen", "chosen"),
        ):
            records = records_of(calls, arguments, eviction, placement, kv_tokens=kv_tokens, snapshots=snapshots)
            row = f"| {kv_tokens:,} | {snapshots} | {eviction} | {placement} | {result_of(records).line()} |"
            print(row, flush=True)


def starve(_: Sequence[Call], arguments: argparse.Namespace) -> None:
    """Ten prompts of 1,000 tokens alone, and beside one of 200,000; all at once, and one every 300 ms."""
    for every_s in (0.0, 0.3):
        shorts = [short_call(number, 0.5 + every_s * number) for number in range(10)]
        long = Call("long", "", (Piece("user", "long", 200_000),), Piece("assistant", "long-answer", 100), group="long")
        alone, beside = (records_of(calls, arguments) for calls in (shorts, [*shorts, long]))
        times = [[r.first_s - r.submitted_s for r in records if r.call.group != "long"] for records in (alone, beside)]
        p95 = [percentile(each, 0.95) for each in times]
        first_s = next(r.first_s - r.submitted_s for r in beside if r.call.group == "long")
        print(
            f"one every {every_s} s: p95 TTFT of the short ones {p95[0]:.3f} s alone, {p95[1]:.3f} s beside the long "
            f"one ({p95[1] / p95[0]:.2f} times); the long one's TTFT {first_s:.2f} s"
        )


def short_call(number: int, wait_s: float) -> Call:
    return Call(
        f"short-{number}",
        "",
        (Piece("user", f"short-{number}", 1000),),
        Piece("assistant", f"short-{number}-answer", 50),
        wait_s=wait_s,
        group="short",
    )


def real(calls: Sequence[Call], arguments: argparse.Namespace) -> None:
    """A given trace, or a small one."""
    if arguments.file is None:
        calls = generate(SMALL, arguments.seed)
    # only here: the simulation needs no torch
    from tests.bench.replay.real import replay

    for name, value in asdict(replay(calls, arguments.factor, arguments.snapshots)).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
