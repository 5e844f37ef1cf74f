"""An upstream and what is known of it right now."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from config import Upstream
from router.lane import Candidate

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


@dataclass(slots=True)
class Worker:
    """cards: model id -> its entry of `/v1/models` as the upstream gave it; None while not yet known."""

    upstream: Upstream
    health: Health = field(default_factory=Health)
    in_flight: int = 0
    cards: dict[str, dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        return self.upstream.name

    @property
    def healthy(self) -> bool:
        """False only when checks have failed: before the first one it may be tried."""
        return self.health.healthy is not False

    @contextmanager
    def lease(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def candidate(self) -> Candidate:
        return Candidate(self.name, self.upstream.lane, self._models())

    def _models(self) -> dict[str, int | None] | None:
        cards = self.cards or {}
        if self.upstream.models:
            return {name: _limit(cards.get(name)) for name in self.upstream.models}
        return None if self.cards is None else {name: _limit(card) for name, card in cards.items()}


def _limit(card: dict[str, Any] | None) -> int | None:
    limit = (card or {}).get("max_model_len")
    return limit if isinstance(limit, int) else None
