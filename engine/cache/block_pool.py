"""Which KV blocks are free, promised, held and kept. Plain counting; the tensors lie in the KV cache."""

from collections import Counter
from collections.abc import Container, Iterable


class BlockPool:
    """A fixed number of blocks. A request reserves as many as it may ever need and takes them when it writes.

        free --reserve--> promised (a count, no particular blocks) --take--> held --release--> free, or kept
        kept --share--> held by one request more          kept --drop--> free

    Held means by one request or several; kept, that nobody holds a block whose content is of use to the prefix cache.
    Promises count on free and kept blocks alike: whoever keeps blocks drops some before a `take` that finds none free.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._kept: set[int] = set()
        self._holders: Counter[int] = Counter()
        self._num_promised = 0

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, promised and kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_unpromised(self) -> int:
        return self.num_free - self._num_promised

    def can_take(self, count: int) -> bool:
        """Whether so many blocks are free at once, without dropping kept ones."""
        return count <= len(self._free)

    @property
    def is_idle(self) -> bool:
        return not self._holders and not self._num_promised

    def is_kept(self, block_id: int) -> bool:
        return block_id in self._kept

    def is_held(self, block_id: int) -> bool:
        return block_id in self._holders

    def reserve(self, count: int) -> bool:
        """Promises `count` blocks, or none at all; returns whether it did."""
        if count > self.num_unpromised:
            return False
        self._num_promised += count
        return True

    def take(self, count: int) -> list[int]:
        """The ids of free blocks, out of what was promised."""
        assert count <= self._num_promised, "take without a reservation"
        assert self.can_take(count), "take of what is not free"
        taken = [self._free.pop() for _ in range(count)]
        self._num_promised -= count
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One holder more of a held block, or in place of a promise the first one of a kept block."""
        for block_id in block_ids:
            if block_id in self._kept:
                self._kept.remove(block_id)
            else:
                assert block_id in self._holders, "a free block has nothing to share"
            self._holders[block_id] += 1

    def release(self, block_ids: Iterable[int], num_promised: int, kept: Container[int] = ()) -> None:
        """Ends one holder's claim on these blocks and what is left of its reservation.

        kept  blocks that stay when nobody holds them any more; others are free then
        """
        assert 0 <= num_promised <= self._num_promised, "more promised blocks released than there are"
        self._num_promised -= num_promised
        for block_id in block_ids:
            if self._holders[block_id] > 1:
                self._holders[block_id] -= 1
                continue
            if not self._holders.pop(block_id, 0):
                raise KeyError(block_id)
            self._kept.add(block_id) if block_id in kept else self._free.append(block_id)

    def drop(self, block_id: int) -> None:
        """Frees a kept block: its content is of no use any more."""
        self._kept.remove(block_id)
        self._free.append(block_id)

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one place and every promise is covered."""
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        places = (set(self._free), self._kept, set(self._holders))
        assert sum(map(len, places)) == len(set().union(*places)), "a block is in two places"
        assert sum(map(len, places)) == self.num_blocks, "a block is lost"
        assert all(count > 0 for count in self._holders.values()), "a held block has no holder"
        assert 0 <= self._num_promised <= self.num_free, "a promise is not covered"
