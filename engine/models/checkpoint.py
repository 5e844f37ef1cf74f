"""A checkpoint's tensors on disk: found, checked against what the model needs, then read one at a time."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError
from engine.models.config import FP8_BLOCK, ModelConfig, read_json
from engine.models.layout import Shapes, tensor_shapes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"
_PLAIN_TYPES = ("F32", "BF16", "F16")
_FP8_TYPE = "F8_E4M3"
# the longer prefix first: both begin with the shorter
_TEXT_PREFIXES = ("model.language_model.", "model.")
_VISION_PREFIXES = ("model.visual.", "visual.")
_BARE_PREFIXES = ("mtp.", "lm_head.")


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor is and what its file says about it."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of one directory by their names without the text model's prefix. A context: it holds files open.

    raises  CheckpointError on entering, naming the tensor that is missing, extra, or of a wrong shape or type
    """

    def __init__(self, checkpoint_dir: Path, config: ModelConfig) -> None:
        self._dir = checkpoint_dir
        self._config = config
        self._files = ExitStack()
        self._stored: dict[str, _Stored] = {}

    def __enter__(self) -> Self:
        with ExitStack() as files:
            self._stored = _by_plain_name(self._open_all(files))
            _check(self._stored, self._config)
            self._files = files.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._stored = {}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor on the CPU; 8-bit ones are multiplied by their scales."""
        stored = self._stored[name]
        tensor = self._fetch(stored)
        if stored.dtype == _FP8_TYPE:
            return dequantised(tensor, self._fetch(self._stored[name + SCALE_SUFFIX])).to(dtype)
        return tensor.to(dtype)

    def _fetch(self, stored: _Stored) -> torch.Tensor:
        try:
            return stored.file.get_tensor(stored.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"tensor {stored.name} cannot be read: {error}") from error

    def _open_all(self, files: ExitStack) -> Iterable[_Stored]:
        expected = self._file_of_each()
        for file_name in sorted(set(expected.values())) or [SINGLE_FILE]:
            file = self._open(files, file_name)
            for name in file.keys():  # noqa: SIM118  the file is no mapping
                if expected and expected.pop(name, None) != file_name:
                    raise CheckpointError(f"tensor {name} of {file_name} is not in {INDEX_FILE}")
                part = file.get_slice(name)
                yield _Stored(file, name, tuple(part.get_shape()), part.get_dtype())
        for name, file_name in expected.items():
            raise CheckpointError(f"tensor {name} is missing: {INDEX_FILE} places it in {file_name}")

    def _file_of_each(self) -> dict[str, str]:
        if not (self._dir / INDEX_FILE).exists():
            return {}
        weight_map = read_json(self._dir / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{self._dir / INDEX_FILE}: weight_map is missing or empty")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{INDEX_FILE}: the file of {name} must be one of this directory")
        return dict(weight_map)

    def _open(self, files: ExitStack, file_name: str) -> Any:
        path = self._dir / file_name
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        try:
            return files.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Blocks of 128 x 128 times one number each, in fp32.

    weight  [rows, columns]
    scale   [ceil(rows / 128), ceil(columns / 128)]
    """
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(FP8_BLOCK, dim=1)[:, :columns]
    # one multiplication per block of rows: a scale of the weight's own size would double the memory
    blocks = weight.float().split(FP8_BLOCK)
    return torch.cat([block.mul_(row) for block, row in zip(blocks, wide, strict=True)]).view(rows, columns)


def _by_plain_name(tensors: Iterable[_Stored]) -> dict[str, _Stored]:
    found: dict[str, _Stored] = {}
    for tensor in tensors:
        name = plain_name(tensor.name)
        if name in found:
            raise CheckpointError(f"tensors {found[name].name} and {tensor.name} are the same one")
        if name is not None:
            found[name] = tensor
    return found


def plain_name(name: str) -> str | None:
    """The name without the text model's prefix; None for a tensor of the vision part."""
    if name.startswith(_VISION_PREFIXES):
        return None
    if name.startswith(_BARE_PREFIXES):
        return name
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    raise CheckpointError(f"tensor {name} does not belong to this family")


def _check(stored: dict[str, _Stored], config: ModelConfig) -> None:
    shapes = tensor_shapes(config, stored)
    shapes |= _scale_shapes(stored, shapes)
    for name, shape in shapes.items():
        if name not in stored:
            raise CheckpointError(f"tensor {name} is missing{_hint(name)}")
        if stored[name].shape != shape:
            raise CheckpointError(
                f"tensor {stored[name].name} has shape {list(stored[name].shape)}, config.json asks for {list(shape)}"
            )
        _check_type(stored[name], shape, config)
    for name in stored.keys() - shapes.keys():
        raise CheckpointError(f"tensor {stored[name].name} is not part of the model that config.json describes")


def _scale_shapes(stored: dict[str, _Stored], shapes: Shapes) -> Shapes:
    return {
        name + SCALE_SUFFIX: tuple(-(-size // FP8_BLOCK) for size in shape)
        for name, shape in shapes.items()
        if name in stored and stored[name].dtype == _FP8_TYPE
    }


def _check_type(tensor: _Stored, shape: tuple[int, ...], config: ModelConfig) -> None:
    if tensor.dtype in _PLAIN_TYPES:
        return
    if tensor.dtype != _FP8_TYPE or len(shape) != 2 or tensor.name.endswith(SCALE_SUFFIX):
        raise CheckpointError(f"tensor {tensor.name} has type {tensor.dtype}, which is not supported there")
    if not config.is_fp8:
        raise CheckpointError(f"tensor {tensor.name} has type {tensor.dtype}, but quantization_config is missing")


def _hint(name: str) -> str:
    if name.endswith(SCALE_SUFFIX):
        return f": {name.removesuffix(SCALE_SUFFIX)} is stored in 8 bits and needs its scales"
    if name.startswith("mtp."):
        return ": set mtp_num_hidden_layers to 0 in config.json to serve the checkpoint without MTP"
    return ""
