"""Memory in which the host tier's bytes lie, laid out so that another process can tell what is whole in it.

The parent owns it (an anonymous file), so it outlives the engine process and ends with the parent. Of every cell a
header in a table at the front says what it holds and the checksum of that. It is cleared before the cell is written
and written after, so whatever a process leaves half done has no header.
"""

import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.cache.host_index import Entry, HostState, Record, record_of

log = logging.getLogger("longlane.engine")

PAGE = 4096
MAGIC = b"LLSLAB01"
DIGEST_BYTES = 32
# magic, cells of blocks and of states, layers of a block, bytes of a layer and of a state, digest of the cache's key
FRONT = struct.Struct("<8sQQQQQ32s")
# block hash, hash of the block before it, depth, flags, checksum of the bytes, checksum of this header
HEADER = struct.Struct("<32s32sIIII")
HEADER_BYTES = 128
IS_HELD, IS_ANCHOR = 1, 2
# of the slab for states: one is as large as the keys and values of several thousand tokens
STATE_SHARE = 4
# taken at a time, so that where memory ends before the slab does the rest can be gone without
PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Of a block of 64 tokens: layers, and bytes of each. state_bytes  of a recurrent state and what belongs to it"""

    num_layers: int
    layer_bytes: int
    state_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """Front page, headers of blocks, headers of states, one plane of all blocks per layer, states."""

    geometry: Geometry
    num_blocks: int
    num_states: int

    @classmethod
    def of_size(cls, geometry: Geometry, num_bytes: int) -> "Layout":
        """As much as fits; may be nothing."""
        fixed = PAGE * (geometry.num_layers + 3)
        left = max(0, num_bytes - fixed)
        state = _pages(geometry.state_bytes) + HEADER_BYTES
        num_states = max(1, left // STATE_SHARE // state) if left >= state else 0
        num_blocks = (left - num_states * state) // (geometry.block_bytes + HEADER_BYTES)
        return cls(geometry, num_blocks, num_states)

    @classmethod
    def least_bytes(cls, geometry: Geometry) -> int:
        """Of a slab that holds a block and a state."""
        cells = geometry.block_bytes + _pages(geometry.state_bytes) + 2 * HEADER_BYTES
        return PAGE * (geometry.num_layers + 3) + cells

    @property
    def is_empty(self) -> bool:
        return not (self.num_blocks and self.num_states)

    @property
    def plane_bytes(self) -> int:
        return _pages(self.num_blocks * self.geometry.layer_bytes)

    @property
    def first_plane(self) -> int:
        return _pages(PAGE + (self.num_blocks + self.num_states) * HEADER_BYTES)

    @property
    def first_state(self) -> int:
        return self.first_plane + self.geometry.num_layers * self.plane_bytes

    @property
    def num_bytes(self) -> int:
        return self.first_state + self.num_states * _pages(self.geometry.state_bytes)

    def plane(self, layer: int) -> int:
        return self.first_plane + layer * self.plane_bytes

    def state(self, cell: int) -> int:
        return self.first_state + cell * _pages(self.geometry.state_bytes)

    def header(self, is_state: bool, cell: int) -> int:
        return PAGE + (cell + is_state * self.num_blocks) * HEADER_BYTES

    def parts(self, is_state: bool, cell: int) -> list[tuple[int, int]]:
        """Where the bytes of a cell begin and end, in order."""
        size = self.geometry.layer_bytes
        if is_state:
            return [(self.state(cell), self.state(cell) + self.geometry.state_bytes)]
        starts = [self.plane(layer) + cell * size for layer in range(self.geometry.num_layers)]
        return [(start, start + size) for start in starts]

    def front(self, key: bytes) -> bytes:
        sizes = (self.geometry.num_layers, self.geometry.layer_bytes, self.geometry.state_bytes)
        return FRONT.pack(MAGIC, self.num_blocks, self.num_states, *sizes, blake2b(key, digest_size=32).digest())


class HostSlab:
    """Cells of two sizes in one map."""

    def __init__(self, layout: Layout, memory: mmap.mmap) -> None:
        self.layout = layout
        self.memory = memory
        self._view = memoryview(memory)

    def parts(self, entry: Entry) -> list[memoryview]:
        """The bytes of an entry's cell."""
        spans = self.layout.parts(isinstance(entry, HostState), entry.cell)
        return [self._view[start:end] for start, end in spans]

    def clear(self, entry: Entry) -> None:
        """The cell holds nothing from now on."""
        self._write(self.layout.header(isinstance(entry, HostState), entry.cell), bytes(HEADER.size))

    def publish(self, entry: Entry) -> int:
        """The cell's bytes are all there. return  their checksum"""
        record, checksum = record_of(entry), crc(self.parts(entry))
        flags = IS_HELD | IS_ANCHOR * record.is_anchor
        packed = HEADER.pack(record.block_hash, record.parent, record.depth, flags, checksum, 0)
        packed = packed[:-4] + struct.pack("<I", zlib.crc32(packed))
        self._write(self.layout.header(record.is_state, entry.cell), packed)
        return checksum

    def is_sound(self, entry: Entry) -> bool:
        """Whether the bytes are those that were published."""
        found = self._read(isinstance(entry, HostState), entry.cell)
        return found is not None and found[1] == crc(self.parts(entry)) and found[0] == record_of(entry)

    def records(self) -> Iterator[tuple[Record, int]]:
        """What was published, and its cell. Nothing of it has been looked at but the header."""
        for is_state, count in ((False, self.layout.num_blocks), (True, self.layout.num_states)):
            for cell in range(count):
                if found := self._read(is_state, cell):
                    yield found[0], cell

    def _read(self, is_state: bool, cell: int) -> tuple[Record, int] | None:
        start = self.layout.header(is_state, cell)
        packed = bytes(self._view[start : start + HEADER.size])
        block_hash, parent, depth, flags, checksum, own = HEADER.unpack(packed)
        if not flags & IS_HELD or own != zlib.crc32(packed[:-4] + bytes(4)):
            return None
        return Record(is_state, block_hash, parent, depth, bool(flags & IS_ANCHOR)), checksum

    def _write(self, start: int, packed: bytes) -> None:
        self._view[start : start + len(packed)] = packed


