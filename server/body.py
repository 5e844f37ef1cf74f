"""Request bodies while they arrive: counted, against the clock, and together within a limit."""

import asyncio
import time

from starlette.requests import ClientDisconnect, Request

from config import ServerConfig
from server.errors import BodyTooLargeError, OverloadedError, SlowRequestError

# less over all is as good as silence
SLOWEST_BYTES_PER_S = 16 * 1024
RETRY_AFTER_S = 5


class HeldBytes:
    """What all connections hold together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """raises OverloadedError"""
        self.check(num_bytes)
        self.num_bytes += num_bytes

    def check(self, num_bytes: int) -> None:
        """raises OverloadedError when there is no room for so many"""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise OverloadedError(
                f"Request bodies of {self.num_bytes} bytes are held already, of {self._max_bytes} "
                "(max_held_body_bytes of the server); try again later.",
                RETRY_AFTER_S,
            )


class HeldBody:
    """The part of one request, which gives it back when it is over."""

    def __init__(self, all_held: HeldBytes) -> None:
        self._all = all_held
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """raises OverloadedError"""
        self._all.take(num_bytes)
        self.num_bytes += num_bytes

    def check(self, num_bytes: int) -> None:
        """raises OverloadedError when there is no room for so many"""
        self._all.check(num_bytes)

    def release(self) -> None:
        self._all.num_bytes -= self.num_bytes
        self.num_bytes = 0


async def read_body(request: Request, config: ServerConfig) -> list[bytes]:
    """The parts of the body as they came.

    raises  BodyTooLargeError, OverloadedError, SlowRequestError, ClientDisconnect
    """
    held: HeldBody = request.state.held
    declared = request.headers.get("content-length", "0")
    num_declared = int(declared) if declared.isdecimal() else 0
    _check_size(num_declared, config.max_body_bytes)
    held.check(num_declared)
    chunks: list[bytes] = []
    started = time.monotonic()
    while True:
        slack_s = started + held.num_bytes / SLOWEST_BYTES_PER_S - time.monotonic()
        message = await _receive(request, config.request_timeout_s, slack_s)
        chunk = message.get("body", b"")
        _check_size(held.num_bytes + len(chunk), config.max_body_bytes)
        held.take(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body"):
            return chunks


async def _receive(request: Request, timeout_s: float, slack_s: float) -> dict:
    """slack_s  by how much the body is ahead of the slowest pace, negative when behind"""
    try:
        async with asyncio.timeout(timeout_s + min(0.0, slack_s)):
            message = await request.receive()
    except TimeoutError as error:
        raise SlowRequestError(f"The body came too slowly: none or too little of it for {timeout_s:g} s.") from error
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise BodyTooLargeError(f"The body is larger than {max_bytes} bytes (max_body_bytes of the server).")
