"""How often generations end: so often a place becomes free for one that waits."""

import time
from collections import deque
from collections.abc import Callable

# of the latest ends is learnt; of fewer than two nothing
MOST_ENDS = 16
UNKNOWN_S = 5.0


class Pace:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=MOST_ENDS)

    def ended(self) -> None:
        self._ends.append(self._clock())

    def wait_s(self, count: int) -> float:
        """About the time until so many more have ended, at the pace of the latest; the time since the last counts."""
        if len(self._ends) < 2:
            return UNKNOWN_S
        return count * (self._clock() - self._ends[0]) / len(self._ends)
