"""Whose prompt tokens are computed next. Plain data in, plain data out."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass

# one step in so many belongs to the prompt that has waited longest
PATIENCE = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """A prompt that is not computed yet. num_left  tokens that are neither cached nor computed"""

    key: Hashable
    tenant: str
    priority: int
    arrival: int
    num_left: int


class PromptOrder:
    """Higher priority first. Between tenants as if each were given equally many tokens: first comes whose shortest
    prompt would be done first then. So short prompts pass long ones, and a tenant that sends many waits for its own.

    Every fourth step belongs to the oldest prompt instead, so that short ones never starve a long one.

    A tenant's count begins, when it has a prompt to compute after a time without, at the least of those who have.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._num_steps = 0

    def begin_step(self, tenants: Collection[str]) -> None:
        """tenants  that have prompts to compute"""
        staying = {tenant: count for tenant, count in self._served.items() if tenant in tenants}
        least = min(staying.values(), default=0)
        self._served = {tenant: staying.get(tenant, least) for tenant in tenants}
        self._num_steps += 1

    @property
    def is_oldest_first(self) -> bool:
        """Whether this step belongs to the oldest prompt."""
        return self._num_steps % PATIENCE == 0

    def choose(self, candidates: Collection[Candidate]) -> Candidate:
        if self.is_oldest_first:
            return min(candidates, key=lambda each: (-each.priority, each.arrival))
        return min(candidates, key=lambda each: (-each.priority, *self._finish(each)))

    def serve(self, tenant: str, num_tokens: int) -> None:
        self._served[tenant] += num_tokens

    def _finish(self, each: Candidate) -> tuple[int, int]:
        return self._served[each.tenant] + each.num_left, each.arrival
