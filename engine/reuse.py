"""What requests find computed already, and what they leave for others: on the device and in the tiers behind it."""

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

from config.engine import BLOCK_SIZE
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import CachedPath, Hit, PrefixCache, Snapshot, ancestry
from engine.cache.tiers import LONGEST_FETCH_S, Found, Tiers, Transfer
from engine.schedule import Chunk, RequestState, SnapshotCopy

log = logging.getLogger("longlane.engine.reuse")


class Reuse:
    """Between the scheduler and what keeps: the prefix cache on the device, and the tiers outside of it.

    What a request reuses is decided with its first chunk, not before: what others compute meanwhile counts, and the
    snapshot that it starts from cannot be given up in between. What lies ready in host memory is part of that chunk;
    what does not is fetched there first, and meanwhile the prompt is passed over.

    States of answers stand inside decode passes, which may be one ahead of whoever looks: before a pass moves a state
    on, the one at a block's end is copied if the pass before it may have got there. So its place is set aside before
    it is known whether it will be needed, and given back in the same step where it is not.
    """

    def __init__(
        self,
        pool: BlockPool,
        num_snapshots: int,
        cache_key: bytes,
        reuses_decoded: bool,
        tiers: Tiers | None,
        keeps_inside: bool = False,
    ) -> None:
        """As the scheduler takes them."""
        self._cache = PrefixCache(pool, num_snapshots, cache_key)
        self._reuses_decoded = reuses_decoded
        self._keeps_inside = keeps_inside
        self._tiers = tiers
        self._to_store: list[Snapshot] = []
        # by snapshot, so that of two that got the same place the later one counts
        self._left: dict[int, SnapshotCopy] = {}
        self._set_aside: dict[RequestState, int | None] = {}

    @property
    def has_stores(self) -> bool:
        return bool(self._to_store)

    def begin(self, salt: str) -> CachedPath:
        return self._cache.begin(salt)

    def stats(self) -> dict[str, int]:
        """As EngineStats names them."""
        return {
            "num_cached_blocks": self._cache.num_blocks,
            "num_snapshots": self._cache.num_snapshots,
            **self._cache.counts,
            **(self._tiers.stats() if self._tiers else {}),
        }

    def wait(self, seconds: float) -> None:
        """Until something has come from a slower tier."""
        if self._tiers is not None:
            self._tiers.wait(seconds)

    def check_integrity(self) -> None:
        self._cache.check_integrity()
        if self._tiers is not None:
            self._tiers.poll()
            self._tiers.check_integrity()

    # before a prompt begins

    def look_up(self, state: RequestState) -> Hit | None:
        """What a prompt may reuse now; None while what lies outside the device is on its way to host memory."""
        hit = self._cache.lookup(state.path, state.request.prompt_token_ids)
        if self._tiers is None or not self._cache.is_enabled:
            return hit
        may_wait = state.fetch_until_s is None or time.monotonic() < state.fetch_until_s
        if may_wait and state.fetch_seen == self._tiers.num_settled:
            return None
        found = self._tiers.find(self._hashes(state), hit.depth)
        if found is None:
            return hit
        if self._tiers.is_ready(found):
            return replace(hit, brought=found)
        if not (may_wait and self._tiers.fetch(found)):
            return hit
        state.fetch_until_s = state.fetch_until_s or time.monotonic() + LONGEST_FETCH_S
        state.fetch_seen = self._tiers.num_settled
        return None

    def look_again(self, state: RequestState, hit: Hit) -> Hit:
        """What others of the same step brought back or gave up since."""
        if self._tiers is None:
            return hit
        fresh = self._cache.lookup(state.path, state.request.prompt_token_ids)
        found = hit.brought
        if found is None or found.depth <= fresh.depth or not self._tiers.is_ready(found):
            return fresh
        return replace(fresh, brought=found)

    def leader(self, state: RequestState, hit: Hit, running: Iterable[RequestState]) -> RequestState | None:
        """A request that will soon have computed more of this prompt's beginning than is cached; it leaves a state
        where the two part."""
        if not self._cache.is_enabled:
            return None
        ahead = [other for other in running if other.has_begun and other.is_prefilling]
        leader = max(ahead, key=lambda other: self._num_alike(state, other), default=None)
        if leader is None:
            return None
        depth = self._num_alike(state, leader)
        if depth <= max(hit.depth, leader.num_computed_tokens):
            return None
        if depth not in leader.cuts:
            leader.cuts = (*leader.cuts, depth)
        return leader

    def choose_cuts(self, state: RequestState, hit: Hit) -> tuple[int, ...]:
        """Where another conversation left this text, the ends of messages after which another may, and the last whole
        block that the same prompt could reuse."""
        if not self._cache.is_enabled:
            return ()
        ends = (hit.known, *chosen_marks(state.request.marks), state.num_prompt_tokens - 1)
        return tuple(end // BLOCK_SIZE * BLOCK_SIZE for end in ends)

    def adopt(self, state: RequestState, hit: Hit) -> tuple[int | None, Transfer | None]:
        """The prompt begins behind a hit: (the snapshot to start from, what has to be brought back for it)."""
        state.path.anchors = frozenset(mark // BLOCK_SIZE * BLOCK_SIZE for mark in chosen_marks(state.request.marks))
        state.num_computed_tokens = state.num_cached_tokens = hit.depth
        self._tell(state, hit)
        restored = self._cache.adopt(state.path, hit)
        state.block_ids = [node.block_id for node in state.path.nodes]
        state.num_promised_blocks -= len(state.block_ids)
        return (restored, None) if hit.brought is None else self._bring_back(state, hit.brought)

    # while it runs

    def take_blocks(self, state: RequestState, num_tokens: int) -> None:
        """The request gets blocks for so many tokens, out of those promised to it."""
        missing = -(-num_tokens // BLOCK_SIZE) - len(state.block_ids)
        if missing > 0:
            state.block_ids += self._cache.take(missing)
            state.num_promised_blocks -= missing

    def keep_prompt(self, chunk: Chunk) -> list[SnapshotCopy]:
        """Blocks that a chunk fills are addressed; where it ends with a block, and at cuts inside of it if passes keep
        states there, its state is kept. A cut may have come after the chunk was made."""
        state = chunk.state
        inside = {cut for cut in state.cuts if chunk.start < cut < chunk.end} if self._keeps_inside else set()
        copies = []
        for position in sorted(inside | {chunk.end}):
            self._cache.extend(state.path, state.token_ids, position, state.block_ids)
            index = self._cache.stand(state.path, is_decoded=False) if position % BLOCK_SIZE == 0 else None
            if index is None:
                continue
            if position in state.cuts:
                self._store(state.path.latest)
            copies.append(SnapshotCopy(state.slot, index, position))
        return copies

    def set_aside(self, decodes: Iterable[RequestState], most_rows: int) -> None:
        """Makes room for the states that decode passes in flight may reach.

        most_rows  of a request that may be accepted
        """
        for state in decodes if self._reuses_decoded else ():
            position = (state.num_computed_tokens // BLOCK_SIZE + 1) * BLOCK_SIZE
            if position <= min(state.num_computed_tokens + most_rows, state.token_limit):
                index = self._set_aside[state] = self._cache.reserve()
                if index is not None:
                    self._left[index] = SnapshotCopy(state.slot, index, position)

    def keep_decoded(self, state: RequestState, num_before: int) -> None:
        """Likewise of the rows that a pass has added to an answer.

        num_before  computed tokens before them
        """
        if not self._reuses_decoded:
            return
        # an output may end before the last row that was accepted
        num_final = min(state.num_computed_tokens, len(state.token_ids))
        self._cache.extend(state.path, state.token_ids, num_final, state.block_ids)
        position = num_final // BLOCK_SIZE * BLOCK_SIZE
        if position <= num_before:
            return
        if state not in self._set_aside:
            index = self._cache.stand(state.path, is_decoded=True)
            if index is not None:
                self._left[index] = SnapshotCopy(state.slot, index, position)
        elif (index := self._set_aside[state]) is not None and self._cache.stand(state.path, True, index) is not None:
            del self._set_aside[state]

    def settle(self) -> None:
        """What was set aside and not needed is there for others."""
        for index in self._set_aside.values():
            if index is not None:
                self._cache.give_back(index)
        self._set_aside.clear()

    def leave(self, state: RequestState) -> None:
        """The request is gone; what is of use stays."""
        self._store(state.path.latest)
        self._cache.leave(state.path, state.block_ids, state.num_promised_blocks)

    # what the next schedule copies

    def take_left(self) -> tuple[SnapshotCopy, ...]:
        """States among the rows of the last decode pass."""
        left, self._left = self._left, {}
        return tuple(left.values())

    def take_stores(self) -> tuple[Transfer, ...]:
        """To the tiers, of what still stands."""
        if self._tiers is None:
            return ()
        self._tiers.poll()
        snapshots, self._to_store = dict.fromkeys(self._to_store), []
        stores = [self._keep(self._tiers, snapshot) for snapshot in snapshots if self._cache.is_standing(snapshot)]
        return tuple(transfer for transfer in stores if transfer is not None)

    def _keep(self, tiers: Tiers, snapshot: Snapshot) -> Transfer | None:
        nodes = list(ancestry(snapshot.node))[::-1]
        hashes, block_ids = [node.block_hash for node in nodes], [node.block_id for node in nodes]
        return tiers.keep(hashes, block_ids, snapshot.index, snapshot.is_anchor)

    def _store(self, snapshot: Snapshot | None) -> None:
        """It is worth a copy outside the device: made with the next schedule, if it still stands then."""
        if self._tiers is not None and snapshot is not None and self._cache.is_standing(snapshot):
            self._to_store.append(snapshot)

    def _bring_back(self, state: RequestState, found: Found) -> tuple[int, Transfer]:
        assert self._tiers is not None
        num_at_hand = len(state.block_ids)
        self.take_blocks(state, found.depth)
        index = self._cache.take_in(state.path, state.request.prompt_token_ids, found.depth, state.block_ids)
        return index, self._tiers.bring_back(found, num_at_hand, state.block_ids[num_at_hand:], index)

    def _hashes(self, state: RequestState) -> tuple[bytes, ...]:
        return self._cache.address(state.path, state.request.prompt_token_ids)

    def _num_alike(self, first: RequestState, second: RequestState) -> int:
        """Tokens of whole blocks with which both prompts begin."""
        ours, others = self._hashes(first), self._hashes(second)
        shorter = range(min(len(ours), len(others)))
        return bisect_left(shorter, True, key=lambda index: ours[index] != others[index]) * BLOCK_SIZE

    def _tell(self, state: RequestState, hit: Hit) -> None:
        if not self._cache.is_enabled:
            return
        reused = f"{hit.depth} of {state.num_prompt_tokens} prompt tokens reused"
        if hit.brought is not None:
            reused += f", {hit.depth - len(hit.nodes) * BLOCK_SIZE} of them brought back"
        log.info("request %s: %s; %s", state.request.request_id, reused, hit.explain())


def chosen_marks(marks: Sequence[int]) -> tuple[int, ...]:
    """Of the ends of a prompt's messages those where states are worth their place: that of system and tools, which
    others share, and that of the last user's, to which a conversation returns that drops the thoughts after it."""
    return (*marks[:1], *marks[-1:])
