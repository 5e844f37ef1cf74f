"""What the engine really takes, to hold against what was planned."""

import resource
import time

import torch

INTERVAL_S = 1.0


class PeakMemory:
    """The most memory held so far, looked up once a second at most: asking takes longer than a short step may."""

    def __init__(self, device: torch.device, outside_bytes: int = 0) -> None:
        """outside_bytes  of a GPU, beside what torch takes, as planned: nobody says what they are"""
        self._device = device
        self._outside_bytes = outside_bytes
        self._due = 0.0
        self._num_bytes = 0

    def num_bytes(self) -> int:
        """Of a GPU what torch has taken, and the driver's own part as planned; of a CPU the whole process."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + INTERVAL_S
            self._num_bytes = self._measure()
        return self._num_bytes

    def _measure(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) + self._outside_bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bound_memory(most: int, device: torch.device) -> None:
    """What torch would take on a GPU beyond `most` bytes raises instead of growing into what others count on."""
    total = torch.cuda.get_device_properties(device).total_memory
    # unlike its neighbours, this function of torch refuses a device without an index
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), index)