def create_file() -> int:
    """An anonymous file that takes no memory yet; whoever holds it open holds what is in it."""
    return os.memfd_create("longlane-host-cache")


def held_bytes(file: int | None) -> int:
    """Memory that a slab's file has taken."""
    return 0 if file is None else os.fstat(file).st_blocks * 512


def open_slab(file: int, geometry: Geometry, key: bytes, num_bytes: int, free_bytes: int) -> HostSlab | None:
    """The slab in a file: as an earlier process left it, or a new one.

    num_bytes   that are wanted
    free_bytes  that the machine can give, with what the file holds already; a new slab shrinks to that, with a warning
    return      None when not even one block and one state fit
    """
    found = _existing(file, geometry, key, num_bytes)
    if found is not None:
        return found
    layout = Layout.of_size(geometry, _allocate(file, num_bytes, free_bytes))
    if layout.is_empty:
        log.warning(
            "the host tier of the prefix cache is off: %d bytes hold no block and state, which take at least %d",
            min(num_bytes, free_bytes),
            Layout.least_bytes(geometry),
        )
        return None
    memory = mmap.mmap(file, layout.num_bytes)
    memory[: layout.first_plane] = bytes(layout.first_plane)
    memory[: FRONT.size] = layout.front(key)
    return HostSlab(layout, memory)


def crc(parts: Sequence[memoryview]) -> int:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value


def _existing(file: int, geometry: Geometry, key: bytes, num_bytes: int) -> HostSlab | None:
    front = os.pread(file, FRONT.size, 0)
    if len(front) < FRONT.size:
        return None
    layout = Layout(geometry, *FRONT.unpack(front)[1:3])
    if front != layout.front(key) or not layout.num_bytes <= min(num_bytes, os.fstat(file).st_size):
        return None
    return HostSlab(layout, mmap.mmap(file, layout.num_bytes))


def _allocate(file: int, num_bytes: int, free_bytes: int) -> int:
    """Takes the file's memory piece by piece; returns how much of it there is."""
    os.ftruncate(file, 0)
    wanted = min(num_bytes, free_bytes)
    held = 0
    try:
        while held < wanted:
            piece = min(PIECE_BYTES, wanted - held)
            os.posix_fallocate(file, held, piece)
            held += piece
    except OSError as error:
        os.ftruncate(file, held)
        log.warning("memory for the host tier of the prefix cache ends early: %s", error)
    if held < num_bytes:
        log.warning("the host tier of the prefix cache holds %d bytes instead of %d", held, num_bytes)
    return held


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE
