"""From settings to an engine that is ready. What it will hold is allocated here, once."""

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from config import EngineConfig
from config.engine import BLOCK_SIZE
from engine.batch import BlockTables
from engine.cache.disk_tier import DiskTier
from engine.cache.host_slab import create_file, held_bytes, open_slab
from engine.cache.kv_cache import KVCache
from engine.cache.kv_codecs import CODECS, KVCodec
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.cache.tiers import Tiers
from engine.capacity import check_host, choose_demand, free_host_bytes
from engine.checkpoint_dir import resolve_checkpoint
from engine.chunk_budget import sizes_to_time
from engine.constraint import Constraints
from engine.cuda_graph import GraphPasses
from engine.decode_pass import DecodePass, DeviceState
from engine.device_runner import MAX_REQUESTS, MAX_ROWS, DeviceRunner, EagerPasses, rows_per_request
from engine.engine import EngineCore
from engine.errors import CapacityError
from engine.model_runner import ModelRunner, Runner
from engine.models.artifact import is_artifact, read_manifest
from engine.models.config import ModelConfig, read_config
from engine.models.qwen3_5 import Qwen3_5
from engine.models.weights import load_model
from engine.ops.decode_slots import DecodeSlots
from engine.ops.penalise import TokenCounts
from engine.ops.sample_table import SamplingTable
from engine.peak_memory import PeakMemory, bound_memory
from engine.planner import OUTSIDE, Demand, Plan, plan
from engine.request import EngineInfo
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.tier_copy import TierCopier, geometry_of

log = logging.getLogger("longlane.engine")
# to be raised with any change of what a layer computes or how its results lie in blocks and states
NUMERICS_VERSION = 2
# a small model gains nothing from a second thread and loses by waiting for it
WIDE_HIDDEN_SIZE = 1024
GPU_GAP_MS = 100.0
# of the driver's part what stands as soon as a card is asked about its memory; the rest comes with kernels and graphs
CONTEXT_AT_START = 448 * 2**20
# host memory that the host tier leaves to everything else
HOST_RESERVE = 2**30
# rows of prompts for which kernels are compiled at the start: they differ where a number is one, a multiple of 16, or
# so large that other shapes are worth it
WARM_SIZES = (1, 16, 17, 64, 65, 192, 193, 1040, 1041, 4096)
# prompts that end in one step: more than a decode pass has requests are sampled and drafted for by other kernels
WARM_COUNTS = (2, 4, 8, 9, 16, 17, 32)


def load_engine(
    config: EngineConfig,
    is_ahead: bool | None = None,
    runner_type: type[DeviceRunner] = DeviceRunner,
    host_file: int | None = None,
) -> EngineCore:
    """is_ahead     run one pass ahead of the host; when not given, on a GPU with an artifact, which has the kernels
    runner_type  of a runner that is ahead
    host_file    for the host tier of the prefix cache, with what an earlier engine left in it; a new one when not given
    raises       CheckpointError, CapacityError
    """
    target = _target(config, is_ahead)
    is_lent = host_file is not None
    host_file = _host_file(config, host_file)
    demand, planned = _planned(config, target, host_file)
    constraints = Constraints(target.checkpoint_dir, demand.config.vocab_size)
    vocabulary = constraints.begin_loading()
    with timed("weights"):
        model = _load_model(config, target, demand)
        if target.device.type == "cuda":
            # of parts that became whole matrices
            torch.cuda.empty_cache()
    torch.set_num_threads(config.num_threads or _default_threads(model.config))
    info = _info(target, demand, planned)
    key = target.cache_key(config)
    with timed("caches and passes"):
        caches = _build_caches(config, model, demand, key, host_file, target)
        build = partial(_build_device_runner, runner_type) if target.is_ahead else _build_runner
        runner = build(config, model, demand, info, constraints, caches)
    if host_file is not None and not is_lent:
        # its map holds it from here on
        os.close(host_file)
    scheduler = _build_scheduler(config, demand, info, key, caches, target.is_ahead)
    if isinstance(runner, DeviceRunner) and target.device.type == "cuda":
        largest = min(demand.prefill_chunk, demand.context)
        for size, seconds in runner.time_prompts(sizes_to_time(largest)):
            scheduler.expect(size, seconds)
    # a constrained request must not wait for it, nor the others for that request
    wait([vocabulary])
    return EngineCore(info, scheduler, runner, constraints, PeakMemory(target.device, planned.of(*OUTSIDE)))


