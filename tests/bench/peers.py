"""`python -m tests.bench.peers`: LiteLLM's proxy and vllm-router beside this gateway, each at the rate it sustains.

All stand in front of the same scripted upstream, one process each, with one key where they have keys. The rate of short
calls doubles until one is too much: calls fail, or the slowest hundredth takes longer than `--limit-ms`. What is added
is measured at a rate that is the same for all, at the highest one that was not too much, and for a few streams. The
other two come from the package index into environments of their own:

    python -m tests.bench.peers prepare
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop

from config import Key
from config.keys import digest, generate, write_keys
from tests.bench.gateway import PLENTY, Target, resident_mb, short_calls, streams, watched
from tests.bench.programs import command, free_port, gateway, machine, percentile, program, wait_ready

HOME = Path(__file__).parents[2] / ".cache/peers"
PACKAGES = {"litellm": "litellm[proxy]==1.106.12", "vllm-router": "vllm-router==0.1.17"}
LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "PYTHONWARNINGS": "ignore"}
SLOWEST_RATE = 12.5
Load = Callable[[Target, argparse.Namespace], Awaitable[list[float]]]


def prepare() -> None:
    for name, package in PACKAGES.items():
        if not (HOME / name / "bin" / name).exists():
            venv.create(HOME / name, with_pip=True)
            subprocess.run([HOME / name / "bin/pip", "install", "-q", package], check=True)


@contextmanager
def longlane(folder: Path, upstream: str) -> Iterator[Target]:
    secret = generate()
    write_keys(folder / "keys.toml", [Key(name="bench", sha256=digest(secret), **PLENTY)])
    settings = {"keys_file": str(folder / "keys.toml"), "gateway_secret": "of the bench"}
    with gateway(folder, [upstream], **settings) as (url, pid):
        yield Target(url, {"authorization": f"Bearer {secret}"}, pid)


@contextmanager
def litellm(folder: Path, upstream: str) -> Iterator[Target]:
    model = {"model": "openai/tiny", "api_base": f"{upstream}/v1", "api_key": "x"}
    settings = {
        "model_list": [{"model_name": "tiny", "litellm_params": model}],
        "general_settings": {"master_key": "sk-bench"},
        "litellm_settings": {"telemetry": False},
    }
    # JSON is YAML as well
    (folder / "litellm.yaml").write_text(json.dumps(settings))
    port = free_port()
    words = [HOME / "litellm/bin/litellm", "--config", folder / "litellm.yaml", "--host", "127.0.0.1", "--port", port]
    with command([*words, "--num_workers", 1], LOCAL, folder / "litellm.log") as running:
        yield _ready(running, port, "/health/readiness", {"authorization": "Bearer sk-bench"}, folder / "litellm.log")


@contextmanager
def vllm_router(folder: Path, upstream: str) -> Iterator[Target]:
    port, log = free_port(), folder / "vllm-router.log"
    words = [HOME / "vllm-router/bin/vllm-router", "--worker-urls", upstream, "--host", "127.0.0.1", "--port", port]
    words += ["--policy", "cache_aware", "--prometheus-port", free_port(), "--log-level", "error"]
    with command(words, LOCAL, log) as running:
        yield _ready(running, port, "/health", {}, log)


def _ready(running: subprocess.Popen, port: int, path: str, headers: dict[str, str], log: Path) -> Target:
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, path)
    except TimeoutError as error:
        raise RuntimeError(log.read_text()[-2000:]) from error
    return Target(url, headers, running.pid)


GATEWAYS = {"Longlane": longlane, "LiteLLM proxy 1.106.12": litellm, "vllm-router 0.1.17": vllm_router}


async def highest_rate(target: Target, arguments: argparse.Namespace) -> float:
    """Calls a second; 0 where even the first rate is too much."""
    sustained, rate = 0.0, SLOWEST_RATE
    while rate <= arguments.most:
        if not await _sustains(target, rate, arguments):
            break
        sustained, rate = rate, 2 * rate
    return sustained


async def _sustains(target: Target, rate: float, arguments: argparse.Namespace) -> bool:
    try:
        times, _ = await watched(target, short_calls, _with(arguments, rate))
    except aiohttp.ClientError:
        return False
    return percentile(times, 0.99) <= arguments.limit_ms


def _with(arguments: argparse.Namespace, rate: float) -> argparse.Namespace:
    return argparse.Namespace(**vars(arguments) | {"rate": rate})


async def measure(name: str, direct: Target, through: Target, arguments: argparse.Namespace) -> str:
    # the first requests pay for connections and imports
    await short_calls(through, argparse.Namespace(rate=5.0, seconds=2.0))
    most = await highest_rate(through, arguments)
    words = [name]
    for load, rate in ((short_calls, arguments.common), (short_calls, most), (streams, most)):
        words += await _added(load, direct, through, _with(arguments, rate)) if rate else ["-"] * 3
    words.insert(4, f"{most:g}/s")
    return " | ".join([*words, f"{resident_mb(through.pid):.0f} MB"])


async def _added(load: Load, direct: Target, through: Target, arguments: argparse.Namespace) -> list[str]:
    without, _ = await watched(direct, load, arguments)
    times, cores = await watched(through, load, arguments)
    added = (percentile(times, share) - percentile(without, share) for share in (0.5, 0.99))
    return [*(f"{milliseconds:.2f} ms" for milliseconds in added), f"{cores:.2f}"]


def main() -> None:
    if sys.argv[1:] == ["prepare"]:
        prepare()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--common", type=float, default=25.0, help="rate at which all are measured")
    parser.add_argument("--most", type=float, default=800.0, help="highest rate that is tried")
    parser.add_argument("--limit-ms", type=float, default=250.0)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--events", type=float, default=20.0)
    arguments = parser.parse_args()
    arguments.idle = 0
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}\n")
    three = "added p50 | p99 | cores"
    print(f"| gateway | {arguments.common:g}/s: {three} | sustains | {three} | streams: {three} | memory |")
    print("|---" * 12 + "|")
    port = free_port()
    with tempfile.TemporaryDirectory() as name, program("tests.bench.upstream", port):
        direct = f"http://127.0.0.1:{port}"
        wait_ready(direct)
        for title, start in GATEWAYS.items():
            with start(Path(name), direct) as through:
                row = uvloop.run(measure(title, Target(direct, {}, through.pid), through, arguments))
                print(f"| {row} |", flush=True)
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
