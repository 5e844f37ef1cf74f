"""How kernels are launched, and on what: asked so often in a pass over a prompt that it may take no time.

Triton's own functions of plain numbers go through its compiler's wrapper, which takes the host 2 microseconds a call.
"""

from functools import cache

import torch
import triton


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """n itself, where it is one."""
    return 1 << (n - 1).bit_length()


@cache
def is_interpreted() -> bool:
    """The interpreter has no inline assembly and rounds a fused multiply-add twice. It is chosen before Triton is
    imported."""
    return triton.knobs.runtime.interpret


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """(0, 0) under the interpreter."""
    return (0, 0) if is_interpreted() else torch.cuda.get_device_capability(device)


@cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def has_dependent_launch(device: torch.device) -> bool:
    """A kernel may start, and read its weights, while the one before it ends."""
    return capability_of(device) >= (9, 0)


def plain_options(num_warps: int, *, is_fused: bool = False) -> dict[str, object]:
    """Of a kernel that waits for all before it.

    is_fused  a product and a sum may become one multiply-add, which rounds once. Said for every kernel, because what
              Triton does when it is not told changes with 3.10, and with it bits
    """
    return {} if is_interpreted() else {"num_warps": num_warps, "enable_fp_fusion": is_fused}


def launch_options(
    device: torch.device, num_warps: int, registers: int | None = None, *, is_fused: bool = False
) -> dict[str, object]:
    """Of a kernel that may start while the one before it ends.

    registers  of a thread at most. Told of a number, the assembler also uses it: it begins all loads that stand side by
               side at once, where it would otherwise wait for some before it begins others
    is_fused   as in plain_options
    """
    if is_interpreted():
        return {}
    options = plain_options(num_warps, is_fused=is_fused) | {"launch_pdl": has_dependent_launch(device)}
    return options if registers is None else options | {"maxnreg": registers}
