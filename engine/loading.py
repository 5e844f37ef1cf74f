"""From settings to an engine that is ready. What it will hold is allocated here, once."""

import os
from pathlib import Path

import torch

from config import EngineConfig
from engine.batch import BlockTables
from engine.cache.kv_cache import KVCache
from engine.cache.state_cache import StateCache, StateSnapshots
from engine.capacity import Capacity, check_fits, choose_capacity, free_host_bytes
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

# to be raised with any change of what a layer computes or how its results lie in blocks and states
NUMERICS_VERSION = 1
EMBEDDED_NAME = "longlane-tiny"
EMBEDDED_DIR = Path(__file__).parent / "embedded" / "checkpoint"


def load_engine(config: EngineConfig) -> EngineCore:
    """raises  CheckpointError, CapacityError"""
    torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    checkpoint_dir = resolve_checkpoint(config.model)
    model = load_model(checkpoint_dir, device, dtype)
    capacity = choose_capacity(config.max_model_len, config.kv_cache_tokens, model.config.max_position_embeddings)
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


def resolve_checkpoint(model: str) -> Path:
    """The directory of the checkpoint that comes with the project by its name, any other by its path."""
    return EMBEDDED_DIR if model == EMBEDDED_NAME else Path(model)


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


def _choose_num_snapshots(
    config: EngineConfig, model_config: ModelConfig, capacity: Capacity, dtype: torch.dtype
) -> int:
    """As many as the budget holds; more than one per block could never be used."""
    if not config.prefix_caching:
        return 0
    one = StateSnapshots(model_config, 1, torch.device("meta"), dtype).num_bytes
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
    # the same classes on the meta device say what they would take, without taking it
    meta = torch.device("meta")
    fixed = StateCache(model.config, slots, meta).num_bytes + Sampler(vocab, slots, meta).num_bytes
    fixed += StateSnapshots(model.config, num_snapshots, meta, dtype).num_bytes
    check_fits(capacity, KVCache(model.config, 1, meta, dtype).num_bytes, fixed, _free_bytes(device))
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
