"""Which ledger keeps the limits: this gateway's own, or the shared one and what to do while it is away."""

import asyncio
import logging
import time

from config import Key, RouterConfig
from router.errors import QuotaError, UnavailableError
from router.ledger import Grant, Ledger, LedgerError, MemoryLedger
from router.metrics import Metrics
from router.quota import Usage
from router.redis_ledger import LEASE_S, RedisLedger

# while the shared ledger is away, how often a request finds out whether it is back
_RETRY_S = 1.0
_log = logging.getLogger("longlane.router")


class Limits:
    """Admits and settles. A request settles where it was admitted."""

    def __init__(self, config: RouterConfig, metrics: Metrics) -> None:
        self._own = MemoryLedger()
        self._shared = RedisLedger(config.redis_url.get_secret_value()) if config.redis_url else None
        self._is_closed_without = config.limits_without_redis == "closed"
        self._metrics = metrics
        self._away_since: float | None = None
        self._retry_at = 0.0
        self._ledgers: dict[str, Ledger] = {}

    async def admit(self, key: Key, prompt_tokens: int, conversation: str | None) -> Grant:
        """Raises QuotaError, or UnavailableError where limits that cannot be checked close the gateway."""
        ledger: Ledger = self._own
        grant = await self._admit_shared(key, prompt_tokens, conversation)
        if grant is None:
            if self._shared is not None and self._is_closed_without:
                raise UnavailableError("the limits of this key cannot be checked right now", 1)
            grant = await self._own.admit(key, prompt_tokens, conversation)
        else:
            ledger = self._shared
        self._ledgers[grant.lease] = ledger
        return grant

    async def settle(self, grant: Grant, usage: Usage | None, is_refused: bool) -> None:
        try:
            await self._ledgers.pop(grant.lease).settle(grant, usage, is_refused)
        except LedgerError as error:
            # its lease expires by itself; the estimate stays charged
            self._note_away(error)

    async def run(self) -> None:
        """Renews the leases of requests that run for long."""
        while self._shared is not None:
            await asyncio.sleep(LEASE_S / 3)
            try:
                await self._shared.renew()
            except LedgerError as error:
                self._note_away(error)
            except Exception:
                # without renewal the places of long requests would be given away
                _log.exception("renewing leases failed inside the gateway")

    async def aclose(self) -> None:
        if self._shared is not None:
            await self._shared.aclose()

    async def _admit_shared(self, key: Key, prompt_tokens: int, conversation: str | None) -> Grant | None:
        """None where there is no shared ledger or it is away."""
        if self._shared is None or time.monotonic() < self._retry_at:
            return None
        try:
            grant = await self._shared.admit(key, prompt_tokens, conversation)
        except LedgerError as error:
            self._note_away(error)
            return None
        except QuotaError:
            self._note_back()
            raise
        self._note_back()
        return grant

    def _note_away(self, error: LedgerError) -> None:
        self._retry_at = time.monotonic() + _RETRY_S
        if self._away_since is None:
            self._away_since = time.monotonic()
            now = "requests are refused" if self._is_closed_without else "this gateway's own limits hold"
            _log.error("Redis is away, until it is back %s: %s", now, error)
        self._metrics.shared_limits_away.set(1)

    def _note_back(self) -> None:
        self._metrics.shared_limits_away.set(0)
        if self._away_since is not None:
            _log.info("Redis is back after %.0f s: the shared limits hold again", time.monotonic() - self._away_since)
            self._away_since = None
