"""A converted checkpoint on disk: a manifest beside safetensors files whose tensors are as the ops read them."""

import hashlib
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.models.config import ModelConfig, read_config, read_json
from engine.models.device_reader import DeviceReader
from engine.ops.quantized_weight import QuantizedWeight

MANIFEST_FILE = "longlane.json"
FORMAT_VERSION = 1
# rows in tiles of 16, columns in groups of 64, as quantized_weight has them
LAYOUT = "tiles16-groups64"
WORDS, SCALES = ".words", ".scales"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of the manifest. bits 4 or 8: a QuantizedWeight of that many rows; 16 or 32: the tensor itself."""

    file: str
    role: str
    bits: int
    rows: int

    @property
    def is_quantized(self) -> bool:
        return self.bits < 16


@dataclass(frozen=True, slots=True)
class StoredFile:
    """size in bytes"""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Files and tensors by name; every tensor's file is among the files, and those lie in the artifact's directory."""

    recipe: str
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]


def is_artifact(directory: Path) -> bool:
    return (directory / MANIFEST_FILE).exists()


class Artifact:
    """The tensors of one artifact by name. A context: it holds files mapped, or reads all of them on to a GPU.

    raises  CheckpointError on entering, naming the file that is missing, foreign or cut short
    """

    def __init__(self, directory: Path, device: torch.device, host_names: Collection[str] = ()) -> None:
        """host_names  tensors that are left in their files although the device is a GPU"""
        self._dir = directory
        self._device = device
        self._host_names = host_names
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._reader: DeviceReader | None = None
        self._manifest = read_manifest(directory)
        self.config: ModelConfig = read_config(directory)
        self.tensors = self._manifest.tensors

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name, entry in self._manifest.files.items():
                _check_size(self._dir / name, entry.size)
            is_on_gpu = self._device.type == "cuda"
            if is_on_gpu:
                paths = [self._dir / name for name in self._manifest.files]
                left_out = {name + suffix for name in self._host_names for suffix in ("", WORDS, SCALES)}
                self._reader = stack.enter_context(DeviceReader(paths, self._device, left_out))
            mapped = {self.tensors[name].file for name in self._host_names} if is_on_gpu else self._manifest.files
            for name in mapped:
                self._files[name] = stack.enter_context(_open(self._dir / name))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._files = {}

    @property
    def recipe(self) -> str:
        return self._manifest.recipe

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> torch.Tensor | QuantizedWeight:
        """On the device of the artifact; on the CPU, and of what is left in its file, the file's own pages."""
        stored = self.tensors[name]
        reader = None if name in self._host_names else self._reader
        if not stored.is_quantized:
            return self._fetch(reader, stored.file, name)
        words, scales = (self._fetch(reader, stored.file, name + suffix) for suffix in (WORDS, SCALES))
        return QuantizedWeight(words, scales, stored.rows, stored.bits)

    def check_hashes(self) -> None:
        """Reads every byte. raises  CheckpointError naming the file that changed since it was written"""
        for name, entry in self._manifest.files.items():
            if sha256_of(self._dir / name) != entry.sha256:
                raise CheckpointError(f"{self._dir / name} is damaged: its hash is not the one in {MANIFEST_FILE}")

    def _fetch(self, reader: DeviceReader | None, file: str, name: str) -> torch.Tensor:
        if reader is not None:
            return reader.read(file, name)
        try:
            return self._files[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {name} of {file} cannot be read: {error}") from error


def read_manifest(directory: Path) -> Manifest:
    """raises  CheckpointError when the directory is no artifact, one of another format, or names files elsewhere"""
    manifest = read_json(directory / MANIFEST_FILE)
    if manifest.get("format") != "longlane":
        raise CheckpointError(f"{directory / MANIFEST_FILE} is no manifest of an artifact")
    for field, expected in (("format_version", FORMAT_VERSION), ("layout", LAYOUT)):
        if manifest.get(field) != expected:
            raise CheckpointError(
                f"{directory / MANIFEST_FILE}: {field} is {manifest.get(field)!r}, this version reads {expected!r}: "
                "convert the checkpoint again"
            )
    try:
        return _parsed(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / MANIFEST_FILE} is incomplete ({error}): convert the checkpoint again"
        ) from error


def _parsed(manifest: dict[str, Any]) -> Manifest:
    files = {name: StoredFile(entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    tensors = {name: StoredTensor(**entry) for name, entry in manifest["tensors"].items()}
    for name in files:
        if name in ("", "..") or Path(name).name != name:
            raise CheckpointError(f"{MANIFEST_FILE}: file {name!r} must be one of this directory")
    for name, tensor in tensors.items():
        if tensor.file not in files:
            raise CheckpointError(f"{MANIFEST_FILE}: the file of {name}, {tensor.file!r}, is none of its files")
    return Manifest(manifest["recipe"], files, tensors)


def sha256_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _check_size(path: Path, size: int) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != size:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {MANIFEST_FILE} says {size}: copy it again")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
