"""The tensors of a Hugging Face checkpoint, shard by shard; no shard is open longer than a unit needs it."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.models.artifact import sha256_of
from engine.models.checkpoint import INDEX_FILE, SCALE_SUFFIX, SINGLE_FILE, dequantised, plain_name
from engine.models.config import FP8_BLOCK, ModelConfig, read_config, read_json
from engine.models.layout import Shapes, tensor_shapes

_PLAIN_TYPES = (torch.bfloat16, torch.float16, torch.float32)


class Shards(Protocol):
    """Where shards come from: a directory that has them all, or whatever brings them one at a time."""

    def path(self, file: str) -> Path:
        """The shard as a file, which stays until it is released."""
        ...

    def release(self, file: str) -> None:
        """Every tensor of the shard has been read."""
        ...


class DirectoryShards:
    def __init__(self, directory: Path) -> None:
        self._dir = directory

    def path(self, file: str) -> Path:
        return self._dir / file

    def release(self, file: str) -> None:
        """They are the user's own and stay."""


class Source:
    """Names are without the prefix of the text model.

    raises  CheckpointError naming the tensor that is missing, foreign, damaged, or of a wrong shape or type
    """

    def __init__(self, checkpoint_dir: Path, shards: Shards) -> None:
        self.config: ModelConfig = read_config(checkpoint_dir)
        self._shards = shards
        self._stored: dict[str, tuple[str, str]] = {}
        self._unread: dict[str, set[str]] = {}
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        self.hashes: dict[str, str] = {}
        self._hashed: set[str] = set()
        for stored_name, file in self._weight_map(checkpoint_dir).items():
            self._add(stored_name, file)
        self.shapes: Shapes = tensor_shapes(self.config, self._stored)
        self._check_names()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open = {}

    def read(self, name: str) -> torch.Tensor:
        """One finite tensor on the CPU, in its stored type; 8-bit ones as fp32, multiplied by their scales."""
        tensor = self._fetch(name)
        self._check_shape(name, tensor, self.shapes[name])
        if tensor.dtype == torch.float8_e4m3fn:
            tensor = dequantised(tensor, self._scale(name, tensor))
        elif tensor.dtype not in _PLAIN_TYPES:
            raise CheckpointError(f"tensor {name} has type {tensor.dtype}, which is not supported")
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"tensor {name} of {self._stored[name][0]} is damaged: it holds NaN or infinity")
        return tensor

    def finish(self, names: set[str]) -> None:
        """Closes every shard, and releases those that have nothing but finished names."""
        self._stack.close()
        self._open = {}
        for name in names | {name + SCALE_SUFFIX for name in names}:
            if name in self._stored:
                file = self._stored[name][0]
                self._unread[file].discard(name)
                if not self._unread[file]:
                    self._shards.release(file)

    def expect(self, hashes: dict[str, str]) -> None:
        """What shards had when an interrupted conversion read them."""
        self.hashes = dict(hashes)

    def _weight_map(self, checkpoint_dir: Path) -> dict[str, str]:
        if (checkpoint_dir / INDEX_FILE).exists():
            weight_map = read_json(checkpoint_dir / INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{checkpoint_dir / INDEX_FILE}: weight_map is missing or empty")
            return weight_map
        # the file is no mapping
        return dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)

    def _add(self, stored_name: str, file: str) -> None:
        name = plain_name(stored_name)
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{INDEX_FILE}: the file of {stored_name} must be one of the directory")
        if name in self._stored:
            raise CheckpointError(f"tensors {self._stored[name][1]} and {stored_name} are the same one")
        if name is not None:
            self._stored[name] = (file, stored_name)
            self._unread.setdefault(file, set()).add(name)

    def _check_names(self) -> None:
        for name in self.shapes:
            if name not in self._stored:
                raise CheckpointError(f"tensor {name} is missing from {INDEX_FILE}")
        for name in self._stored.keys() - self.shapes.keys():
            if name.removesuffix(SCALE_SUFFIX) not in self.shapes or not self.config.is_fp8:
                raise CheckpointError(f"tensor {self._stored[name][1]} is not part of the model of config.json")

    def _scale(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if name + SCALE_SUFFIX not in self._stored:
            raise CheckpointError(f"tensor {name + SCALE_SUFFIX} is missing: {name} is stored in 8 bits")
        scale = self._fetch(name + SCALE_SUFFIX)
        self._check_shape(name + SCALE_SUFFIX, scale, tuple(-(-size // FP8_BLOCK) for size in weight.shape))
        return scale

    def _check_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")

    def _fetch(self, name: str) -> torch.Tensor:
        file, stored_name = self._stored[name]
        try:
            return self._file(file).get_tensor(stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {stored_name} of {file} cannot be read: {error}") from error

    def _file(self, file: str) -> Any:
        if file not in self._open:
            path = self._shards.path(file)
            self._check_hash(file, path)
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._open[file]

    def _check_hash(self, file: str, path: Path) -> None:
        if file in self._hashed:
            return
        found = sha256_of(path)
        if self.hashes.get(file, found) != found:
            raise CheckpointError(f"{path} is not the file that the interrupted conversion read: empty --dst")
        self.hashes[file] = found
        self._hashed.add(file)
