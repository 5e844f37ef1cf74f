"""How many prompt tokens fit into a step, so that nobody waits long for its end. Plain data in, plain data out."""

from config.engine import BLOCK_SIZE

# before anything was measured
FIRST_TOKENS = 4 * BLOCK_SIZE
# of the bound that a step is planned to take; the rest is for what differs from step to step
PLANNED_SHARE = 0.8
# weight of a new measurement: what became slower counts at once, what became faster bit by bit
RISE, FALL = 0.7, 0.2


class ChunkBudget:
    """A step takes as long as the decoding requests' rows and, for each prompt token, a pace that follows what was
    measured: it changes with the context, the model and the machine.

    most           prompt tokens of a step
    longest_gap_s  bound on the time between two tokens of a decoding request, and so on the time that a new request
                   waits for its first step; None for none
    """

    def __init__(self, most: int, longest_gap_s: float | None) -> None:
        self._most = most
        self._longest_gap_s = longest_gap_s
        self._decode_s = 0.0
        self._pace_s: float | None = None

    def num_tokens(self, has_decodes: bool) -> int:
        """A multiple of the block size and at least one block, for a step of no prompt tokens computes none ever."""
        if self._longest_gap_s is None:
            return self._most
        if self._pace_s is None:
            return min(self._most, FIRST_TOKENS) if has_decodes else self._most
        left_s = PLANNED_SHARE * self._longest_gap_s - self._decode_s * has_decodes
        blocks = int(left_s / self._pace_s) // BLOCK_SIZE
        return min(self._most, max(1, blocks) * BLOCK_SIZE)

    def observe(self, num_prompt_tokens: int, has_decodes: bool, seconds: float) -> None:
        """What a step took."""
        if num_prompt_tokens:
            prompt_s = max(0.0, seconds - self._decode_s * has_decodes)
            self._pace_s = _follow(self._pace_s, max(prompt_s / num_prompt_tokens, 1e-9))
        elif has_decodes:
            self._decode_s = _follow(self._decode_s or None, seconds)


def _follow(average: float | None, value: float) -> float:
    if average is None:
        return value
    return average + (RISE if value > average else FALL) * (value - average)
