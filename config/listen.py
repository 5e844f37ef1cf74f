"""Sockets to listen on, and what guards them from slow clients: alike for the gateway and the engine's server."""

import asyncio
import errno
import socket

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# above the idle time after which clients drop a pooled connection themselves
KEEP_ALIVE_S = 75
MOST_HEAD_BYTES = 128 * 1024
_HEAD_BODY = (
    b'{"error":{"message":"the request line and headers are larger than %d bytes","type":"invalid_request_error",'
    b'"param":null,"code":"request_too_large"}}' % MOST_HEAD_BYTES
)
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_HEAD_BODY), _HEAD_BODY)
)


class PortError(Exception):
    """A port cannot be listened on; the text says what to do."""


def deadline_protocol(head_s: float) -> type[HttpToolsProtocol]:
    """The HTTP protocol that closes a connection whose request head is not complete in time, or too large."""

    class DeadlineProtocol(HttpToolsProtocol):
        deadline: asyncio.TimerHandle | None = None
        head_bytes = 0

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # what belongs to a head that is still not complete
            self.head_bytes = self.head_bytes + len(data) if self.deadline is not None else 0
            if self.head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._start_deadline()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._start_deadline()

        def on_headers_complete(self) -> None:
            self._stop_deadline()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_deadline()
            super().connection_lost(exc)

        def _start_deadline(self) -> None:
            # the bytes that come later do not put it off
            if self.deadline is None:
                self.deadline = self.loop.call_later(head_s, self.transport.close)

        def _stop_deadline(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return DeadlineProtocol


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket; raises PortError that names the flag to change."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only where the protocol is named
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"port {port} on {host} is taken: stop what listens there, or choose another with {flag} PORT"
            ) from error
        raise PortError(f"cannot listen on {host} port {port} ({flag}): {error.strerror}") from error
    return listener


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
