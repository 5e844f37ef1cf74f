"""The passive breaker of an upstream: what requests themselves met, between two health checks."""

from dataclasses import dataclass, replace
from typing import Literal

BREAKS_AFTER = 5
WITHIN_S = 30.0
OPEN_S = 30.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """Closed until `BREAKS_AFTER` failures in a row stand within `WITHIN_S`; then open for `OPEN_S`; then half-open:
    one request at a time may try, and its success closes the breaker, its failure opens it anew.

    failures  when they happened, the newest last, monotonic seconds
    """

    failures: tuple[float, ...] = ()
    opened_at: float | None = None
    is_trying: bool = False

    def state(self, now: float) -> Literal["closed", "open", "half-open"]:
        if self.opened_at is None:
            return "closed"
        return "half-open" if now - self.opened_at >= OPEN_S else "open"

    def admits(self, now: float) -> bool:
        return self.opened_at is None or (self.state(now) == "half-open" and not self.is_trying)

    def after_failure(self, now: float) -> "Breaker":
        recent = (*(at for at in self.failures if now - at < WITHIN_S), now)
        if self.opened_at is not None:
            # requests that had begun before it opened fail as well, and say nothing new
            return self if self.state(now) == "open" else replace(self, failures=recent, opened_at=now)
        return Breaker(recent, now if len(recent) >= BREAKS_AFTER else None)

    def after_success(self, now: float) -> "Breaker":
        return self if self.state(now) == "open" else Breaker()
