"""Writes an artifact of the real dimensions with random codes, for measuring what needs no trained weights.

    python3 tests/bench/random_artifact.py --profile 35b-a3b --recipe w4 --out /dev/shm/35b-w4

Outputs of a product are about as large as its inputs, and the router chooses among all experts. Codes and scales are
cut from one block of random bytes at random places: fast, and nothing that reads them can tell.
"""

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from engine.convert.plan import Part, plan
from engine.convert.recipes import RECIPES
from engine.models.artifact import FORMAT_VERSION, LAYOUT, MANIFEST_FILE, SCALES, WORDS, StoredTensor
from engine.models.config import PROFILES, ModelConfig, MoeConfig
from engine.models.layout import FUSED_GATE_UP, Shapes, tensor_shapes
from engine.ops.quantized_weight import GROUP, TILE_ROWS

NAMES = {"35b-a3b": "Qwen3.6-35B-A3B", "27b": "Qwen3.6-27B and Qwen3.8-27B"}
POOL_BYTES = 256 * 2**20
WRITTEN = 8 * 2**20
THREADS = 8
# deviation of uniformly random codes
DEVIATION = {4: 4.6, 8: 74.0}
DTYPES = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class Blob:
    """One stored tensor: bytes, or random ones of this kind."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: torch.Tensor | None = None
    scale: float = 0.0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Pools:
    """Random bytes, and random scales between 0.8 and 1.2 times a number."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.codes = rng.integers(0, 2**63, POOL_BYTES // 8, dtype=np.int64).view(np.uint8)
        self._factors = rng.uniform(0.8, 1.2, POOL_BYTES // 64).astype(np.float32)
        self._scales: dict[float, np.ndarray] = {}
        self._lock = threading.Lock()

    def scales(self, scale: float) -> np.ndarray:
        with self._lock:
            if scale not in self._scales:
                self._scales[scale] = (self._factors * scale).astype(np.float16).view(np.uint8)
            return self._scales[scale]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", choices=NAMES, default="35b-a3b")
    parser.add_argument("--recipe", choices=RECIPES, default="w4")
    parser.add_argument("--layers", type=int, help="fewer layers than the profile has, a multiple of 4")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    began = time.monotonic()
    num_bytes = write_artifact(chosen.out, NAMES[chosen.profile], chosen.recipe, chosen.layers)
    print(f"{num_bytes / 1e9:.1f} GB in {time.monotonic() - began:.1f} s")


def write_artifact(directory: Path, profile: str, recipe: str, num_layers: int | None = None) -> int:
    """Returns its bytes."""
    config_json = config_of(PROFILES[profile], num_layers)
    config = shortened(PROFILES[profile], num_layers)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json, indent=1))
    prefixes = [*(f"layers.{i}." for i in range(config.num_hidden_layers)), "mtp.layers.0."]
    shapes = tensor_shapes(config, {prefix + FUSED_GATE_UP for prefix in prefixes})
    units = plan(config, shapes)
    pools = Pools(0)
    tensors = {}
    with ThreadPoolExecutor(THREADS) as threads:
        written = [
            threads.submit(write_file, directory / unit.file, list(blobs_of(unit.parts, shapes, recipe)), pools, index)
            for index, unit in enumerate(units)
        ]
        files = {unit.file: {"bytes": each.result(), "sha256": ""} for unit, each in zip(units, written, strict=True)}
    for unit in units:
        tensors |= {part.name: asdict(entry_of(part, shapes, recipe, unit.file)) for part in unit.parts}
    manifest = {"format": "longlane", "format_version": FORMAT_VERSION, "layout": LAYOUT, "profile": profile}
    manifest |= {"recipe": recipe, "files": files, "tensors": tensors, "source": "random numbers; hashes are left out"}
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
    return sum(file["bytes"] for file in files.values())


def shape_of(part: Part, shapes: Shapes) -> tuple[int, ...]:
    sources = [shapes[source] for source in part.sources]
    return part.arrange([torch.empty(shape, device="meta") for shape in sources]).shape


