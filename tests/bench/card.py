"""Everything that has to be seen on a GPU, in the order of its worth, within a time.

    python3 -m tests.bench.card --out DIR --seconds 500 [--models DIR] [--only NAME ...] [--list]

Checks run first and beside each other, then measurements one by one, each in a process of its own and within a time of
its own; what the time left does not cover is passed over. DIR/NAME.log holds what each printed, DIR/card.json how it
ended. Artifacts of random numbers are written into the folder of --models (a file system in memory by default) where
they are missing. `tests/bench/results/README.md` says what the figures of one card are.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

PROFILES = {"35b": "35b-a3b", "27b": "27b"}
TABLE = (
    " --num-drafts 0 --max-num-requests 4 --prefill-chunk 8192 --requests 1,4 "
    "--kv-cache-tokens 1050000 --fills --prompt-tokens 7680,64512,130048,260096 --kv-codec "
)


@dataclass(frozen=True, slots=True)
class Run:
    """One command.

    most_s     it may take
    arguments  of Python; the names of PROFILES stand for their artifacts, {out} for the folder of results
    """

    name: str
    most_s: float
    arguments: str

    @property
    def models(self) -> list[str]:
        return [name for name in PROFILES if f"{{{name}}}" in self.arguments]


@dataclass(frozen=True, slots=True)
class Ended:
    """status  None where the time was over"""

    name: str
    seconds: float
    status: int | None


# of these the time says nothing, so that they share the card
CHECKS = (
    Run("real-size", 240, "-m pytest -q -p no:benchmark -m gpu tests/ops/test_quantized_matmul.py"),
    Run("kernels", 420, "-m pytest -q -p no:benchmark -n 6 -m kernels tests/ops"),
    Run("engine", 420, "-m pytest -q -p no:benchmark -x -m gpu tests/engine"),
)
MEASUREMENTS = (
    Run("35b-int8", 75, "-m engine.bench --model {35b}" + TABLE + "int8-g64"),
    Run("35b-e8", 75, "-m engine.bench --model {35b}" + TABLE + "rk4v4-e8"),
    Run("prompts", 45, "-m tests.bench.prefill_breakdown --model {35b} --out {out}/prompts.json"),
    Run("breakdown", 45, "-m engine.bench --model {35b} --num-drafts 0 --max-num-requests 1 --breakdown 7680"),
    Run(
        "24-gib",
        75,
        "-m engine.bench --model {35b} --max-model-len 262144 --kv-cache-tokens 1048576 --max-num-requests 4 "
        "--kv-codec rk4v4-e8 --embedding-memory host --memory-bytes 24GiB --num-drafts 0 --fills "
        "--prompt-tokens 260096 --requests 1,4",
    ),
    Run(
        "returns",
        100,
        "tests/bench/returns.py --model {35b} --prompt-tokens 90000 --kills=false --max-model-len 131072 "
        "--max-num-requests 4 --num-drafts 0 --host-cache-bytes 12GiB --fills=true --others 5 --repeats 3 "
        "--kv-cache-tokens 700032",
    ),
    Run(
        "beside",
        90,
        "tests/bench/beside.py --model {35b} --long-tokens 200000 --short-tokens 1000 --max-model-len 262144 "
        "--kv-cache-tokens 524288 --max-num-requests 12 --num-drafts 0",
    ),
    Run("27b-int8", 90, "-m engine.bench --model {27b}" + TABLE + "int8-g64"),
    Run(
        "35b-computed",
        120,
        "-m engine.bench --model {35b} --num-drafts 0 --max-num-requests 1 --prefill-chunk 8192 --kv-codec int8-g64 "
        "--kv-cache-tokens 300000 --prompt-tokens 7680,64512,260096 --requests 1",
    ),
    Run("peaks", 240, "-m tests.bench.plan_peaks --models 35b={35b} 27b={27b} --out {out}/peaks.json"),
)
# of what the runs before have compiled
LAST = Run("machine-code", 60, "-m tests.ops.machine_code {cache}")


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("card"))
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", nargs="*", help="names of runs; all when not given")
    parser.add_argument("--list", action="store_true", help="name them and end")
    asked = parser.parse_args()
    runs = [run for run in (*CHECKS, *MEASUREMENTS, LAST) if not asked.only or run.name in asked.only]
    if asked.list:
        print(*(f"{run.name:14} {run.most_s:4.0f} s  {run.arguments}" for run in runs), sep="\n")
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    places = {name: asked.models / f"longlane-{name}" for name in PROFILES}
    cache = os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache")
    places |= {"out": asked.out, "cache": cache}
    write_missing({name for run in runs for name in run.models}, places)
    ended = []
    for group in groups(runs):
        left_s = asked.seconds - (time.monotonic() - began)
        with ThreadPoolExecutor(max(1, len(group))) as threads:
            ended += threads.map(lambda run, left_s=left_s: run_one(run, places, asked.out, left_s), group)
        (asked.out / "card.json").write_text(json.dumps([asdict(one) for one in ended if one], indent=1))
    failed = [one for one in ended if one and one.status != 0]
    return int(bool(failed))


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    checks = [run for run in runs if run in CHECKS]
    return [group for group in (checks, *([run] for run in runs if run not in CHECKS)) if group]


def run_one(run: Run, places: Mapping[str, Path], out: Path, left_s: float) -> Ended | None:
    """Within the time left, of which it has to have a third of what it may take; None where that is not there."""
    if left_s < run.most_s / 3:
        print(f"{run.name:14} passed over: {left_s:.0f} s are left", flush=True)
        return None
    command = [sys.executable, *run.arguments.format(**places).split()]
    began, status = time.monotonic(), None
    with (out / f"{run.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(min(run.most_s, left_s))
        except subprocess.TimeoutExpired:
            # what it has started holds the card too
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = Ended(run.name, round(time.monotonic() - began, 1), status)
    print(f"{ended.name:14} {'time over' if status is None else f'status {status}':10} {ended.seconds} s", flush=True)
    return ended


def write_missing(models: Iterable[str], places: Mapping[str, Path]) -> None:
    for name in models:
        if not places[name].exists():
            writer = ["tests/bench/random_artifact.py", "--profile", PROFILES[name], "--recipe", "w4"]
            subprocess.run([sys.executable, *writer, "--out", places[name]], check=True)


if __name__ == "__main__":
    sys.exit(main())
