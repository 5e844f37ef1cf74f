"""`python -m router`: the gateway and its admin port in one process."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from config import ConfigError, RouterConfig, load, settings_file, usage
from config.listen import PortError, address, bind
from config.output import while_read
from router.admin import admin_app
from router.app import Gateway
from router.guard import beside
from router.listen import http_server
from router.log import start_logging
from router.reload import Reloader

_log = logging.getLogger("longlane.router")


def main(argv: Sequence[str]) -> int:
    sections = {"router": RouterConfig}
    if {"--help", "-h"} & set(argv):
        print(usage("router", sections))
        return 0
    try:
        config, file = load(sections, argv)["router"], settings_file(sections, argv)
        start_logging(config.log_level, config.log_format)
        gateway = Gateway(config)
        reloader = Reloader(gateway, lambda: load(sections, argv)["router"], file)
        listener = bind(config.host, config.port, "--port")
        admin_listener = bind(config.admin_host, config.admin_port, "--admin-port")
    except (ConfigError, PortError) as error:
        print(f"longlane gateway: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(gateway, reloader, listener, admin_listener))
    return 0


async def serve(gateway: Gateway, reloader: Reloader, listener: socket.socket, admin_listener: socket.socket) -> None:
    """Runs until SIGTERM or SIGINT, then lets requests in flight finish for up to `drain_s`. SIGHUP reloads."""
    servers = [
        http_server(gateway.config, gateway, "on"),
        http_server(gateway.config, admin_app(gateway, reloader), "off"),
    ]

    def stop(number: int) -> None:
        for server in servers:
            # a second Ctrl-C does not wait for the drain; a second SIGTERM may only be the echo of a parent's death
            server.force_exit = server.should_exit and number == signal.SIGINT
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, reloader.reload)
    looking = beside(reloader.run())
    _log.info("gateway on %s, admin on %s", address(listener), address(admin_listener))
    await asyncio.gather(servers[0].serve([listener]), servers[1].serve([admin_listener]))
    looking.cancel()


if __name__ == "__main__":
    sys.exit(while_read(main, sys.argv[1:]))
