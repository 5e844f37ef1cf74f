"""Which upstreams there are right now: those of the configuration, of a file, and behind a DNS name."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from urllib.parse import urlsplit

from config import ConfigError, RouterConfig, Upstream, read_upstreams

Addresses = Mapping[str, tuple[str, ...]]
Resolve = Callable[[str], Awaitable[tuple[str, ...]]]
_log = logging.getLogger("longlane.router")


def known_upstreams(config: RouterConfig) -> tuple[Upstream, ...]:
    """Those of the configuration and of its file; raises ConfigError."""
    listed = config.resolved_upstreams()
    if config.upstreams_file is None:
        return listed
    found = listed + tuple(map(config.with_key, read_upstreams(config.upstreams_file)))
    names = [upstream.name for upstream in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"file {config.upstreams_file}: two upstreams have the same name: {twice}")
    return found


def expand(upstreams: Iterable[Upstream], addresses: Addresses) -> tuple[Upstream, ...]:
    """Every upstream with `discover = "dns"` replaced by one for each address of its host."""
    return tuple(
        member
        for upstream in upstreams
        for member in (_members(upstream, addresses) if upstream.discover == "dns" else (upstream,))
    )


async def resolve(host: str) -> tuple[str, ...]:
    """Addresses of a name in a fixed order; raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(sorted({address[0] for *_, address in found}))


class Discovery:
    """Looks again and again. What cannot be read or resolved stays as it was."""

    def __init__(self, config: RouterConfig, ask: Resolve = resolve) -> None:
        self.use(config)
        self._ask = ask
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._complaints: dict[str, str] = {}

    def use(self, config: RouterConfig) -> None:
        """From now on by this configuration; raises ConfigError, and then nothing has changed."""
        self._known = known_upstreams(config)
        self._config = config

    def upstreams(self) -> tuple[Upstream, ...]:
        return expand(self._known, self._addresses)

    async def run(self, changed: Callable[[tuple[Upstream, ...]], None]) -> None:
        before = self.upstreams()
        while True:
            try:
                await self.look()
                if (now := self.upstreams()) != before:
                    changed(now)
                    before = now
            except Exception:
                # without further looks the upstreams would stay as they were for ever
                _log.exception("a look at the upstreams failed inside the gateway")
            await asyncio.sleep(self._config.discovery_interval_s)

    async def look(self) -> None:
        try:
            self._known = known_upstreams(self._config)
        except ConfigError as error:
            self._complain("file", f"the old upstreams stay: {error}")
        else:
            self._complaints.pop("file", None)
        hosts = {_host(upstream) for upstream in self._known if upstream.discover == "dns"}
        await asyncio.gather(*map(self._resolve, sorted(hosts)))

    async def _resolve(self, host: str) -> None:
        try:
            self._addresses[host] = await self._ask(host)
        except OSError as error:
            self._complain(host, f"{host} cannot be resolved, its old addresses stay: {error}")
        else:
            self._complaints.pop(host, None)

    def _complain(self, about: str, text: str) -> None:
        # once, not at every look
        if self._complaints.get(about) != text:
            self._complaints[about] = text
            _log.error("%s", text)


def _members(upstream: Upstream, addresses: Addresses) -> list[Upstream]:
    port = urlsplit(upstream.url).port or 80
    return [
        upstream.model_copy(
            update={
                "name": f"{upstream.name}-{address.replace(':', '-')}",
                "url": f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}",
                "discover": "list",
            }
        )
        for address in addresses.get(_host(upstream), ())
    ]


def _host(upstream: Upstream) -> str:
    return urlsplit(upstream.url).hostname or ""
