"""Which tokens MTP sees where it does not see all, and where their keys and values lie."""

from dataclasses import dataclass

from config.engine import BLOCK_SIZE

# behind the blocks of a window: that which is being filled, the one before it where a pass begins in it, and one that
# drafts may reach without writing over anything that is still looked at if they are refused
SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class MtpWindow:
    """Of each slot the first block of a context, then a ring that takes its other blocks in turn.

    Block b > 0 of a slot's context lies at place 1 + (b - 1) % ring of the slot; what is looked at are the first block
    and the newest `ring - 1`.
    """

    ring: int

    @classmethod
    def of_tokens(cls, tokens: int) -> "MtpWindow":
        """For at least so many of the newest tokens, whatever the rows of a pass."""
        return cls(-(-tokens // BLOCK_SIZE) + SPARE_BLOCKS)

    @property
    def blocks_per_slot(self) -> int:
        return 1 + self.ring

    def first_block(self, context_len: int) -> int:
        """The first of the newest blocks that are looked at; it is at least 1."""
        return max(1, (context_len - 1) // BLOCK_SIZE - self.ring + 2)

    def kept(self, start: int, end: int) -> list[tuple[int, int]]:
        """Of the positions start : end of a prompt those that are looked at from the last one."""
        first = self.first_block(end) * BLOCK_SIZE
        if start >= first or first == BLOCK_SIZE:
            return [(start, end)]
        return [(start, min(end, BLOCK_SIZE))] * (start < BLOCK_SIZE) + [(first, end)]
