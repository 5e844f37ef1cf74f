"""The real server on a real socket, in a thread of its own."""

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
from prometheus_client import CollectorRegistry

from config import KeyRing, ServerConfig
from server.__main__ import DrainingServer, listen, uvicorn_config
from server.app import build_app
from server.auth import AccessControl
from server.checkpoint import load_text_files
from server.metrics import EngineCollector, ServerMetrics
from server.scripted import ScriptedEngine
from server.serving import Serving

NAME = "scripted-model"

load_once = functools.cache(load_text_files)


class Live:
    """A running server: its address, its engine, and clients for it."""

    def __init__(self, serving: Serving, port: int, script: Path, server: DrainingServer) -> None:
        self.serving = serving
        self.engine = serving.engine
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=30)
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._script = script
        self.server = server

    def post(self, body: object, path: str = "/v1/chat/completions", **options) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def stream(self, body: dict, path: str = "/v1/chat/completions") -> list[dict | str]:
        """Parsed data lines of a stream; the marker stays a string."""
        return events((self.post({**body, "stream": True}, path)).text)

    def wait_until(self, condition, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "condition never held"
            time.sleep(0.01)

    def metric(self, name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name) and all(label in line for label in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def close(self) -> None:
        self.openai.close()
        self.http.close()


def events(text: str) -> list[dict | str]:
    parts = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in parts), parts
    payloads = [part.removeprefix("data: ") for part in parts]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@contextlib.contextmanager
def running(
    checkpoint: Path, script: list[dict], directory: Path, *, keys: KeyRing | None = None, engine=None, **options
) -> Iterator[Live]:
    """options  of ServerConfig, and max_model_len, max_num_requests, max_queued_requests of the scripted engine"""
    path = directory / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, script)))
    limits = {
        name: options.pop(name)
        for name in ("max_model_len", "max_num_requests", "max_queued_requests")
        if name in options
    }
    config = ServerConfig(port=0, engine="scripted", script=path, log_level="warning", **options)
    engine = engine or ScriptedEngine(path, checkpoint, load=load_once, **limits)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, NAME))
    serving = Serving(config, engine, NAME, ServerMetrics(registry, NAME), load=load_once)
    listener = listen(config.host, 0)
    server = DrainingServer(uvicorn_config(build_app(serving, AccessControl(config, keys)), config), serving)
    thread = threading.Thread(target=_serve, args=(server, listener), daemon=True)
    thread.start()
    live = Live(serving, listener.getsockname()[1], path, server)
    try:
        live.wait_until(lambda: serving.state in ("ready", "closed"), 30)
        yield live
    finally:
        live.close()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not stop"


def _serve(server: DrainingServer, listener) -> None:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listener]))
