"""The whole stack as a user starts it: gateway, server and engine on the embedded checkpoint."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for(condition, timeout_s: float, what: str):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


@dataclasses.dataclass
class Stack:
    """A running `python -m router.local` and what it printed so far."""

    process: subprocess.Popen
    gateway_port: int
    server_port: int
    admin_port: int
    lines: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def text(self) -> str:
        return "".join(self.lines)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.text()
            return answers(f"{self.url}/ready") and "curl" in self.text()

        wait_for(ready, START_TIMEOUT_S, f"the stack is ready:\n{self.text()}")

    def engine_pid(self) -> int:
        """The process that holds the model: the largest one below the server."""
        below = descendants(self.process.pid)
        assert below, "the stack has no children"
        return max(below, key=resident_bytes)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except FileNotFoundError:
        return 0


def start_stack(*flags: str, environment: dict[str, str] | None = None) -> Stack:
    gateway, server, admin = free_port(), free_port(), free_port()
    ports = ("--router-port", str(gateway), "--server-port", str(server), "--admin-port", str(admin))
    process = subprocess.Popen(
        [sys.executable, "-m", "router.local", *ports, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    stack = Stack(process, gateway, server, admin, [])
    threading.Thread(target=lambda: stack.lines.extend(iter(process.stdout.readline, "")), daemon=True).start()
    return stack


def end(stack: Stack) -> None:
    """Leaves nothing behind, whatever the test did to the stack."""
    below = descendants(stack.process.pid) if stack.process.poll() is None else []
    if stack.process.poll() is None:
        stack.process.send_signal(signal.SIGTERM)
        try:
            stack.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            stack.process.kill()
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    stack.process.wait(timeout=10)
    stack.process.stdout.close()
