"""How fast the GPU copies its own memory: `python -m engine.copy_speed` prints bytes read and written a second."""

import sys

import torch

from config.output import while_read

COPIED_BYTES = 2 * 2**30
ROUNDS = 20


def copy_bytes_per_s() -> float:
    source = torch.ones(COPIED_BYTES // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(ROUNDS):
        target.copy_(source)
    ended.record()
    ended.synchronize()
    return 2 * COPIED_BYTES * ROUNDS / (began.elapsed_time(ended) / 1000)


def main() -> int:
    print(copy_bytes_per_s() if torch.cuda.is_available() else "no GPU")
    return 0


if __name__ == "__main__":
    sys.exit(while_read(main))
