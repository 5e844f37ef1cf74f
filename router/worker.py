"""An upstream and what is known of it right now."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from config import Upstream
from router.breaker import Breaker
from router.lane import Candidate
from router.names import matches_any

FALLS_AFTER = 2
RISES_AFTER = 2


@dataclass(frozen=True, slots=True)
class Health:
    """healthy is None before the first check; streak counts checks in a row that contradict it."""

    healthy: bool | None = None
    streak: int = 0
    reason: str = "not checked yet"


def judge(health: Health, is_ok: bool, reason: str = "") -> Health:
    """The next state: two failures bring an upstream down, two successes up; the first check decides alone."""
    if health.healthy is None:
        return Health(is_ok, 0, reason)
    if is_ok == health.healthy:
        return Health(is_ok, 0, reason)
    streak = health.streak + 1
    if streak < (RISES_AFTER if is_ok else FALLS_AFTER):
        return Health(health.healthy, streak, health.reason if is_ok else reason)
    return Health(is_ok, 0, reason)


@dataclass(slots=True, eq=False)
class Worker:
    """cards          model id -> its entry of `/v1/models` as the upstream gave it; None while not yet known
    is_draining       told by the admin port; the configuration may say it as well
    check_path        index of the path that its health checks ask
    num_checks        since the models were last found to be unknown
    found_gone        set by a request that could not reach it
    """

    upstream: Upstream
    health: Health = field(default_factory=Health)
    in_flight: int = 0
    cards: dict[str, dict[str, Any]] | None = None
    breaker: Breaker = field(default_factory=Breaker)
    is_draining: bool = False
    check_path: int = 0
    num_checks: int = 0
    found_gone: asyncio.Event = field(default_factory=asyncio.Event)
    _candidate: tuple[Any, Any, Candidate] | None = None

    @property
    def name(self) -> str:
        return self.upstream.name

    @property
    def healthy(self) -> bool:
        """False only when checks have failed: before the first one it may be tried."""
        return self.health.healthy is not False

    @property
    def load(self) -> float:
        return self.in_flight / self.upstream.weight

    def obstacle(self, now: float) -> str | None:
        """Why it gets no new request; None where it may get one."""
        if not self.healthy:
            return self.health.reason
        if self.is_draining or self.upstream.draining:
            return "is draining"
        return None if self.breaker.admits(now) else f"failed {len(self.breaker.failures)} requests in a row"

    def note_failure(self, now: float) -> None:
        self.breaker = self.breaker.after_failure(now)

    def note_success(self, now: float) -> None:
        self.breaker = self.breaker.after_success(now)

    @contextmanager
    def lease(self) -> Iterator[None]:
        is_try = self.breaker.opened_at is not None
        if is_try:
            self.breaker = replace(self.breaker, is_trying=True)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if is_try:
                # a client that left in between has decided nothing
                self.breaker = replace(self.breaker, is_trying=False)

    def candidate(self) -> Candidate:
        # every request asks every worker, and the answer changes with a check or a reload only
        if self._candidate is None or self._candidate[0] is not self.upstream or self._candidate[1] is not self.cards:
            found = Candidate(self.name, self.upstream.lane, self._models())
            self._candidate = self.upstream, self.cards, found
        return self._candidate[2]

    def _models(self) -> dict[str, int | None] | None:
        if self.cards is None and not self.upstream.models:
            return None
        return {card["id"]: card.get("max_model_len") for card in self.listed()} | self._patterns()

    def listed(self) -> list[dict[str, Any]]:
        """Cards of the models it serves by name, with the limit up to which it gets requests."""
        known, patterns = self.cards or {}, self.upstream.models
        names = [name for name in known if not patterns or matches_any(patterns, name)]
        # a name that the configuration gives needs no card
        names += [name for name in patterns if "*" not in name and name not in known]
        plain = {"object": "model", "owned_by": self.name}
        return [capped(known.get(name, plain | {"id": name}), self.upstream.max_model_len) for name in names]

    def _patterns(self) -> dict[str, int | None]:
        return {name: self.upstream.max_model_len for name in self.upstream.models if "*" in name}


def capped(card: dict[str, Any], most: int | None) -> dict[str, Any]:
    """The card with a limit of at most so many tokens; one that is no number is taken out."""
    told = card.get("max_model_len")
    limits = [limit for limit in (told, most) if isinstance(limit, int)]
    rest = {name: value for name, value in card.items() if name != "max_model_len"}
    if not limits:
        return rest
    also = {name: min(limits) for name in ("context_length", "context_window") if name in card}
    return rest | also | {"max_model_len": min(limits)}
