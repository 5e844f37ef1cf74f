"""Where the request of each slot stands, as one table on the device that passes read and write."""

from dataclasses import dataclass

import torch
import triton.language as tl

# numbers of a slot, where each stands
NEXT = tl.constexpr(0)
POSITION = tl.constexpr(1)
LIMIT = tl.constexpr(2)
ACCEPTED = tl.constexpr(3)
NUM_DRAFTS = tl.constexpr(4)
DRAFTS = tl.constexpr(5)


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """numbers  [slots, 5 + most drafts] int64. Of each slot:

    NEXT        its newest token, which the next pass reads
    POSITION    of that token, so many tokens before it have keys and values
    LIMIT       no token at or after this position has keys and values
    ACCEPTED    rows of the last pass that stand beside the Gated DeltaNet state and are not yet part of it
    NUM_DRAFTS  drafts that follow the newest token
    DRAFTS      those drafts, then numbers that mean nothing but are ids
    """

    numbers: torch.Tensor

    @classmethod
    def empty(cls, num_slots: int, most_drafts: int, device: torch.device | str) -> "DecodeSlots":
        return cls(torch.zeros(num_slots, DRAFTS.value + most_drafts, dtype=torch.int64, device=device))

    @property
    def drafts(self) -> torch.Tensor:
        """[slots, most drafts] int64"""
        return self.numbers[:, DRAFTS.value :]

    def rows_until(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Accepted rows of the last pass that end before a position; -1 where it is none of those that they reach.

        positions, slots  [n] int64
        return            [n] int32
        """
        numbers = self.numbers.index_select(0, slots)
        accepted = numbers[:, ACCEPTED.value]
        counts = positions - numbers[:, POSITION.value] + accepted
        return torch.where((counts > 0) & (counts <= accepted), counts, -1).int()

    def row(self, position: int, limit: int) -> list[int]:
        """The numbers of a slot whose newest token is at a position, without drafts."""
        numbers = [0] * self.numbers.shape[1]
        numbers[POSITION.value], numbers[LIMIT.value] = position, limit
        return numbers
