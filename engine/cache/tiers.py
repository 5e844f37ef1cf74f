"""What of the prefix cache lies outside the device: a slab in host memory and, behind it, a directory.

Everything that takes time runs on two threads: checksums and waiting for copies on one, files on the other. What they
found is taken over by `poll`, so that all that is decided is decided on the engine's thread.
"""

import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from config.engine import BLOCK_SIZE
from engine.cache.disk_tier import DiskTier
from engine.cache.host_index import Entry, HostBlock, HostIndex, line, record_of
from engine.cache.host_slab import HostSlab

# a prompt waits no longer for what lies on disk
LONGEST_FETCH_S = 10.0
# bytes that wait to be written; what comes meanwhile is not
MOST_UNWRITTEN = 1 / 2
URGENT, LATER = 0, 1

Result = Callable[[], None]
Job = Callable[[], Result | None]


@dataclass(frozen=True, slots=True)
class Found:
    """How far a prompt is known outside the device. hashes  of its blocks up to the deepest state"""

    hashes: tuple[bytes, ...]

    @property
    def depth(self) -> int:
        return len(self.hashes) * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies between device and slab. Its entries stay where they are until it was reported as done.

    blocks  (block id on the device, cell of the slab)
    state   (index of the snapshot, cell), None where it need not be copied
    """

    blocks: tuple[tuple[int, int], ...]
    state: tuple[int, int] | None
    entries: tuple[Entry, ...] = ()


class Worker:
    """A thread that does one job after the other, urgent ones first. What a job raises ends the engine."""

    def __init__(self, name: str, arrived: threading.Event) -> None:
        self._jobs: queue.PriorityQueue[tuple[int, int, Job | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._arrived = arrived
        self._results: deque[Result] = deque()
        self._num_unfinished = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        return not self._num_unfinished

    def do(self, job: Job, priority: int = URGENT) -> None:
        self._num_unfinished += 1
        self._jobs.put((priority, next(self._order), job))

    def poll(self) -> int:
        """Takes over what was done; how much that was."""
        count = 0
        while self._results:
            self._num_unfinished -= 1
            self._results.popleft()()
            count += 1
        return count

    def close(self) -> None:
        """Does what was asked for, then ends."""
        self._jobs.put((LATER + 1, next(self._order), None))
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            try:
                result = job() or _nothing
            except Exception as error:
                result = _raises(error)
            self._results.append(result)
            self._arrived.set()


class Tiers:
    """Finds, keeps and brings back. Deals in hashes, block ids and cells; `engine/tier_copy` moves the bytes."""

    def __init__(self, slab: HostSlab, disk: DiskTier | None = None) -> None:
        self._slab = slab
        self._disk = disk
        self._index = HostIndex(slab.layout.num_blocks, slab.layout.num_states)
        self._index.restore(slab.records())
        self._arrived = threading.Event()
        self._host_worker = Worker("longlane-host-tier", self._arrived)
        self._disk_worker = Worker("longlane-disk-tier", self._arrived) if disk is not None else None
        self._checking: set[Entry] = set()
        self._unwritten_bytes = 0
        self.num_settled = 0
        self.counts: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        return all(worker.is_idle for worker in self._workers)

    @property
    def host_bytes(self) -> int:
        geometry = self._slab.layout.geometry
        return self._index.num_blocks * geometry.block_bytes + self._index.num_states * geometry.state_bytes

    def stats(self) -> dict[str, int]:
        """As EngineStats names them."""
        disk = self._disk.counts if self._disk is not None else Counter()
        return {
            "num_host_tokens": self.counts["num_host_tokens"],
            "num_disk_tokens": self.counts["num_disk_tokens"],
            "host_bytes": self.host_bytes,
            "disk_bytes": self._disk.num_bytes if self._disk is not None else 0,
            "num_host_evicted": self._index.counts["num_evicted_blocks"] + self._index.counts["num_evicted_states"],
            "num_disk_evicted": disk["num_evicted"],
            "num_host_damaged": self.counts["num_host_damaged"],
            "num_disk_damaged": disk["num_damaged"],
            "num_tier_dropped": self.counts["num_dropped"],
            "num_disk_failures": disk["num_failures"],
        }

    def poll(self) -> None:
        """Takes over what was done meanwhile; `num_settled` tells whether there was anything."""
        self.num_settled += sum(worker.poll() for worker in self._workers)

    def wait(self, seconds: float) -> None:
        """Until something was done."""
        self._arrived.wait(seconds)
        self._arrived.clear()

    def find(self, hashes: Sequence[bytes], beyond: int) -> Found | None:
        """The deepest state of a prompt that lies beyond what is at hand, with all its blocks in one tier or the other.

        beyond  tokens
        """
        end = self._index.num_known(hashes)
        while self._disk is not None and end < len(hashes) and self._disk.has(False, hashes[end]):
            end += 1
        for count in range(end, beyond // BLOCK_SIZE, -1):
            if self._has_state(hashes[count - 1]):
                return Found(tuple(hashes[:count]))
        return None

    def is_ready(self, found: Found) -> bool:
        """Whether it lies in host memory, whole and looked at."""
        state = self._index.state(found.hashes[-1])
        return state is not None and state.status == "ready" and all(block.status == "ready" for block in line(state))

    def fetch(self, found: Found) -> bool:
        """Begins to bring it there, unless that is under way. False when the slab has no room for it."""
        admission = self._index.admit(found.hashes)
        if admission is None:
            self.counts["num_dropped"] += 1
            return False
        for entry in admission.entries:
            self._load(entry)
        for block_hash in found.hashes:
            block = self._index.block(block_hash)
            if block is not None:
                self._check(block)
        if state := self._index.state(found.hashes[-1]):
            self._check(state)
        return True

    def bring_back(self, found: Found, num_at_hand: int, block_ids: Sequence[int], snapshot: int) -> Transfer:
        """Copies to the device. The entries stay pinned until `restored`.

        num_at_hand  leading blocks that need not be copied; block_ids are those of the others
        """
        state = self._index.state(found.hashes[-1])
        assert state is not None
        blocks = line(state)[num_at_hand:]
        assert all(block.status == "ready" for block in blocks), "what is brought back is not there"
        self._index.use(state)
        self.counts["num_host_tokens"] += len(blocks) * BLOCK_SIZE
        entries = (*blocks, state)
        self._index.pin(entries)
        pairs = tuple((block_id, block.cell) for block_id, block in zip(block_ids, blocks, strict=True))
        return Transfer(pairs, (snapshot, state.cell), entries)

    def keep(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], snapshot: int, is_anchor: bool
    ) -> Transfer | None:
        """Copies from the device, of what is not held yet of a text's blocks and the state after them. Followed by
        `stored` once they were launched. None when there is nothing to copy, or no room."""
        admission = self._index.admit(hashes, is_anchor)
        if admission is None:
            self.counts["num_dropped"] += 1
            return None
        if not admission.entries:
            state = self._index.state(hashes[-1])
            assert state is not None
            self._index.touch(state)
            return None
        for entry in admission.entries:
            self._slab.clear(entry)
        first = len(hashes) - len(admission.blocks)
        pairs = tuple((block_ids[first + i], block.cell) for i, block in enumerate(admission.blocks))
        state = admission.state and (snapshot, admission.state.cell)
        return Transfer(pairs, state, admission.entries)

    def stored(self, transfer: Transfer, wait: Callable[[], None]) -> None:
        """Copies were launched; what they brought stands once `wait` returns."""

        def publish() -> Result:
            wait()
            checksums = [self._slab.publish(entry) for entry in transfer.entries]
            return lambda: self._settle_stored(transfer.entries, checksums)

        self._host_worker.do(publish)

    def restored(self, transfer: Transfer, wait: Callable[[], None]) -> None:
        """Likewise, of copies to the device."""

        def release() -> Result:
            wait()
            return lambda: self._index.unpin(transfer.entries)

        self._host_worker.do(release)

    def settle(self, timeout_s: float = 30.0) -> None:
        """Waits until nothing is under way."""
        deadline = time.monotonic() + timeout_s
        self.poll()
        while not self.is_idle and time.monotonic() < deadline:
            self.wait(0.01)
            self.poll()

    def close(self) -> None:
        """Ends the threads, after what they were asked for."""
        for worker in self._workers:
            worker.close()
        self.poll()

    def check_integrity(self) -> None:
        self._index.check_integrity(is_idle=self.is_idle)
        assert not self.is_idle or not (self._checking or self._unwritten_bytes)

    @property
    def _workers(self) -> list[Worker]:
        return [self._host_worker, *([self._disk_worker] if self._disk_worker is not None else [])]

    def _has_state(self, block_hash: bytes) -> bool:
        on_disk = self._disk is not None and self._disk.has(True, block_hash)
        return on_disk or self._index.state(block_hash) is not None

    def _check(self, entry: Entry) -> None:
        """Looks at the checksum of what an earlier process left."""
        if entry.status != "unchecked" or entry in self._checking:
            return
        self._index.pin([entry])
        self._checking.add(entry)

        def check() -> Result:
            is_sound = self._slab.is_sound(entry)
            return lambda: self._settle_checked(entry, is_sound)

        self._host_worker.do(check)

    def _load(self, entry: Entry) -> None:
        self._slab.clear(entry)
        disk = self._disk
        if disk is None or self._disk_worker is None:
            self._index.settle(entry, is_sound=False)
            return

        def load() -> Result:
            is_sound = disk.read(record_of(entry), self._slab.parts(entry))
            if is_sound:
                self._slab.publish(entry)
            return lambda: self._settle_loaded(entry, is_sound)

        self._disk_worker.do(load)

    def _settle_loaded(self, entry: Entry, is_sound: bool) -> None:
        if isinstance(entry, HostBlock) and is_sound:
            self.counts["num_disk_tokens"] += BLOCK_SIZE
        self._index.settle(entry, is_sound)

    def _settle_checked(self, entry: Entry, is_sound: bool) -> None:
        self._checking.remove(entry)
        self.counts["num_host_damaged"] += not is_sound
        self._index.settle(entry, is_sound)

    def _settle_stored(self, entries: Sequence[Entry], checksums: Sequence[int]) -> None:
        for entry, checksum in zip(entries, checksums, strict=True):
            self._write(entry, checksum)
        # from the deepest up would do as well: each is needed by what follows it
        for entry in entries:
            self._index.settle(entry, is_sound=True)

    def _write(self, entry: Entry, checksum: int) -> None:
        """To disk, when there is time."""
        disk, worker = self._disk, self._disk_worker
        if disk is None or worker is None or entry.status == "broken":
            return
        parts = self._slab.parts(entry)
        num_bytes = sum(map(len, parts))
        if self._unwritten_bytes + num_bytes > self._slab.layout.num_bytes * MOST_UNWRITTEN:
            self.counts["num_dropped"] += 1
            return
        self._unwritten_bytes += num_bytes
        self._index.pin([entry])
        record = record_of(entry)

        def write() -> Result:
            disk.write(record, parts, checksum)
            return lambda: self._settle_written(entry, num_bytes)

        worker.do(write, LATER)

    def _settle_written(self, entry: Entry, num_bytes: int) -> None:
        self._unwritten_bytes -= num_bytes
        self._index.unpin([entry])


def _nothing() -> None:
    pass


def _raises(error: Exception) -> Result:
    def result() -> None:
        raise error

    return result
