"""Sockets that the gateway listens on."""

import asyncio
import socket

from config.listen import bind


def test_small_writes_are_not_held_back_on_any_event_loop():
    """Nagle's algorithm would hold an event back until the client has acknowledged the one before."""

    async def nodelay():
        seen = asyncio.get_running_loop().create_future()

        def connected(reader, writer):
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0, "--port")
        async with await asyncio.start_server(connected, sock=listener):
            with socket.create_connection(listener.getsockname()):
                return await seen

    assert asyncio.run(nodelay())
