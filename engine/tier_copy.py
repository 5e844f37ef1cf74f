"""Moves blocks and states between the device and the host tier's slab."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from config.engine import BLOCK_SIZE
from engine.batch import to_device
from engine.cache.host_slab import Geometry, HostSlab
from engine.cache.kv_cache import KVCache, pack, unpack
from engine.cache.state_cache import StateSnapshots
from engine.cache.tiers import Tiers, Transfer
from engine.ops.coded_kv import CodedKV
from engine.ops.paged_kv import PagedKV
from engine.planner import STAGED_BLOCKS
from engine.schedule import Schedule

log = logging.getLogger("longlane.engine")


def geometry_of(kv: KVCache, snapshots: StateSnapshots) -> Geometry:
    layer_bytes = kv.layers[0].num_bytes // kv.num_blocks
    return Geometry(len(kv.shared_layers), layer_bytes, snapshots.num_bytes // snapshots.count)


class TierCopier:
    """Copies as plain data says. On a GPU on a stream of its own, beside the steps: what is kept is read while they go
    on, and of what is brought back a layer waits for its own blocks alone."""

    def __init__(self, slab: HostSlab, tiers: Tiers, kv: KVCache, snapshots: StateSnapshots) -> None:
        layout = slab.layout
        whole = torch.frombuffer(slab.memory, dtype=torch.uint8)
        size, count = layout.geometry.layer_bytes, layout.num_blocks
        starts = [layout.plane(layer) for layer in range(layout.geometry.num_layers)]
        self._planes = [whole[start : start + count * size].view(count, size) for start in starts]
        self._states = [whole[start:end] for c in range(layout.num_states) for start, end in layout.parts(True, c)]
        self._tiers = tiers
        self._kv = kv
        self._snapshots = snapshots
        self._device = snapshots.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        # copies that may still read the device: when they have ended, and of which blocks and snapshots
        self._reading: list[tuple[torch.cuda.Event, set[int], set[int]]] = []
        self._arriving: list[list[torch.cuda.Event]] = [[] for _ in kv.shared_layers]
        if self._stream is not None:
            _pin(whole)

    @property
    def num_layers(self) -> int:
        return len(self._planes)

    def store(self, transfer: Transfer) -> None:
        """To the slab, as what was launched before leaves it."""
        with self._beside():
            for piece in self._pieces(transfer):
                for layer, plane in zip(self._kv.shared_layers, self._planes, strict=True):
                    packed = pack(layer, piece.block_ids)
                    for row, cell, count in piece.runs:
                        plane[cell : cell + count].copy_(packed[row : row + count], non_blocking=True)
            if transfer.state is not None:
                index, cell = transfer.state
                for part, target in self._state_parts(index, cell):
                    target.copy_(part, non_blocking=True)
            event = self._mark()
        if event is not None:
            blocks = {block_id for block_id, _ in transfer.blocks}
            self._reading.append((event, blocks, {transfer.state[0]} if transfer.state else set()))
        self._tiers.stored(transfer, _waiting(event))

    def restore(self, transfer: Transfer) -> None:
        """To the device. The snapshot is there for what is launched next; a layer's blocks for whoever takes it from
        `layers`, and for everybody after `join`."""
        assert transfer.state is not None
        with self._beside():
            for part, source in self._state_parts(*transfer.state):
                part.copy_(source, non_blocking=True)
            event = self._mark()
            pieces = list(self._pieces(transfer))
            for layer, events in enumerate(self._arriving):
                self._restore_layer(layer, pieces)
                if arrived := self._mark():
                    events.append(arrived)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        last = self._arriving[-1][-1] if self._arriving[-1] else None
        self._tiers.restored(transfer, _waiting(last))

    @property
    def layers(self) -> "Sequence[PagedKV | CodedKV]":
        return LayersInTurn(self)

    def layer(self, index: int) -> PagedKV | CodedKV:
        """Its blocks are there for what is launched next."""
        self._wait(self._arriving[index])
        return self._kv.layers[index]

    def join(self) -> None:
        """Everything that was brought back is there for what is launched next, which may write anywhere."""
        self.join_arriving()
        self._wait([event for event, *_ in self._reading])
        self._reading.clear()

    def join_arriving(self) -> None:
        for events in self._arriving:
            self._wait(events)

    def protect(self, blocks: set[int], snapshots: set[int]) -> None:
        """What is launched next and writes these comes after the copies that still read them."""
        self._reading = [each for each in self._reading if not each[0].query()]
        for event, read_blocks, read_snapshots in self._reading:
            if blocks & read_blocks or snapshots & read_snapshots:
                torch.cuda.current_stream(self._device).wait_event(event)

    def _restore_layer(self, layer: int, pieces: Sequence["Piece"]) -> None:
        plane = self._planes[layer]
        for piece in pieces:
            packed = torch.empty(len(piece.block_ids), plane.shape[1], dtype=torch.uint8, device=self._device)
            for row, cell, count in piece.runs:
                packed[row : row + count].copy_(plane[cell : cell + count], non_blocking=True)
            unpack(self._kv.layers[layer], piece.block_ids, packed)

    def _pieces(self, transfer: Transfer) -> Iterator["Piece"]:
        for start in range(0, len(transfer.blocks), STAGED_BLOCKS):
            block_ids, cells = zip(*transfer.blocks[start : start + STAGED_BLOCKS], strict=True)
            yield Piece(to_device(block_ids, torch.int64, self._device), list(runs(cells)))

    def _state_parts(self, index: int, cell: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bytes of a snapshot's tensors, and where they lie in the slab."""
        start = 0
        for part in self._snapshots.parts(index):
            yield part.reshape(-1).view(torch.uint8), self._states[cell][start : start + part.nbytes]
            start += part.nbytes

    def _beside(self) -> "torch.cuda.StreamContext":
        """On the copies' own stream, after all that was launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _mark(self) -> torch.cuda.Event | None:
        return self._stream.record_event(torch.cuda.Event(blocking=True)) if self._stream is not None else None

    def _wait(self, events: list[torch.cuda.Event]) -> None:
        for event in events:
            torch.cuda.current_stream(self._device).wait_event(event)
        events.clear()


@dataclass(frozen=True, slots=True)
class Piece:
    """As many blocks of a transfer as are staged at once.

    block_ids  [blocks] int64, on the device
    runs       where they lie in the slab: (place of the first, its cell, how many)
    """

    block_ids: torch.Tensor
    runs: list[tuple[int, int, int]]


class LayersInTurn(Sequence[PagedKV | CodedKV]):
    """The layers of a cache, each of which is waited for when it is asked for."""

    def __init__(self, copier: TierCopier) -> None:
        self._copier = copier

    def __len__(self) -> int:
        return self._copier.num_layers

    def __getitem__(self, index: int) -> PagedKV | CodedKV:
        return self._copier.layer(range(len(self))[index])


def runs(cells: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring cells in a row: (place of the first, its cell, how many)."""
    for _, group in groupby(enumerate(cells), key=lambda each: each[1] - each[0]):
        (row, cell), *rest = group
        yield row, cell, 1 + len(rest)


def written(schedule: Schedule) -> tuple[set[int], set[int]]:
    """Blocks and snapshots that a pass may write."""
    # behind a hit MTP's row of the token before is written too
    starts = [(chunk.state, chunk.start - (chunk.restored is not None)) for chunk in schedule.chunks]
    starts += [(state, state.num_computed_tokens) for state in schedule.decodes]
    blocks = {block_id for state, start in starts for block_id in state.block_ids[start // BLOCK_SIZE :]}
    snapshots = {copy.index for copy in schedule.copies}
    for chunk in schedule.chunks:
        if chunk.transfer is not None:
            blocks |= {block_id for block_id, _ in chunk.transfer.blocks}
            snapshots |= {chunk.transfer.state[0]} if chunk.transfer.state else set()
    return blocks, snapshots


def _waiting(event: torch.cuda.Event | None) -> Callable[[], None]:
    return event.synchronize if event is not None else _no_wait


def _no_wait() -> None:
    """On a CPU a copy has ended when it returns."""


def _pin(memory: torch.Tensor) -> None:
    """Copies from and to memory that is not pinned hold up the steps, but are right."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(error):
        log.warning("the host tier's memory cannot be pinned (CUDA error %d): copies hold up steps", int(error))
