"""How much of what the settings ask for, or leave open, the memory there is will hold."""

import logging
from dataclasses import dataclass
from pathlib import Path

from config.engine import BLOCK_SIZE, EngineConfig
from engine.errors import CapacityError
from engine.planner import (
    Demand,
    check_fits,
    context_limit,
    fits,
    gib,
    largest_kv_tokens,
    num_snapshots,
    one_snapshot,
    plan,
    with_most_snapshots,
)

# a default context below this would surprise more than a refusal
SHORTEST_DEFAULT = 4096
# most prompt tokens of a step, by device
PREFILL_CHUNKS = {"cpu": 512, "cuda": 4096}
SMALLEST_CHUNK = 512
DEFAULT_SNAPSHOT_BYTES = {"cuda": 4 * 2**30, "cpu": 2**30}
# with fewer a conversation could not even return to where its user spoke last
SNAPSHOTS_PER_REQUEST = 2
CGROUP_DIR = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")

log = logging.getLogger("longlane.engine")


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


def shorten_to_fit(capacity: Capacity, fitting: int) -> Capacity:
    """Where nobody asked for a length, a machine with little memory gets a shorter one instead of a refusal."""
    if not SHORTEST_DEFAULT <= fitting < capacity.kv_cache_tokens:
        return capacity
    return Capacity(min(capacity.max_model_len, fitting), fitting)


def choose_demand(config: EngineConfig, unsized: Demand, budget: int) -> Demand:
    """How much the engine will hold.

    unsized  what is certain of it: model, recipe, types, device
    raises   CapacityError when it does not fit the budget or passes the model's limit
    """
    model_limit = context_limit(unsized.config, config.yarn)
    asked = choose_capacity(config.max_model_len, config.kv_cache_tokens, model_limit)
    least, most = _snapshot_range(config, unsized)
    demand = _with_fitting_chunk(config, _sized(config, unsized, asked, least), budget)
    if config.max_model_len is None and config.kv_cache_tokens is None:
        chosen = shorten_to_fit(asked, largest_kv_tokens(demand, budget))
        if chosen != asked:
            log.warning(
                "the context is %d tokens instead of the checkpoint's %d, because memory holds no more; "
                "max_model_len chooses it",
                chosen.max_model_len,
                asked.max_model_len,
            )
        asked, demand = chosen, _sized(config, unsized, chosen, least)
        demand = _with_fitting_chunk(config, demand, budget)
    check_fits(demand, budget, EngineConfig.model_fields)
    if least == most:
        return demand
    wanted = _sized(config, unsized, asked, most).having(prefill_chunk=demand.prefill_chunk)
    return with_most_snapshots(wanted, budget)


def _with_fitting_chunk(config: EngineConfig, demand: Demand, budget: int) -> Demand:
    """Where nobody asked for a size of chunks, smaller ones before a refusal."""
    while config.prefill_chunk is None and demand.prefill_chunk > SMALLEST_CHUNK and not fits(demand, budget):
        demand = demand.having(prefill_chunk=demand.prefill_chunk // 2)
    return demand


def _snapshot_range(config: EngineConfig, unsized: Demand) -> tuple[int, int]:
    """Bytes that snapshots have in any case, and at most. Where nobody asked, contexts come first."""
    if config.snapshot_bytes is not None:
        return config.snapshot_bytes, config.snapshot_bytes
    most, one = DEFAULT_SNAPSHOT_BYTES[unsized.device], one_snapshot(unsized)
    return min(most, SNAPSHOTS_PER_REQUEST * config.max_num_requests * one), most


def _sized(config: EngineConfig, unsized: Demand, capacity: Capacity, snapshot_bytes: int) -> Demand:
    demand = unsized.having(
        context=capacity.max_model_len,
        kv_cache_tokens=capacity.kv_cache_tokens,
        num_requests=config.max_num_requests,
        num_drafts=config.num_drafts if unsized.config.has_mtp else 0,
        prefill_chunk=config.prefill_chunk or PREFILL_CHUNKS[unsized.device],
    )
    count = num_snapshots(demand, snapshot_bytes) if config.prefix_caching else 0
    return demand.having(num_snapshots=count)


def check_host(demand: Demand, free: int) -> None:
    """Of a GPU's plan what lies in host memory. raises  CapacityError when so much is not free"""
    needed = plan(demand.having(host_cache_bytes=0)).host_bytes
    if needed and needed > free:
        raise CapacityError(
            f"the embedding needs {gib(needed)} of host memory, but {gib(max(free, 0))} are free: "
            "set embedding_memory device"
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
