"""`python -m router`: the gateway and its admin port in one process."""

import asyncio
import errno
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import uvicorn
import uvloop

from config import ConfigError, RouterConfig, load, usage
from router.admin import admin_app
from router.app import Gateway
from router.log import start_logging

_log = logging.getLogger("longlane.router")
# above the idle time after which clients drop a pooled connection themselves
_KEEP_ALIVE_S = 75


class PortError(Exception):
    """A port cannot be listened on; the text says what to do."""


class QuietServer(uvicorn.Server):
    """Leaves signals to `serve`, which stops both servers."""

    def capture_signals(self) -> nullcontext[None]:
        return nullcontext()


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket; raises PortError that names the flag to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortError(f"port {port} on {host} is taken: stop what listens there or choose {flag} N") from error
        raise PortError(f"cannot listen on {host} port {port} ({flag}): {error.strerror}") from error
    return listener


async def serve(config: RouterConfig, listener: socket.socket, admin_listener: socket.socket) -> None:
    """Runs until SIGTERM or SIGINT, then lets requests in flight finish for up to `drain_s`."""
    gateway = Gateway(config)
    servers = [http_server(config, gateway, "on"), http_server(config, admin_app(gateway), "off")]

    def stop() -> None:
        for server in servers:
            # a second signal does not wait for the drain
            server.force_exit = server.should_exit
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    _log.info("gateway on %s, admin on %s", _address(listener), _address(admin_listener))
    await asyncio.gather(servers[0].serve([listener]), servers[1].serve([admin_listener]))


def main(argv: Sequence[str]) -> int:
    sections = {"router": RouterConfig}
    if {"--help", "-h"} & set(argv):
        print(usage("router", sections))
        return 0
    try:
        config = load(sections, argv)["router"]
        start_logging(config.log_level)
        listener = bind(config.host, config.port, "--port")
        admin_listener = bind(config.admin_host, config.admin_port, "--admin-port")
    except (ConfigError, PortError) as error:
        print(f"longlane gateway: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, listener, admin_listener))
    return 0


def http_server(config: RouterConfig, app: object, lifespan: str) -> QuietServer:
    return QuietServer(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_s)),
        )
    )


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