def entry_of(part: Part, shapes: Shapes, recipe: str, file: str) -> StoredTensor:
    shape = shape_of(part, shapes)
    return StoredTensor(file, part.role, RECIPES[recipe][part.role], shape[-2] if len(shape) > 1 else shape[0])


def blobs_of(parts: tuple[Part, ...], shapes: Shapes, recipe: str) -> Iterator[Blob]:
    for part in parts:
        bits, shape = RECIPES[recipe][part.role], shape_of(part, shapes)
        if bits >= 16:
            dtype = torch.bfloat16 if bits == 16 else torch.float32
            yield Blob(part.name, dtype, tuple(shape), plain(part, shape).to(dtype))
            continue
        *stack, rows, columns = shape
        tiles, groups = -(-rows // TILE_ROWS), columns // GROUP
        yield Blob(part.name + WORDS, torch.int32, (*stack, tiles, groups, bits // 2, TILE_ROWS, 4))
        scale = gain(part) / (DEVIATION[bits] * columns**0.5)
        yield Blob(part.name + SCALES, torch.float16, (*stack, tiles, groups, TILE_ROWS), scale=scale)


def gain(part: Part) -> float:
    """An embedding row has numbers of about one; what a layer adds is smaller than what it adds to."""
    if part.role == "embedding":
        return 2048**0.5
    return 0.3 if part.name.endswith(("o_proj", "out_proj", "down")) else 1.0


def plain(part: Part, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash_of(part.name))
    if part.name.endswith("A_log"):
        return torch.empty(shape).uniform_(1, 16, generator=generator).log()
    if part.name.endswith("dt_bias"):
        return torch.empty(shape).uniform_(-6, -2, generator=generator)
    if part.name.endswith("conv1d.weight"):
        return torch.empty(shape).normal_(std=0.5, generator=generator)
    if part.name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape)
    if part.role == "plain":
        return torch.zeros(shape)
    return torch.empty(shape).normal_(std=shape[-1] ** -0.5, generator=generator)


def hash_of(name: str) -> int:
    return sum(byte * 31**place for place, byte in enumerate(name.encode())) % 2**31


def write_file(path: Path, blobs: list[Blob], pools: Pools, seed: int) -> int:
    header, place = {}, 0
    for blob in blobs:
        end = place + blob.num_bytes
        header[blob.name] = {"dtype": DTYPES[blob.dtype], "shape": blob.shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for blob in blobs:
            if blob.content is not None:
                file.write(memoryview(blob.content.contiguous().view(torch.uint8).numpy()))
            else:
                pool = pools.codes if blob.dtype == torch.int32 else pools.scales(blob.scale)
                write_random(file.fileno(), blob.num_bytes, pool, rng)
        return os.fstat(file.fileno()).st_size


def write_random(file: int, count: int, pool: np.ndarray, rng: np.random.Generator) -> None:
    while count:
        size = min(count, WRITTEN)
        start = int(rng.integers(0, (len(pool) - size) // 16)) * 16 if len(pool) > size else 0
        count -= os.write(file, memoryview(pool[start : start + size]))


def shortened(config: ModelConfig, num_layers: int | None) -> ModelConfig:
    return config if num_layers is None else replace(config, num_hidden_layers=num_layers)


def config_of(config: ModelConfig, num_layers: int | None) -> dict:
    """config.json as a published checkpoint has it, as far as the engine reads it."""
    is_moe = isinstance(config.feed_forward, MoeConfig)
    names = (
        *("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "linear_num_key_heads"),
        *("linear_num_value_heads", "max_position_embeddings", "rope_theta", "rms_norm_eps"),
        *("mtp_num_hidden_layers", "tie_word_embeddings"),
    )
    fixed = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    return {
        "model_type": "qwen3_5_moe" if is_moe else "qwen3_5",
        "hidden_act": "silu",
        "num_hidden_layers": num_layers or config.num_hidden_layers,
        **{name: getattr(config, name) for name in names},
        **fixed,
        **asdict(config.feed_forward),
    }


if __name__ == "__main__":
    main()
