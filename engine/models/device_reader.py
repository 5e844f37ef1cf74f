"""Tensors of safetensors files on their way to a GPU, several at a time and ahead of whoever asks for them."""

import json
import os
import threading
from collections.abc import Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import torch

from engine.errors import CheckpointError

DTYPES = {
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
# bytes that a thread reads while those before them are on their way
STAGED = 16 * 2**20
THREADS = 8
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor's bytes lie in its file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class DeviceReader:
    """A context. Reading begins on entering, in the order of the files, and does not wait to be asked."""

    def __init__(self, paths: Iterable[Path], device: torch.device, left_out: Container[str] = ()) -> None:
        """left_out  names of tensors that are not read. raises  CheckpointError when a file is no safetensors file"""
        self._device = device
        self._extents = {path.name: read_header(path) for path in paths}
        self._left_out = left_out
        self._threads = ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))))
        self._staging = threading.local()
        self._consumer = torch.cuda.current_stream(device)
        self._found: dict[tuple[str, str], Future[torch.Tensor]] = {}

    def __enter__(self) -> Self:
        for file, extents in self._extents.items():
            for name, extent in extents.items():
                if name not in self._left_out:
                    self._found[file, name] = self._threads.submit(self._copy, extent)
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._found = {}

    def read(self, file: str, name: str) -> torch.Tensor:
        """raises  CheckpointError"""
        try:
            return self._found[file, name].result()
        except (KeyError, OSError) as error:
            raise CheckpointError(f"tensor {name} of {file} cannot be read: {error}") from error

    def _copy(self, extent: Extent) -> torch.Tensor:
        staging = self._staging_of_thread()
        # memory of the consumer's, all in one place, which may have been given back while work on it was still to come
        with torch.cuda.stream(self._consumer):
            target = torch.empty(extent.num_bytes, dtype=torch.uint8, device=self._device)
        staging.stream.wait_stream(self._consumer)
        with torch.cuda.stream(staging.stream), extent.path.open("rb", buffering=0) as file:
            for offset in range(0, extent.num_bytes, STAGED):
                staging.send(file.fileno(), extent.start + offset, target[offset : offset + STAGED])
        staging.stream.synchronize()
        return target.view(extent.dtype).view(extent.shape)

    def _staging_of_thread(self) -> "Staging":
        if not hasattr(self._staging, "own"):
            self._staging.own = Staging(self._device)
        return self._staging.own


class Staging:
    """Two pinned buffers of one thread, one being read into while the other is sent."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._buffers = [torch.empty(STAGED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]

    def send(self, file: int, start: int, target: torch.Tensor) -> None:
        """raises  OSError when the file ends before"""
        buffer, sent = self._buffers[0], self._sent[0]
        sent.synchronize()
        read_into(file, start, memoryview(buffer.numpy())[: len(target)])
        target.copy_(buffer[: len(target)], non_blocking=True)
        sent.record(self.stream)
        self._buffers.reverse()
        self._sent.reverse()


def read_into(file: int, start: int, buffer: memoryview) -> None:
    """raises  OSError when the file ends before the buffer is full"""
    done = 0
    while done < len(buffer):
        count = os.preadv(file, [buffer[done:]], start + done)
        if not count:
            raise OSError("the file is cut short")
        done += count


def read_header(path: Path) -> dict[str, Extent]:
    """Where each tensor lies. raises  CheckpointError"""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _extent(path, 8 + length, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _extent(path: Path, base: int, entry: dict) -> Extent:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    if not 0 <= start <= end or end - start != prod(shape) * dtype.itemsize or base + end > path.stat().st_size:
        raise ValueError(f"a tensor of shape {shape} cannot lie in bytes {start} to {end}")
    return Extent(path, dtype, shape, base + start, end - start)
