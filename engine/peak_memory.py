"""What the engine really takes, to hold against what was planned."""

import resource
import time

import torch

INTERVAL_S = 1.0


class PeakMemory:
    """The most memory held so far, looked up once a second at most: asking takes longer than a short step may."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._due = 0.0
        self._num_bytes = 0

    def num_bytes(self) -> int:
        """Of a GPU what torch has taken, so without the driver's own; of a CPU the whole process."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + INTERVAL_S
            self._num_bytes = self._measure()
        return self._num_bytes

    def _measure(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
