"""``python -m server``: the OpenAI-compatible server over the engine."""

import asyncio
import contextlib
import functools
import gc
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from config import ConfigError, EngineConfig, ServerConfig, load_keys
from config.listen import KEEP_ALIVE_S, PortError, address, bind, deadline_protocol
from config.load import load, usage
from config.output import while_read
from engine import Engine, EngineClient, resolve_checkpoint
from server.app import build_app
from server.auth import AccessControl
from server.checkpoint import TextFiles, load_text_files
from server.metrics import EngineCollector, ServerMetrics
from server.model import ServedModel
from server.scripted import ScriptedEngine
from server.serving import Serving

SECTIONS = {"engine": EngineConfig, "server": ServerConfig}
BACKLOG = 2048
# for the events that end what is still in flight after the drain time
LAST_WORDS_S = 2


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(usage("server", SECTIONS))
        return 0
    try:
        settings = load(SECTIONS, argv)
        return serve(settings["engine"], settings["server"])
    except (ConfigError, PortError) as error:
        print(error, file=sys.stderr)
        return 1


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Runs until a signal or until the engine cannot be started, or not again. raises ConfigError, PortError"""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keys = load_keys(config.keys_file) if config.keys_file else None
    listener = listen(config.host, config.port)
    name = config.served_model_name or Path(engine_config.model).name
    # the scripted engine reads the same 20 MB
    load_once = functools.cache(load_text_files)
    engine = make_engine(engine_config, config, load_once)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine, name))
    failures: list[Exception] = []

    def announce(model: ServedModel) -> None:
        keep_loaded()
        # whoever started it may have stopped listening to it, and it serves all the same
        with contextlib.suppress(BrokenPipeError):
            print(banner(model, address(listener), config), flush=True)

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    serving = Serving(
        config, engine, name, ServerMetrics(registry, name), load=load_once, on_ready=announce, on_failure=give_up
    )
    server = DrainingServer(uvicorn_config(build_app(serving, AccessControl(config, keys)), config), serving)
    run(server, listener)
    for error in failures:
        print(f"there is no engine to serve: {error}", file=sys.stderr)
    return 1 if failures else 0


class DrainingServer(uvicorn.Server):
    """Tells what outlives the drain time that it ends, and why, before its connection is closed."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self._serving = serving

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(self._serving.config.drain_s, self._serving.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def keep_loaded() -> None:
    """What was loaded stays: a collection that walks through it holds up every stream for as long as it takes."""
    gc.collect()
    gc.freeze()


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    # uvicorn raises the signal again when it has drained: the end was asked for, so it is no failure
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.signal(signal.SIGINT, lambda *_: None)
    server.run(sockets=[listener])


def make_engine(engine_config: EngineConfig, config: ServerConfig, load: Callable[[Path], TextFiles]) -> Engine:
    if config.engine == "local":
        return EngineClient(engine_config)
    return ScriptedEngine(
        config.script,
        resolve_checkpoint(engine_config.model),
        max_model_len=engine_config.max_model_len,
        max_num_requests=engine_config.max_num_requests,
        max_queued_requests=engine_config.max_queued_requests,
        load=load,
    )


def listen(host: str, port: int) -> socket.socket:
    """Open at once, so that clients wait while the engine loads. raises PortError"""
    listener = bind(host, port, "LONGLANE_SERVER_PORT or --port")
    listener.listen(BACKLOG)
    return listener


def uvicorn_config(app: object, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=deadline_protocol(config.request_timeout_s),
        lifespan="on",
        log_config=None,
        # one line says what is served; uvicorn's own chatter is for debugging
        log_level="warning" if config.log_level == "info" else config.log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(config.drain_s) + LAST_WORDS_S,
    )


def banner(model: ServedModel, url: str, config: ServerConfig) -> str:
    access = "API keys required" if config.keys_file else "no keys set: any key is accepted, this machine only"
    return f"serving {model.name} on {model.info.device} at {url}/v1 (context {model.max_model_len} tokens; {access})"


if __name__ == "__main__":
    sys.exit(while_read(main, sys.argv[1:]))
