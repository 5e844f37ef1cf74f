"""Which KV blocks are free, promised and taken. Plain counting; the tensors lie in the KV cache."""

from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks. A request reserves as many as it may ever need and takes them when it writes.

        free --reserve--> promised (a count, no particular blocks) --take--> taken --release--> free

    A promise never fails later: `take` on a reservation always finds a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()
        self._num_promised = 0

    @property
    def num_free(self) -> int:
        """Blocks that no request has taken, promised ones included."""
        return len(self._free)

    @property
    def num_unpromised(self) -> int:
        return len(self._free) - self._num_promised

    @property
    def is_idle(self) -> bool:
        return not self._taken and not self._num_promised

    def reserve(self, count: int) -> bool:
        """Promises `count` blocks, or none at all; returns whether it did."""
        if count > self.num_unpromised:
            return False
        self._num_promised += count
        return True

    def take(self) -> int:
        """The id of one block, out of what was promised."""
        assert self._num_promised > 0, "take without a reservation"
        self._num_promised -= 1
        block_id = self._free.pop()
        self._taken.add(block_id)
        return block_id

    def release(self, block_ids: Iterable[int], num_promised: int) -> None:
        """Frees taken blocks and what is left of their owner's reservation."""
        assert 0 <= num_promised <= self._num_promised, "more promised blocks released than there are"
        self._num_promised -= num_promised
        for block_id in block_ids:
            self._taken.remove(block_id)
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """Asserts that every block is in exactly one place and every promise is covered."""
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert self._taken.isdisjoint(self._free), "a block is free and taken"
        assert len(self._free) + len(self._taken) == self.num_blocks, "a block is lost"
        assert 0 <= self._num_promised <= len(self._free), "a promise is not covered"
