"""Connections to upstreams: one pool, timeouts apart, and a close that no cancellation can interrupt."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from config import RouterConfig
from router.errors import GatewayError, RequestError, UnavailableError, UpstreamError, UpstreamTimeoutError

_CLOSE_S = 5.0
_AUTOMATIC_HEADERS = ("accept", "accept-encoding", "user-agent", "content-type")


class BrokenConnectionError(UpstreamError):
    """The upstream closed or reset the connection."""


class UnreachableError(UnavailableError):
    """No connection to the upstream."""


class Transport:
    """Sends requests as they are: no redirects, no cookies, no proxy from the environment, no decompression."""

    def __init__(self, config: RouterConfig) -> None:
        self._timeouts = {
            "connect": config.connect_timeout_s,
            "pool": config.connect_timeout_s + config.pool_timeout_s,
            "read": None,
        }
        self._max_connections = config.max_connections
        self._pool_idle_s = config.pool_idle_s
        self._inner = AiohttpTransport(client=self._session)
        self._closing: set[asyncio.Task[None]] = set()

    async def open(
        self,
        name: str,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        first_byte_s: float,
    ) -> httpx.Response:
        """The response once its headers are there; the caller closes it.

        raises  UnreachableError, BrokenConnectionError, UpstreamTimeoutError, RequestError
        """
        request = self._request(method, url, headers, body)
        try:
            async with asyncio.timeout(first_byte_s):
                return await self._inner.handle_async_request(request)
        except TimeoutError as error:
            raise UpstreamTimeoutError(f"upstream {name} sent no response within {first_byte_s:g} s") from error
        except httpx.TransportError as error:
            raise _before_headers(name, url, error) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise UpstreamError(f"upstream {name} sent no valid HTTP response") from error

    def _request(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Request:
        # as bytes: a client's header values need not be ASCII
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]
        try:
            # reading an address takes as long as all else here; few differ but in their query
            target = httpx.URL(url) if "?" in url else _known_url(url)
            return httpx.Request(method, target, headers=raw, content=body, extensions={"timeout": self._timeouts})
        except httpx.InvalidURL as error:
            raise RequestError(f"no upstream can be asked for this address: {error}") from error

    async def chunks(self, name: str, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive; raises BrokenConnectionError."""
        try:
            async for chunk in response.stream:
                yield chunk
        except (httpx.TransportError, aiohttp.ClientError) as error:
            raise BrokenConnectionError(f"upstream {name} broke off its response") from error

    async def close(self, response: httpx.Response) -> None:
        """Gives the connection back, or closes it when the body is unfinished; goes on if the caller is cancelled."""
        task = asyncio.ensure_future(self._close(response))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        await asyncio.shield(task)

    async def aclose(self) -> None:
        await asyncio.gather(*self._closing)
        await self._inner.aclose()

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=self._pool_idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC_HEADERS,
        )

    async def _close(self, response: httpx.Response) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await response.stream.aclose()
        except (TimeoutError, httpx.TransportError, aiohttp.ClientError):
            # the connection is lost either way, which is what closing is for
            return


@lru_cache(maxsize=256)
def _known_url(url: str) -> httpx.URL:
    return httpx.URL(url)


def _before_headers(name: str, url: str, error: httpx.TransportError) -> GatewayError:
    # the transport reports connections refused, timed out and closed by classes that overlap; the cause tells
    cause = error.__cause__
    if isinstance(cause, aiohttp.InvalidURL):
        return RequestError("no upstream can be asked for this address")
    if isinstance(cause, aiohttp.ClientConnectorError):
        return UnreachableError(f"upstream {name} is not reachable: no connection to {_origin(url)}")
    if isinstance(cause, aiohttp.ServerTimeoutError):
        return UnreachableError(f"upstream {name} is not reachable: no connection to {_origin(url)} in time")
    return BrokenConnectionError(f"upstream {name} closed the connection before it answered")


def _origin(url: str) -> str:
    parsed = httpx.URL(url)
    return f"{parsed.scheme}://{parsed.netloc.decode()}"
