"""How many prompt tokens fit into a step, so that nobody waits long for its end. Plain data in, plain data out."""

import math

from config.engine import BLOCK_SIZE

TIMED_SIZES = (BLOCK_SIZE, 16 * BLOCK_SIZE)
# before anything was measured
FIRST_TOKENS = 4 * BLOCK_SIZE
# of the bound that a step is planned to take; the rest is for what differs from step to step
PLANNED_SHARE = 0.8
# weight of a new measurement: what became slower counts at once, what became faster bit by bit
RISE, FALL = 0.7, 0.2
# what is left of the time of a size after each step of a smaller one: a compilation, say, must not rule it out for ever
FADING = 0.85
# a step may take so many times what the smallest takes: where launching alone takes as long as the bound, small steps
# gain nobody anything
LEAST_GAIN = 2.1


def sizes_to_time(most: int) -> list[int]:
    """Prompt tokens of the steps that are timed at the start, so that the first real ones have the right size."""
    return sorted({size for size in TIMED_SIZES if size < most} | {most})


class ChunkBudget:
    """Steps have 64, 128, 256 ... prompt tokens: the most whose time, as measured for that size, keeps the bound.

    Sizes are measured one by one, because what a step takes is no multiple of its tokens: on a GPU the launch of its
    kernels takes as long for one block as for thirty.

    most           prompt tokens of a step
    longest_gap_s  bound on the time between two tokens of a decoding request, and so on the time that a new request
                   waits for its first step; None for none
    """

    def __init__(self, most: int, longest_gap_s: float | None) -> None:
        self._most = most
        self._longest_gap_s = longest_gap_s
        self._decode_s = 0.0
        # seconds of the prompts' part of a step, by the binary logarithm of its blocks
        self._seconds: dict[int, float] = {}

    def num_tokens(self, has_decodes: bool) -> int:
        """A multiple of the block size and at least one block, for a step of no prompt tokens computes none ever."""
        if self._longest_gap_s is None:
            return self._most
        if not self._seconds:
            return min(self._most, FIRST_TOKENS) if has_decodes else self._most
        planned_s = PLANNED_SHARE * self._longest_gap_s - self._decode_s * has_decodes
        bound_s = max(planned_s, LEAST_GAIN * self._expected(0))
        sizes = range(1, math.ceil(math.log2(self._most / BLOCK_SIZE)) + 1)
        fitting = max((size for size in sizes if self._expected(size) <= bound_s), default=0)
        return min(self._most, BLOCK_SIZE << fitting)

    def observe(self, num_prompt_tokens: int, has_decodes: bool, seconds: float) -> None:
        """What a step took."""
        if num_prompt_tokens:
            size = max(0, round(math.log2(num_prompt_tokens / BLOCK_SIZE)))
            prompt_s = max(0.0, seconds - self._decode_s * has_decodes)
            self._seconds[size] = _follow(self._seconds.get(size), prompt_s)
            for larger in (other for other in sorted(self._seconds) if other > size):
                known = self._seconds[larger]
                self._seconds[larger] = min(known, max(FADING * known, self._extrapolated(larger)))
        elif has_decodes:
            self._decode_s = _follow(self._decode_s or None, seconds)

    def _expected(self, size: int) -> float:
        return self._seconds[size] if size in self._seconds else self._extrapolated(size)

    def _extrapolated(self, size: int) -> float:
        """Along a line through the two nearest sizes below, else above; from one as if tokens were all that takes
        time."""
        below = sorted((other for other in self._seconds if other < size), reverse=True)
        near, *rest = below or sorted(other for other in self._seconds if other > size)
        seconds, far = self._seconds[near], rest[0] if rest else None
        if far is None:
            return seconds * 2.0 ** (size - near)
        pace_s = max(0.0, (self._seconds[far] - seconds) / (2**far - 2**near))
        return max(0.0, seconds + pace_s * (2**size - 2**near))


def _follow(average: float | None, value: float) -> float:
    if average is None:
        return value
    return average + (RISE if value > average else FALL) * (value - average)