@dataclass(frozen=True, slots=True)
class Target:
    """What settings leave open, decided. is_ahead  whether passes run one ahead of the host"""

    checkpoint_dir: Path
    device: torch.device
    dtype: torch.dtype
    codec: KVCodec
    is_ahead: bool

    def cache_key(self, config: EngineConfig) -> bytes:
        reuses_decoded = not config.deterministic
        key = cache_key(self.checkpoint_dir, self.dtype, config.yarn, self.codec)
        return key + repr((self.device.type, reuses_decoded)).encode()


def _target(config: EngineConfig, is_ahead: bool | None) -> Target:
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    checkpoint_dir = resolve_checkpoint(config.model)
    if is_ahead is None:
        is_ahead = device.type == "cuda" and is_artifact(checkpoint_dir)
    return Target(checkpoint_dir, device, dtype, choose_codec(config.kv_codec, device, dtype), is_ahead)


def _planned(config: EngineConfig, target: Target, host_file: int | None) -> tuple[Demand, Plan]:
    """raises  CapacityError"""
    held = held_bytes(host_file)
    budget = _budget(config, target.device, held)
    demand = choose_demand(config, _unsized(config, target), budget - _kept_for_host_tier(config, target.device))
    if demand.device == "cuda":
        check_host(demand, free_host_bytes() + held - HOST_RESERVE)
    demand = demand.having(host_cache_bytes=_host_cache_bytes(config, demand, budget, held))
    planned = plan(demand)
    log.info("memory, as planned:\n%s", planned.table(budget))
    if target.device.type == "cuda" and config.memory_bytes is not None:
        bound_memory(budget - planned.of(*OUTSIDE), target.device)
    return demand, planned


def _load_model(config: EngineConfig, target: Target, demand: Demand) -> Qwen3_5:
    return load_model(
        target.checkpoint_dir,
        target.device,
        target.dtype,
        is_stretched=config.yarn,
        drafts=config.num_drafts > 0,
        is_embedding_on_host=demand.is_embedding_on_host,
    )


