"""Blocks and states as files in a directory, which outlive the service. Each is written aside and then renamed."""

import contextlib
import errno
import logging
import os
import stat
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from pydantic import ByteSize

from engine.cache.host_index import Record
from engine.cache.host_slab import crc

log = logging.getLogger("longlane.engine")

MAGIC = b"LLDISK01"
DIGEST_BYTES = 32
# magic, digest of the cache's key, block hash, hash of the block before it, depth, is a state, bytes, checksum
HEADER = struct.Struct("<8s32s32s32sIBQI")
SUFFIXES = {False: ".kv", True: ".state"}
ASIDE = ".part"
# a file written aside that is older belongs to nobody any more
ABANDONED_S = 600.0
WARNING_GAP_S = 60.0
FULL = (errno.ENOSPC, errno.EDQUOT)
# files of a size that must be there before a full file system is taken for a lower limit: with fewer, it is others who
# have filled it
LEAST_KEPT = 4
# of a file system, what the cache leaves free: programs beside it fail where they cannot write, a cache only keeps less
SPARED_SHARE = 20
MOST_SPARED = 4 * 2**30

Name = tuple[bool, bytes]


@dataclass(slots=True)
class File:
    """used_s  when it was written or last read, as the file system keeps it"""

    path: Path
    num_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """Of a file system. spared_bytes  what is to stay free"""

    free_bytes: int
    spared_bytes: int


