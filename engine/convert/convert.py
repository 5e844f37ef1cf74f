"""Conversion: unit by unit, each written whole and recorded before the next begins."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.convert.plan import Part, Unit, plan
from engine.convert.recipes import RECIPES
from engine.convert.source import DirectoryShards, Shards, Source
from engine.errors import CheckpointError
from engine.models.artifact import (
    FORMAT_VERSION,
    LAYOUT,
    MANIFEST_FILE,
    SCALES,
    WORDS,
    Artifact,
    StoredTensor,
    is_artifact,
    sha256_of,
)
from engine.models.checkpoint import INDEX_FILE
from engine.models.config import PROFILES, ModelConfig, read_json
from engine.ops.quantized_weight import quantize_weight

PROGRESS_FILE = "progress.json"
# what is served beside the weights
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "LICENSE*")

Report = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class _Done:
    """A unit on disk. squares: role -> [[error, weight], [error of max-abs, weight]], sums of squares."""

    file: str
    bytes: int
    sha256: str
    tensors: dict[str, dict[str, Any]]
    squares: dict[str, list[list[float]]]


def convert(
    source_dir: Path,
    target_dir: Path,
    recipe: str,
    shards: Shards | None = None,
    device: torch.device | None = None,
    report: Report = lambda done, total, name: None,
) -> dict[str, Any]:
    """Writes the artifact, or what an interrupted conversion left to write; returns the manifest.

    shards  where they come from when not from source_dir, which has config.json and the index in any case
    device  where weights are rounded
    report  called after each unit: units done, units in all, its name
    raises  CheckpointError naming the tensor or file
    """
    if recipe not in RECIPES:
        raise CheckpointError(f"recipe {recipe!r} is not known; known are {', '.join(RECIPES)}")
    if is_artifact(source_dir) or is_artifact(target_dir):
        raise CheckpointError(f"{source_dir if is_artifact(source_dir) else target_dir} is an artifact already")
    target_dir.mkdir(parents=True, exist_ok=True)
    with Source(source_dir, shards or DirectoryShards(source_dir)) as source:
        units = plan(source.config, source.shapes)
        progress = _Progress(target_dir, _identity(source_dir, recipe), source)
        for count, unit in enumerate(units, start=1):
            if unit.name not in progress.done:
                progress.add(unit.name, _write(unit, source, target_dir, recipe, device or torch.device("cpu")))
            source.finish(unit.sources)
            report(count, len(units), unit.name)
        manifest = _manifest(source, recipe, list(progress.done.values()))
    _copy_companions(source_dir, target_dir)
    return _publish(target_dir, manifest, {unit.file for unit in units})


class _Progress:
    """What is done, in a file that is replaced after every unit."""

    def __init__(self, target_dir: Path, identity: dict[str, str], source: Source) -> None:
        self._file = target_dir / PROGRESS_FILE
        self._identity = identity
        self._source = source
        self.done: dict[str, _Done] = {}
        if self._file.exists():
            self._resume(target_dir)

    def add(self, name: str, done: _Done) -> None:
        self.done[name] = done
        units = {name: asdict(done) for name, done in self.done.items()}
        _write_json(self._file, self._identity | {"shards": self._source.hashes, "units": units})

    def _resume(self, target_dir: Path) -> None:
        before = read_json(self._file)
        if any(before.get(field) != value for field, value in self._identity.items()):
            raise CheckpointError(f"{target_dir} has another conversion half done: empty it, or choose another --dst")
        self._source.expect(before["shards"])
        for name, entry in before["units"].items():
            done = _Done(**entry)
            file = target_dir / done.file
            if file.exists() and file.stat().st_size == done.bytes:
                self.done[name] = done


def _write(unit: Unit, source: Source, target_dir: Path, recipe: str, device: torch.device) -> _Done:
    tensors: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    squares: dict[str, torch.Tensor] = {}
    for part in unit.parts:
        made, entry, error = _make(part, source, RECIPES[recipe][part.role], device)
        tensors |= made
        entries[part.name] = asdict(replace(entry, file=unit.file))
        if error is not None:
            squares[part.role] = squares.get(part.role, 0) + error
    path = target_dir / unit.file
    unfinished = path.with_suffix(".unfinished")
    save_file(tensors, unfinished)
    os.replace(unfinished, path)
    lists = {role: table.tolist() for role, table in squares.items()}
    return _Done(unit.file, path.stat().st_size, sha256_of(path), entries, lists)


def _make(
    part: Part, source: Source, bits: int, device: torch.device
) -> tuple[dict[str, torch.Tensor], StoredTensor, torch.Tensor | None]:
    """The stored tensors of a part, its entry without the file, and the sums of squares of what was rounded."""
    tensor = part.arrange([source.read(name) for name in part.sources])
    entry = StoredTensor(file="", role=part.role, bits=bits, rows=tensor.shape[-2] if tensor.dim() > 1 else len(tensor))
    if not entry.is_quantized:
        return {part.name: tensor.to(torch.bfloat16 if bits == 16 else torch.float32).contiguous()}, entry, None
    try:
        weight, squares = quantize_weight(tensor.to(device), bits)
    except ValueError as error:
        raise CheckpointError(f"tensor {part.name}, made of {', '.join(part.sources[:3])}: {error}") from error
    return {part.name + WORDS: weight.words.cpu(), part.name + SCALES: weight.scales.cpu()}, entry, squares


def _identity(source_dir: Path, recipe: str) -> dict[str, str]:
    index = source_dir / INDEX_FILE
    return {
        "recipe": recipe,
        "layout": LAYOUT,
        "config_sha256": sha256_of(source_dir / "config.json"),
        "index_sha256": sha256_of(index) if index.exists() else "",
    }


def _manifest(source: Source, recipe: str, done: list[_Done]) -> dict[str, Any]:
    return {
        "format": "longlane",
        "format_version": FORMAT_VERSION,
        "layout": LAYOUT,
        "profile": profile_of(source.config),
        "recipe": recipe,
        "source_shards": source.hashes,
        "files": {unit.file: {"bytes": unit.bytes, "sha256": unit.sha256} for unit in done},
        "tensors": {name: entry for unit in done for name, entry in unit.tensors.items()},
        "errors": error_table([unit.squares for unit in done]),
    }


def profile_of(config: ModelConfig) -> str:
    plain = replace(config, is_fp8=False)
    return next((name for name, profile in PROFILES.items() if profile == plain), "another size")


def error_table(units: list[dict[str, list[list[float]]]]) -> dict[str, dict[str, float]]:
    """Relative squared error of each role: as stored, and as a scale of max-abs would have left it."""
    sums: dict[str, torch.Tensor] = {}
    for unit in units:
        for role, squares in unit.items():
            sums[role] = sums.get(role, 0) + torch.tensor(squares, dtype=torch.float64)
    ratios = {role: (table[:, 0] / table[:, 1].clamp(min=1e-300)).tolist() for role, table in sums.items()}
    return {role: {"stored": stored, "max_abs": plain} for role, (stored, plain) in ratios.items()}


def _copy_companions(source_dir: Path, target_dir: Path) -> None:
    for pattern in _COMPANIONS:
        for file in source_dir.glob(pattern):
            if file.name not in (INDEX_FILE, PROGRESS_FILE):
                shutil.copyfile(file, target_dir / file.name)


def _publish(target_dir: Path, manifest: dict[str, Any], files: set[str]) -> dict[str, Any]:
    """Reads everything back before the directory becomes an artifact."""
    unverified = target_dir / "unverified.json"
    _write_json(unverified, manifest)
    os.replace(unverified, target_dir / MANIFEST_FILE)
    try:
        with Artifact(target_dir, torch.device("cpu")) as artifact:
            artifact.check_hashes()
            for name in artifact.tensors:
                artifact.read(name)
    except CheckpointError:
        (target_dir / MANIFEST_FILE).unlink()
        raise
    (target_dir / PROGRESS_FILE).unlink(missing_ok=True)
    return manifest


def _write_json(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(unfinished, path)
