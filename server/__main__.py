"""``python -m server``: the OpenAI-compatible server over the engine."""

import errno
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from sse_starlette.sse import AppStatus

from config import ConfigError, EngineConfig, ServerConfig, load_keys
from config.load import load, usage
from engine import Engine, EngineClient, resolve_checkpoint
from server.app import build_app
from server.auth import AccessControl
from server.checkpoint import TextFiles, load_text_files
from server.metrics import EngineCollector, ServerMetrics
from server.model import ServedModel
from server.scripted import ScriptedEngine
from server.serving import Serving

SECTIONS = {"engine": EngineConfig, "server": ServerConfig}
# longer than clients keep idle connections, so that it is never the server that closes under them
KEEP_ALIVE_S = 75
BACKLOG = 2048


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(usage("server", SECTIONS))
        return 0
    try:
        settings = load(SECTIONS, argv)
        return serve(settings["engine"], settings["server"])
    except (ConfigError, AddressError) as error:
        print(error, file=sys.stderr)
        return 1


class AddressError(Exception):
    """The server cannot listen where it should."""


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Runs until a signal or until the engine cannot be started, or not again. raises ConfigError, AddressError"""
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
        print(banner(model, listener.getsockname(), config), flush=True)

    def give_up(error: Exception) -> None:
        failures.append(error)
        server.should_exit = True

    serving = Serving(
        config, engine, name, ServerMetrics(registry, name), load=load_once, on_ready=announce, on_failure=give_up
    )
    server = uvicorn.Server(uvicorn_config(build_app(serving, AccessControl(config, keys)), config))
    run(server, listener)
    for error in failures:
        print(f"there is no engine to serve: {error}", file=sys.stderr)
    return 1 if failures else 0


def run(server: uvicorn.Server, listener: socket.socket) -> None:
    # streams in flight finish within the drain time; sse-starlette would cut them at once
    AppStatus.disable_automatic_graceful_drain()
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
    """raises AddressError, which says how to choose another address"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is spelled out
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressError(
                f"port {port} on {host} is taken: stop what listens there, or choose another with --port or "
                "LONGLANE_SERVER_PORT"
            ) from error
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host") from error
    return listener


def uvicorn_config(app: object, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        log_config=None,
        # one line says what is served; uvicorn's own chatter is for debugging
        log_level="warning" if config.log_level == "info" else config.log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(config.drain_s)),
    )


def banner(model: ServedModel, address: tuple, config: ServerConfig) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    access = "API keys required" if config.keys_file else "no keys set: any key is accepted, this machine only"
    return (
        f"serving {model.name} on {model.info.device} at http://{host}:{address[1]}/v1 "
        f"(context {model.max_model_len} tokens; {access})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
