"""Whether what the settings ask for fits the memory there is."""

from dataclasses import dataclass
from pathlib import Path

from config.engine import BLOCK_SIZE
from engine.errors import CapacityError

# activations, logits and allocator slack beside what is counted
WORKSPACE_BYTES = 384 * 2**20
# a default context below this would surprise more than a refusal
SHORTEST_DEFAULT = 4096
CGROUP_DIR = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Capacity:
    """Counts that are fixed for the life of the engine. kv_cache_tokens is a multiple of the block size."""

    max_model_len: int
    kv_cache_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.kv_cache_tokens // BLOCK_SIZE


def choose_capacity(max_model_len: int | None, kv_cache_tokens: int | None, model_limit: int) -> Capacity:
    """What is not set follows from what is, and from the checkpoint's own limit.

    raises  CapacityError when max_model_len passes that limit
    """
    if max_model_len is not None and max_model_len > model_limit:
        raise CapacityError(
            f"max_model_len {max_model_len} is more than the checkpoint's limit of {model_limit} tokens: "
            f"set it to {model_limit} or less"
        )
    longest = max_model_len or min(model_limit, kv_cache_tokens or model_limit)
    num_blocks = -(-(kv_cache_tokens or longest) // BLOCK_SIZE)
    return Capacity(longest, num_blocks * BLOCK_SIZE)


def fitting_tokens(block_bytes: int, fixed_bytes: int, free_bytes: int) -> int:
    """KV cache tokens that the memory there is holds.

    block_bytes  of one KV block
    fixed_bytes  of everything else that is still to be allocated
    """
    return max(0, (free_bytes - fixed_bytes - WORKSPACE_BYTES) // block_bytes) * BLOCK_SIZE


def shorten_to_fit(capacity: Capacity, fitting: int) -> Capacity:
    """Where nobody asked for a length, a machine with little memory gets a shorter one instead of a refusal."""
    if not SHORTEST_DEFAULT <= fitting < capacity.kv_cache_tokens:
        return capacity
    return Capacity(min(capacity.max_model_len, fitting), fitting)


def check_fits(capacity: Capacity, block_bytes: int, fixed_bytes: int, free_bytes: int) -> None:
    """raises  CapacityError that names how many KV cache tokens would fit"""
    fitting = fitting_tokens(block_bytes, fixed_bytes, free_bytes)
    if capacity.kv_cache_tokens <= fitting:
        return
    fixed_bytes += WORKSPACE_BYTES
    advice = (
        f"set max_model_len and kv_cache_tokens to {fitting} or less"
        if fitting
        else "lower max_num_requests or snapshot_bytes, or give the engine more memory"
    )
    raise CapacityError(
        f"a KV cache of {capacity.kv_cache_tokens} tokens needs {_gib(capacity.num_blocks * block_bytes)} "
        f"and everything else {_gib(fixed_bytes)}, but {_gib(free_bytes)} are free: {advice}"
    )


def free_host_bytes() -> int:
    """Memory that this process may still take: the host's, or less inside a container with a limit."""
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min(available, _free_in_cgroup(available))


def _free_in_cgroup(default: int) -> int:
    limit_file = CGROUP_DIR / "memory.max"
    if not limit_file.exists() or (limit := limit_file.read_text().strip()) == "max":
        return default
    stat = dict(line.split() for line in (CGROUP_DIR / "memory.stat").read_text().splitlines())
    used = int((CGROUP_DIR / "memory.current").read_text()) - int(stat["inactive_file"])
    return max(0, int(limit) - used)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
