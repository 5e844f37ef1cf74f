"""A client's own retry comes when its older request may still be here; it waits until that one is out of the way.

The older one ends because its client is gone, never because of the retry: equal bodies may be parallel samples.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

# a client that gave up has closed its connection by then
WAIT_S = 0.5
_COUNT = "x-stainless-retry-count"


@dataclass(slots=True, eq=False)
class Open:
    """One request that has not ended."""

    tenant: str
    path: str
    body: bytes
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class OpenRequests:
    def __init__(self) -> None:
        self._open: dict[str, set[Open]] = {}

    def begin(self, tenant: str, path: str, body: bytes) -> Open:
        one = Open(tenant, path, body)
        self._open.setdefault(tenant, set()).add(one)
        return one

    def end(self, one: Open) -> None:
        """Once its place is free again."""
        of_tenant = self._open[one.tenant]
        of_tenant.discard(one)
        if not of_tenant:
            del self._open[one.tenant]
        one.ended.set()

    async def older_ended(self, one: Open) -> int:
        """How many requests of the same key, path and body ended within `WAIT_S`."""
        older = [other for other in self._open[one.tenant] if other is not one and _is_same(other, one)]
        if not older:
            return 0
        waiting = [asyncio.ensure_future(other.ended.wait()) for other in older]
        await asyncio.wait(waiting, timeout=WAIT_S)
        for task in waiting:
            task.cancel()
        return sum(other.ended.is_set() for other in older)


def is_retry(headers: Mapping[str, str]) -> bool:
    count = headers.get(_COUNT, "")
    return count.isdecimal() and count.strip("0") != ""


def _is_same(first: Open, second: Open) -> bool:
    return first.path == second.path and first.body == second.body
