"""From settings to an engine that is ready. What it will hold is allocated here, once."""

import logging
import os
from pathlib import Path

import torch

from config import EngineConfig
from engine.batch import BlockTables
from engine.cache.kv_cache import KVCache
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.capacity import Capacity, check_fits, choose_capacity, fitting_tokens, free_host_bytes, shorten_to_fit
from engine.checkpoint_dir import resolve_checkpoint
from engine.constraint import Constraints
from engine.engine import EngineCore
from engine.errors import CapacityError
from engine.model_runner import ModelRunner
from engine.models.config import ModelConfig
from engine.models.qwen3_5 import Qwen3_5
from engine.models.weights import load_model
from engine.request import EngineInfo
from engine.sampler import Sampler
from engine.scheduler import Scheduler

log = logging.getLogger("longlane.engine")
META = torch.device("meta")
# to be raised with any change of what a layer computes or how its results lie in blocks and states
NUMERICS_VERSION = 1
# a small model gains nothing from a second thread and loses by waiting for it
WIDE_HIDDEN_SIZE = 1024


def load_engine(config: EngineConfig) -> EngineCore:
    """raises  CheckpointError, CapacityError"""
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    checkpoint_dir = resolve_checkpoint(config.model)
    model = load_model(checkpoint_dir, device, dtype)
    torch.set_num_threads(config.num_threads or _default_threads(model.config))
    capacity = _choose_capacity(config, model.config, device, dtype)
    info = EngineInfo(
        checkpoint_dir=str(checkpoint_dir),
        max_model_len=capacity.max_model_len,
        vocab_size=model.config.num_ids,
        device=_describe(device),
        num_drafts=config.num_drafts if model.config.has_mtp else 0,
        max_num_requests=config.max_num_requests,
        kv_cache_tokens=capacity.kv_cache_tokens,
    )
    constraints = Constraints(checkpoint_dir, model.config.vocab_size)
    num_snapshots = _choose_num_snapshots(config, model.config, capacity, dtype)
    runner = _build_runner(model, capacity, info, constraints, num_snapshots, device, dtype)
    scheduler = _build_scheduler(config, capacity, info, num_snapshots, cache_key(checkpoint_dir, dtype))
    return EngineCore(info, scheduler, runner, constraints)


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


def cache_key(checkpoint_dir: Path, dtype: torch.dtype) -> bytes:
    """What cached content depends on beside the text: the weights' files, the type and the arithmetic."""
    files = sorted(file for file in checkpoint_dir.iterdir() if file.is_file())
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return repr((NUMERICS_VERSION, str(dtype), str(checkpoint_dir.resolve()), stats)).encode()


def _choose_capacity(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Capacity:
    asked = choose_capacity(config.max_model_len, config.kv_cache_tokens, model_config.max_position_embeddings)
    if config.max_model_len is not None or config.kv_cache_tokens is not None:
        return asked
    num_snapshots = _choose_num_snapshots(config, model_config, asked, dtype)
    fixed = _fixed_bytes(model_config, config.max_num_requests, num_snapshots, dtype)
    chosen = shorten_to_fit(asked, fitting_tokens(_block_bytes(model_config, dtype), fixed, _free_bytes(device)))
    if chosen != asked:
        log.warning(
            "the context is %d tokens instead of the checkpoint's %d, because memory holds no more; "
            "max_model_len chooses it",
            chosen.max_model_len,
            asked.max_model_len,
        )
    return chosen


def _block_bytes(model_config: ModelConfig, dtype: torch.dtype) -> int:
    return KVCache(model_config, 1, META, dtype).num_bytes


def _fixed_bytes(model_config: ModelConfig, num_slots: int, num_snapshots: int, dtype: torch.dtype) -> int:
    """Of states, sampling counts and snapshots: the same classes on the meta device say what they would take."""
    snapshots = StateSnapshots(model_config, num_snapshots, META, dtype)
    sampler = Sampler(model_config.vocab_size, num_slots, META)
    return StateCache(model_config, num_slots, META).num_bytes + sampler.num_bytes + snapshots.num_bytes


def _choose_num_snapshots(
    config: EngineConfig, model_config: ModelConfig, capacity: Capacity, dtype: torch.dtype
) -> int:
    """As many as the budget holds; more than one per block could never be used."""
    if not config.prefix_caching:
        return 0
    one = StateSnapshots(model_config, 1, META, dtype).num_bytes
    return min(config.snapshot_bytes // one, capacity.num_blocks)


def _build_runner(
    model: Qwen3_5,
    capacity: Capacity,
    info: EngineInfo,
    constraints: Constraints,
    num_snapshots: int,
    device: torch.device,
    dtype: torch.dtype,
) -> ModelRunner:
    slots, vocab = info.max_num_requests, model.config.vocab_size
    fixed = _fixed_bytes(model.config, slots, num_snapshots, dtype)
    check_fits(capacity, _block_bytes(model.config, dtype), fixed, _free_bytes(device))
    kv = KVCache(model.config, capacity.num_blocks, device, dtype)
    states = StateCache(model.config, slots, device)
    sampler = Sampler(vocab, slots, device, constraints)
    tables = BlockTables(slots, capacity.num_blocks, device)
    snapshots = StateSnapshots(model.config, num_snapshots, device, dtype)
    return ModelRunner(model, kv, states, sampler, tables, info.num_drafts, snapshots)


def _build_scheduler(
    config: EngineConfig, capacity: Capacity, info: EngineInfo, num_snapshots: int, key: bytes
) -> Scheduler:
    return Scheduler(
        num_blocks=capacity.num_blocks,
        num_slots=info.max_num_requests,
        prefill_chunk=config.prefill_chunk,
        num_drafts=info.num_drafts,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        num_snapshots=num_snapshots,
        cache_key=key,
        reuses_decoded=not config.deterministic,
    )


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
