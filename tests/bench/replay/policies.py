"""Policies that the chosen one is compared with."""

from collections.abc import Iterable

from engine.cache.prefix_cache import PrefixCache, Snapshot
from tests.bench.replay.simulate import MarksOf


class LruCache(PrefixCache):
    """Gives up what was used longest ago."""

    def _evict(self, candidates: Iterable[Snapshot]) -> None:
        before = len(self._nodes)
        # snapshots lie in the order of their last use
        self._remove(next(iter(candidates)))
        self.counts["num_evicted_snapshots"] += 1
        self.counts["num_evicted_blocks"] += before - len(self._nodes)


class CostCache(PrefixCache):
    """By cost and age, whether or not a conversation has gone on from there."""

    def _leave_behind(self, snapshot: Snapshot) -> None:
        pass


EVICTION: dict[str, type[PrefixCache]] = {"lru": LruCache, "cost": CostCache, "chosen": PrefixCache}
# beside the ends of chunks and prompts, where states always stand
PLACEMENT: dict[str, MarksOf] = {
    "chunk ends": lambda marks: (),
    "system": lambda marks: marks[:1],
    "chosen": lambda marks: marks,
}