def room_of(directory: Path) -> Room | None:
    """Where the directory is, or will be; None where the file system does not tell."""
    for path in (directory, *directory.absolute().parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(path)
            size = found.f_blocks * found.f_frsize
            # some network file systems have no such numbers
            return Room(found.f_bavail * found.f_frsize, min(size // SPARED_SHARE, MOST_SPARED)) if size else None
    return None


class DiskTier:
    """What any engine of the same weights, codec and arithmetic may use; each such key has a directory of its own.

    Calls that touch files belong to one thread. `has` may be asked from anywhere. A file that cannot be read, or is not
    what its name says, is removed and counted; where nothing can be written, nothing is, with a warning.

    limit_bytes  of all files together; less where the file system had no room for them at the start
    """

    def __init__(self, directory: Path, key: bytes, limit_bytes: int) -> None:
        self._directory = directory
        self._key = blake2b(key, digest_size=DIGEST_BYTES).digest()
        self._own = directory / self._key[:8].hex()
        self._limit_bytes = limit_bytes
        self._files: dict[Name, File] = {}
        # of other weights or settings: they count, and go when they are the oldest
        self._others: list[File] = []
        self._warned_s = -WARNING_GAP_S
        self.num_bytes = 0
        self.counts: Counter[str] = Counter()
        self._prepare()
        self._scan()

    @property
    def num_files(self) -> int:
        return len(self._files)

    def has(self, is_state: bool, block_hash: bytes) -> bool:
        return (is_state, block_hash) in self._files

    def write(self, record: Record, parts: Sequence[memoryview], checksum: int) -> None:
        """Keeps an entry, in place of those used longest ago."""
        name, size = (record.is_state, record.block_hash), HEADER.size + sum(map(len, parts))
        if name in self._files or size > self._limit_bytes:
            return
        self._make_room(size)
        error = self._put(record, parts, checksum)
        if error is not None and error.errno in FULL and self.num_bytes >= LEAST_KEPT * size:
            # the file system holds less than the limit: what is there is as much as may be there
            self._limit_bytes = self.num_bytes
            self._make_room(size)
            error = self._put(record, parts, checksum)
        if error is not None:
            self._fail("written", error)
            return
        self._files[name] = File(self._path(name), size, time.time())
        self.num_bytes += size

    def _put(self, record: Record, parts: Sequence[memoryview], checksum: int) -> OSError | None:
        path = self._path((record.is_state, record.block_hash))
        aside = path.with_suffix(f"{path.suffix}.{os.getpid()}{ASIDE}")
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(aside, (self._header(record, sum(map(len, parts)), checksum), *parts))
            aside.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            return error
        return None

    def read(self, record: Record, parts: Sequence[memoryview]) -> bool:
        """Fills the parts with an entry's bytes; False when it is not there or not sound, and then it is no more."""
        file = self._files.get((record.is_state, record.block_hash))
        if file is None:
            return False
        try:
            is_sound = self._read(file.path, record, parts)
        except OSError as error:
            self._fail("read", error)
            is_sound = False
        if not is_sound:
            self.counts["num_damaged"] += 1
            self._forget((record.is_state, record.block_hash))
            return False
        file.used_s = time.time()
        with contextlib.suppress(OSError):
            os.utime(file.path)
        return True

    def _read(self, path: Path, record: Record, parts: Sequence[memoryview]) -> bool:
        # a pipe under that name would be waited for, and a link may lead anywhere
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return False
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                return False
            *told, num_bytes, checksum = HEADER.unpack(head)
            size = sum(map(len, parts))
            asked = [MAGIC, self._key, record.block_hash, record.parent, record.depth, record.is_state]
            if told != asked or num_bytes != size or os.fstat(file.fileno()).st_size != HEADER.size + size:
                return False
            return all(_read_all(file.fileno(), part) for part in parts) and crc(parts) == checksum

    @staticmethod
    def _write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
        with path.open("wb", buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), part)

    def _header(self, record: Record, num_bytes: int, checksum: int) -> bytes:
        what = (record.block_hash, record.parent, record.depth, record.is_state)
        return HEADER.pack(MAGIC, self._key, *what, num_bytes, checksum)

    def _path(self, name: Name) -> Path:
        return self._own / f"{name[1].hex()}{SUFFIXES[name[0]]}"

    def _prepare(self) -> None:
        """That nothing can be written is said at the start."""
        try:
            # what is in there stands for prompts and answers
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(self._own, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self._own))
        except OSError as error:
            self._fail("written", error)

    def _scan(self) -> None:
        """What is there, by name and size alone; content is looked at when it is wanted."""
        for file in self._walk():
            self.num_bytes += file.num_bytes
            name = _name_of(file.path) if file.path.parent == self._own else None
            if name is None:
                self._others.append(file)
            elif file.num_bytes <= HEADER.size:
                self._files[name] = file
                self.counts["num_damaged"] += 1
                self._forget(name)
            else:
                self._files[name] = file
        self._limit_bytes = self._within_room(self._limit_bytes)
        self._make_room(0)

    def _within_room(self, limit_bytes: int) -> int:
        """The limit, or what the file system has for this cache, with a warning."""
        room = room_of(self._directory)
        if room is None or limit_bytes <= (most := max(0, room.free_bytes + self.num_bytes - room.spared_bytes)):
            return limit_bytes
        log.warning(
            "the disk tier of the prefix cache holds %s instead of disk_cache_bytes, %s: its files take %s, "
            "of the file system %s are free, and %s are to stay free for others",
            *map(_told, (most, limit_bytes, self.num_bytes, room.free_bytes, room.spared_bytes)),
        )
        return most

    def _walk(self) -> Iterator[File]:
        try:
            directories = [path for path in self._directory.iterdir() if path.is_dir()]
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._fail("read", error)
            return
        for path in (path for directory in directories for path in _files_of(directory)):
            with contextlib.suppress(OSError):
                found = path.lstat()
                if path.name.endswith(ASIDE):
                    if time.time() - found.st_mtime > ABANDONED_S:
                        path.unlink()
                elif path.suffix in SUFFIXES.values():
                    yield File(path, found.st_size if stat.S_ISREG(found.st_mode) else 0, found.st_mtime)

    def _make_room(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes <= self._limit_bytes:
            return
        # and some more, so that not every file that is written sorts all of them
        goal = min(self._limit_bytes - num_bytes, self._limit_bytes * 15 // 16)
        names: dict[Path, Name] = {file.path: name for name, file in self._files.items()}
        for file in sorted([*self._files.values(), *self._others], key=lambda file: file.used_s):
            if self.num_bytes <= goal:
                return
            self.counts["num_evicted"] += 1
            if file.path in names:
                self._forget(names[file.path])
            else:
                self._others.remove(file)
                self._unlink(file)

    def _forget(self, name: Name) -> None:
        self._unlink(self._files.pop(name))

    def _unlink(self, file: File) -> None:
        self.num_bytes -= file.num_bytes
        try:
            file.path.rmdir() if _is_directory(file.path) else file.path.unlink(missing_ok=True)
        except OSError as error:
            self._fail("removed", error)

    def _fail(self, what: str, error: OSError) -> None:
        self.counts["num_failures"] += 1
        if time.monotonic() - self._warned_s >= WARNING_GAP_S:
            self._warned_s = time.monotonic()
            log.warning("the disk tier of the prefix cache goes on without what cannot be %s: %s", what, error)


def _told(num_bytes: int) -> str:
    """As a setting is written."""
    return ByteSize(num_bytes).human_readable()


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _files_of(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(directory.iterdir())
    return []


def _name_of(path: Path) -> Name | None:
    with contextlib.suppress(ValueError):
        block_hash = bytes.fromhex(path.stem)
        if len(block_hash) == DIGEST_BYTES:
            return path.suffix == SUFFIXES[True], block_hash
    return None


def _write_all(file: int, part: bytes | memoryview) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(file, view) :]


def _read_all(file: int, part: memoryview) -> bool:
    while part:
        count = os.readv(file, [part])
        if not count:
            return False
        part = part[count:]
    return True