def _info(target: Target, demand: Demand, planned: Plan) -> EngineInfo:
    return EngineInfo(
        checkpoint_dir=str(target.checkpoint_dir),
        max_model_len=demand.context,
        vocab_size=demand.config.num_ids,
        device=_describe(target.device),
        num_drafts=demand.num_drafts,
        max_num_requests=demand.num_requests,
        kv_cache_tokens=demand.num_blocks * BLOCK_SIZE,
        kv_codec=target.codec.name,
        planned_bytes={share.name: share.num_bytes for share in planned.shares if share.place == "device"},
    )


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Logs how long a phase of the start took."""
    began = time.monotonic()
    yield
    log.info("start: %s in %.1f s", name, time.monotonic() - began)


def _default_threads(config: ModelConfig) -> int:
    return len(os.sched_getaffinity(0)) if config.hidden_size >= WIDE_HIDDEN_SIZE else 1


def choose_device(name: str) -> torch.device:
    """raises  CapacityError when a GPU is asked for and there is none"""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise CapacityError("device cuda: torch sees no CUDA GPU; use device cpu or auto")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def choose_codec(name: str, device: torch.device, dtype: torch.dtype) -> KVCodec:
    """Codes are the default where they make decoding faster; fp32 on a GPU is there to be compared with a CPU."""
    if name == "auto":
        return CODECS["int8-g64" if device.type == "cuda" and dtype == torch.bfloat16 else "bf16"]
    return CODECS[name]


def cache_key(
    checkpoint_dir: Path, dtype: torch.dtype, is_stretched: bool = False, codec: KVCodec = CODECS["bf16"]
) -> bytes:
    """What cached content depends on beside the text: the weights' files, the types, the positions, the arithmetic."""
    files = sorted(file for file in checkpoint_dir.iterdir() if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return repr((NUMERICS_VERSION, str(dtype), codec.name, is_stretched, str(checkpoint_dir.resolve()), stats)).encode()


def _unsized(config: EngineConfig, target: Target) -> Demand:
    """What is certain of a demand before its size is chosen."""
    model_config = read_config(target.checkpoint_dir)
    demand = Demand(
        model_config if config.num_drafts else model_config.without_mtp(),
        read_manifest(target.checkpoint_dir).recipe if is_artifact(target.checkpoint_dir) else None,
        target.codec.name,
        activation_bytes=target.dtype.itemsize,
        mtp="full" if config.mtp_window is None else "window",
        mtp_window=config.mtp_window or 0,
        host_cache_bytes=config.host_cache_bytes if config.prefix_caching else 0,
        device="cuda" if target.device.type == "cuda" else "cpu",
    )
    return demand.having(is_embedding_on_host=config.embedding_memory == "host" and demand.may_move_embedding)


@dataclass(frozen=True, slots=True)
class Caches:
    """What outlives a request. tiers, copier  of what lies outside the device, if anything does"""

    kv: KVCache
    snapshots: StateSnapshots
    tiers: Tiers | None = None
    copier: TierCopier | None = None


def _build_caches(
    config: EngineConfig,
    model: Qwen3_5,
    demand: Demand,
    key: bytes,
    host_file: int | None,
    target: Target,
) -> Caches:
    kind = target.device, target.dtype
    kv = KVCache(model.config, demand.num_blocks, *kind, target.codec, demand.window, demand.num_requests)
    snapshots = StateSnapshots(model.config, demand.num_snapshots, *kind, kv.window_bytes)
    if host_file is None or not snapshots.count:
        return Caches(kv, snapshots)
    geometry = geometry_of(kv, snapshots)
    key += repr(geometry).encode()
    slab = open_slab(host_file, geometry, key, config.host_cache_bytes, demand.host_cache_bytes)
    if slab is None:
        return Caches(kv, snapshots)
    disk = DiskTier(Path(config.disk_cache_dir), key, config.disk_cache_bytes) if config.disk_cache_dir else None
    tiers = Tiers(slab, disk)
    return Caches(kv, snapshots, tiers, TierCopier(slab, tiers, kv, snapshots))


def _host_file(config: EngineConfig, given: int | None) -> int | None:
    if not (config.host_cache_bytes and config.prefix_caching):
        return None
    return create_file() if given is None else given


def _kept_for_host_tier(config: EngineConfig, device: torch.device) -> int:
    """Of a budget that is host memory, where the context would otherwise be made as long as fits."""
    is_sized = config.max_model_len is not None or config.kv_cache_tokens is not None
    return 0 if is_sized or device.type == "cuda" or not config.prefix_caching else config.host_cache_bytes


def _host_cache_bytes(config: EngineConfig, demand: Demand, budget: int, held: int) -> int:
    """Of the host tier: as much as is asked for, or is left."""
    if not (config.host_cache_bytes and config.prefix_caching):
        return 0
    without = plan(demand.having(host_cache_bytes=0))
    on_host = free_host_bytes() + held - HOST_RESERVE - without.host_bytes
    left = budget - plan(demand).num_bytes if demand.device == "cpu" else on_host
    return max(0, min(config.host_cache_bytes, left))


def _build_runner(
    config: EngineConfig,
    model: Qwen3_5,
    demand: Demand,
    info: EngineInfo,
    constraints: Constraints,
    caches: Caches,
) -> Runner:
    slots, vocab = info.max_num_requests, model.config.vocab_size
    device = caches.snapshots.device
    states = StateCache(model.config, slots, device)
    sampler = Sampler(vocab, slots, device, constraints)
    tables = BlockTables(slots, demand.num_blocks, device)
    runner = (model, caches.kv, states, sampler, tables, info.num_drafts)
    return ModelRunner(*runner, caches.snapshots, caches.copier)


def _build_device_runner(
    runner_type: type[DeviceRunner],
    config: EngineConfig,
    model: Qwen3_5,
    demand: Demand,
    info: EngineInfo,
    constraints: Constraints,
    caches: Caches,
) -> Runner:
    slots, vocab = info.max_num_requests, model.config.vocab_size
    device = caches.snapshots.device
    # rows that are dropped may lie behind the last block
    tables = BlockTables(slots, -(-demand.context // BLOCK_SIZE) + 1, device)
    states = StateCache(model.config, slots, device, caches.snapshots)
    state = DeviceState(
        slots=DecodeSlots.empty(slots, max(info.num_drafts, 1), device),
        sampling=SamplingTable.neutral(slots, device),
        counts=TokenCounts.zeros(slots, vocab, device),
        block_ids=tables.ids,
        kv=caches.kv,
        states=states,
    )
    decode_pass = DecodePass(model, state, info.num_drafts, max_context=demand.context + MAX_ROWS)
    passes = EagerPasses(decode_pass, device)
    if device.type == "cuda" and config.cuda_graphs:
        rows = [rows_per_request(count, info.num_drafts) for count in range(1, min(slots, MAX_REQUESTS) + 1)]
        passes = GraphPasses(decode_pass, rows, vocab, device)
    outlive = (caches.snapshots, caches.copier)
    runner = runner_type(model, state, states, tables, decode_pass, passes, constraints, *outlive)
    if device.type == "cuda":
        with timed("kernels of prompts"):
            runner.warm_up(_prompts_to_warm(min(demand.prefill_chunk, demand.context), demand.context, slots))
    return runner


def _prompts_to_warm(largest: int, context: int, num_slots: int) -> list[list[tuple[int, int]]]:
    """Alone, behind the longest context, and beside others. Nothing that comes later takes more memory."""
    sizes = sorted({size for size in WARM_SIZES if size < largest} | {largest})
    together = [count for count in WARM_COUNTS if count <= num_slots]
    end = context // BLOCK_SIZE * BLOCK_SIZE
    far = [(end - size, size) for size in sorted({BLOCK_SIZE, largest // BLOCK_SIZE * BLOCK_SIZE}) if size]
    return [[(0, size)] for size in sizes] + [[each] for each in far] + [[(0, 1)] * count for count in together]


def _build_scheduler(
    config: EngineConfig,
    demand: Demand,
    info: EngineInfo,
    key: bytes,
    caches: Caches,
    is_ahead: bool,
) -> Scheduler:
    return Scheduler(
        num_blocks=demand.num_blocks,
        num_slots=info.max_num_requests,
        prefill_chunk=demand.prefill_chunk,
        num_drafts=info.num_drafts,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        num_snapshots=demand.num_snapshots,
        cache_key=key,
        reuses_decoded=not config.deterministic,
        longest_gap_s=_longest_gap_s(config, info),
        most_decodes=MAX_REQUESTS if is_ahead else None,
        tiers=caches.tiers,
        # an artifact's rows have the same bits wherever a prompt is cut; a window is what its last row sees
        keeps_inside=is_ahead and caches.kv.window is None,
    )


def _longest_gap_s(config: EngineConfig, info: EngineInfo) -> float | None:
    gap_ms = config.longest_gap_ms or (None if info.device == "cpu" else GPU_GAP_MS)
    return None if gap_ms is None else gap_ms / 1000


def _budget(config: EngineConfig, device: torch.device, held: int) -> int:
    """What this process may hold in all, before anything is loaded.

    held  bytes of host memory that an earlier process has left to this one
    """
    # the plan counts what has been taken by asking
    free = torch.cuda.mem_get_info(device)[0] + CONTEXT_AT_START if device.type == "cuda" else free_host_bytes() + held
    return min(free, config.memory_bytes or free)


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
