"""The programs that the gateway's measurements run: scripted engines behind the real server, and gateways."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import httpx

START_S = 60.0
CHECKPOINT = Path(__file__).parents[2] / "engine/embedded/checkpoint"
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "LONGLANE_ROUTER_LOG_LEVEL": "warning"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def program(*words: object) -> Iterator[subprocess.Popen]:
    """`python -m ...`, ended when the block is."""
    with command([sys.executable, "-m", *words], QUIET) as running:
        yield running


@contextmanager
def command(
    words: Sequence[object], environment: Mapping[str, str], log: Path | None = None
) -> Iterator[subprocess.Popen]:
    """log  file for what it prints; none: beside this program's own words"""
    with log.open("w") if log else nullcontext() as output:
        running = subprocess.Popen(list(map(str, words)), env=os.environ | environment, stdout=output, stderr=output)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(10)


@contextmanager
def engines(count: int, line: dict, directory: Path) -> Iterator[list[str]]:
    """Addresses of servers whose engines answer every message by this line of a script."""
    script = directory / "script.jsonl"
    script.write_text(json.dumps(line))
    with ExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        for port in ports:
            flags = ("--engine", "scripted", "--script", script, "--port", port, "--log-level", "warning")
            stack.enter_context(program("server", *flags, "--model", CHECKPOINT))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            wait_ready(url)
        yield urls


@contextmanager
def gateway(directory: Path, urls: Sequence[str], **settings: object) -> Iterator[tuple[str, int]]:
    """Address and process id of a gateway in front of these upstreams."""
    port = free_port()
    settings = {"port": port, "admin_port": free_port()} | settings
    lines = ["[router]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    for number, url in enumerate(urls):
        lines += ["[[router.upstreams]]", f'name = "engine-{number}"', f'url = "{url}"', 'lane = "long"']
    file = directory / f"gateway-{port}.toml"
    file.write_text("\n".join(lines))
    with program("router", "--config", file) as running:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url)
        # every upstream is checked within one interval
        time.sleep(1.0)
        yield url, running.pid


def wait_ready(url: str, path: str = "/ready") -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(url + path, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{url} was not ready within {START_S:g} s")


def machine() -> str:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} CPUs, load average {load}, Python {sys.version.split()[0]}"


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
