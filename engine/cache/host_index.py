"""Which blocks and states the host slab holds, and which go when it is full. Plain data; the bytes lie in host_slab."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from config.engine import BLOCK_SIZE

# a place from which so many went on is one from which conversations part
SEVERAL = 2

# copying    its bytes are on their way; nobody but who brings them may look
# unchecked  it was there before this process: its checksum has to be looked at first
# ready      may be read
# broken     its bytes are not what they should be, or lie below such; it is found no more and goes when nobody needs it
Status = Literal["copying", "unchecked", "ready", "broken"]


@dataclass(slots=True, eq=False)
class HostBlock:
    """The keys and values of 64 tokens. cell  of the slab; depth  tokens from the beginning to its end"""

    block_hash: bytes
    parent: "HostBlock | None"
    depth: int
    cell: int
    status: Status = "copying"
    num_pins: int = 1
    children: "set[HostBlock]" = field(default_factory=set)
    state: "HostState | None" = None


@dataclass(slots=True, eq=False)
class HostState:
    """The recurrent state after a block.

    above  the next state on the way to the beginning
    base   what was last given up was worth so much when it was stored or last used
    """

    block: HostBlock
    cell: int
    is_anchor: bool
    base: int
    above: "HostState | None"
    status: Status = "copying"
    num_pins: int = 1
    num_hits: int = 0


Entry = HostBlock | HostState


@dataclass(frozen=True, slots=True)
class Record:
    """What tells an entry from others wherever its bytes lie. parent  of the block before it, zeros at the beginning"""

    is_state: bool
    block_hash: bytes
    parent: bytes
    depth: int
    is_anchor: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """Entries that are to be brought, each pinned until `settle`."""

    blocks: tuple[HostBlock, ...]
    state: HostState | None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.blocks if self.state is None else (*self.blocks, self.state)


class HostIndex:
    """Blocks as a tree from the texts' beginnings, and states that stand on it. Blocks are held for states alone, as in
    the device's cache, and states are given up by the same rule: first those that others have passed, the cheapest
    first; then by the tokens that would have to be computed again, and how long ago they were of use.

    Whoever reads or writes an entry's bytes has it pinned; what is pinned keeps its cell.
    """

    def __init__(self, num_blocks: int, num_states: int) -> None:
        self._num_cells = (num_blocks, num_states)
        self._free_blocks = list(range(num_blocks - 1, -1, -1))
        self._free_states = list(range(num_states - 1, -1, -1))
        self._blocks: dict[bytes, HostBlock] = {}
        # in the order of their last use, so that of two equally worthy ones the older goes first
        self._states: dict[HostState, None] = {}
        self._floor = 0
        self.counts: Counter[str] = Counter()

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_states(self) -> int:
        return len(self._states)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """How many of a text's blocks are held or on their way. A block is never held without those before it."""
        return bisect_left(range(len(hashes)), True, key=lambda index: not self._is_held(hashes[index]))

    def block(self, block_hash: bytes) -> HostBlock | None:
        return self._blocks[block_hash] if self._is_held(block_hash) else None

    def state(self, block_hash: bytes) -> HostState | None:
        block = self.block(block_hash)
        return block.state if block is not None and block.state is not None and _is_whole(block.state) else None

    def admit(self, hashes: Sequence[bytes], is_anchor: bool = False) -> Admission | None:
        """Makes room for what is missing of a text's blocks and the state after the last of them.

        return  what has to be brought now, possibly nothing; None when the slab cannot hold it
        """
        num_held = self.num_known(hashes)
        if len(hashes) > self._num_cells[0] or any(block_hash in self._blocks for block_hash in hashes[num_held:]):
            return None
        last = first = self._blocks[hashes[num_held - 1]] if num_held else None
        self.pin([first] if first else [])
        added: list[HostBlock] = []
        for block_hash in hashes[num_held:]:
            cell = self._take_block()
            if cell is None:
                break
            last = self._insert(block_hash, last, cell)
            added.append(last)
        is_whole = last is not None and last.depth == len(hashes) * BLOCK_SIZE
        state = self._stand(last, is_anchor) if is_whole and last.state is None else None
        if not is_whole or last.state is None or last.state.status == "broken":
            self._take_back(added)
            added, is_whole = [], False
        self.unpin([first] if first else [])
        return Admission(tuple(added), state) if is_whole else None

    def restore(self, records: Iterable[tuple[Record, int]]) -> list[Entry]:
        """Takes over what an earlier process has left: (what it is, cell). Leaves out what lacks a block before it.

        return  the entries, all unchecked
        """
        ordered = sorted(records, key=lambda each: (each[0].is_state, each[0].depth))
        for record, cell in ordered:
            parent = self._blocks.get(record.parent)
            is_first = record.depth == BLOCK_SIZE
            if record.is_state:
                self._restore_state(record, cell)
            elif record.block_hash not in self._blocks and (is_first or _is_next(parent, record.depth)):
                block = self._insert(record.block_hash, None if is_first else parent, cell)
                block.status, block.num_pins = "unchecked", 0
        self._free_blocks = _others(self._num_cells[0], (block.cell for block in self._blocks.values()))
        self._free_states = _others(self._num_cells[1], (state.cell for state in self._states))
        for block in list(self._blocks.values()):
            self._prune(block)
        return [*self._blocks.values(), *self._states]

    def settle(self, entry: Entry, is_sound: bool) -> None:
        """What was brought or looked at is there, or is not what it should be."""
        if entry.status != "broken":
            if is_sound:
                entry.status = "ready"
            else:
                self._break(entry)
        self.unpin([entry])

    def pin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.num_pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            assert entry.num_pins > 0, "an entry is let go twice"
            entry.num_pins -= 1
            self._collect(entry)

    def use(self, state: HostState) -> None:
        """A request goes on from it."""
        state.num_hits += 1
        self.touch(state)

    def touch(self, state: HostState) -> None:
        """It was of use on the device."""
        state.base = self._floor
        self._states[state] = self._states.pop(state)

    def check_integrity(self, is_idle: bool = False) -> None:
        """is_idle  nobody reads or writes: nothing may be pinned, on its way or broken"""
        blocks, states = list(self._blocks.values()), list(self._states)
        assert sorted([*self._free_blocks, *(b.cell for b in blocks)]) == list(range(self._num_cells[0]))
        assert sorted([*self._free_states, *(s.cell for s in states)]) == list(range(self._num_cells[1]))
        assert all(state.block.state is state for state in states), "a state stands nowhere"
        for block in blocks:
            assert block.parent is None or block in block.parent.children, "a block lost what comes before it"
            assert block.parent is None or self._blocks[block.parent.block_hash] is block.parent
            assert block.children or block.state or block.num_pins, "a block is held for nothing"
        for state in states:
            assert state.above is _state_above(state.block), "a state is measured from the wrong one"
        if is_idle:
            entries: list[Entry] = [*blocks, *states]
            assert not any(entry.num_pins for entry in entries), "an entry is pinned by nobody"
            assert all(entry.status in ("ready", "unchecked") for entry in entries)

    def _is_held(self, block_hash: bytes) -> bool:
        block = self._blocks.get(block_hash)
        return block is not None and _is_whole(block)

    def _insert(self, block_hash: bytes, parent: HostBlock | None, cell: int) -> HostBlock:
        depth = (parent.depth if parent else 0) + BLOCK_SIZE
        block = self._blocks[block_hash] = HostBlock(block_hash, parent, depth, cell)
        if parent is not None:
            parent.children.add(block)
        return block

    def _stand(self, block: HostBlock, is_anchor: bool) -> HostState | None:
        """A new state after a block; None when one is there or there is no room."""
        if block.state is not None or (cell := self._take_state()) is None:
            return None
        return self._place(block, cell, is_anchor)

    def _place(self, block: HostBlock, cell: int, is_anchor: bool) -> HostState:
        state = HostState(block, cell, is_anchor, self._floor, _state_above(block))
        for other in self._states:
            if other.above is state.above and _is_below(other.block, block):
                other.above = state
        block.state = state
        self._states[state] = None
        return state

    def _restore_state(self, record: Record, cell: int) -> None:
        block = self._blocks.get(record.block_hash)
        if block is not None and block.state is None and block.depth == record.depth:
            state = self._place(block, cell, record.is_anchor)
            state.status, state.num_pins = "unchecked", 0

    def _take_block(self) -> int | None:
        while not self._free_blocks:
            if not self._evict(lambda state: not state.block.children and not state.block.num_pins):
                return None
        return self._free_blocks.pop()

    def _take_state(self) -> int | None:
        if not self._free_states and not self._evict(lambda state: True):
            return None
        return self._free_states.pop()

    def _take_back(self, blocks: Sequence[HostBlock]) -> None:
        for block in reversed(blocks):
            block.num_pins = 0
            self._prune(block)

    def _evict(self, may_go: Callable[[HostState], bool]) -> bool:
        candidates = [state for state in self._states if not state.num_pins and may_go(state)]
        if not candidates:
            return False
        below: dict[HostState, list[HostState]] = {}
        for state in self._states:
            if state.above is not None:
                below.setdefault(state.above, []).append(state)
        worths = {state: _worth(state, below.get(state, [])) for state in candidates}
        state = min(candidates, key=worths.__getitem__)
        is_kept, worth = worths[state]
        if is_kept:
            self._floor = max(self._floor, worth)
        before = len(self._blocks)
        self._remove_state(state)
        self._prune(state.block)
        self.counts["num_evicted_states"] += 1
        self.counts["num_evicted_blocks"] += before - len(self._blocks)
        return True

    def _remove_state(self, state: HostState) -> None:
        del self._states[state]
        for other in self._states:
            if other.above is state:
                other.above = state.above
        state.block.state = None
        self._free_states.append(state.cell)

    def _prune(self, block: HostBlock | None) -> None:
        """Frees a block that nobody needs, and then those above it."""
        while block and not (block.children or block.state or block.num_pins):
            if self._blocks.pop(block.block_hash, None) is None:
                return
            self._free_blocks.append(block.cell)
            if block.parent is not None:
                block.parent.children.discard(block)
            block = block.parent

    def _break(self, entry: Entry) -> None:
        """It and all that is of no use without it."""
        self.counts["num_damaged"] += 1
        entry.status = "broken"
        broken = list(_descendants(entry)) if isinstance(entry, HostBlock) else []
        for block in broken:
            block.status = "broken"
            if block.state is not None:
                block.state.status = "broken"
        # from the deepest up, so that those above find themselves without children
        for block in reversed(broken):
            self._collect(block.state or block)

    def _collect(self, entry: Entry) -> None:
        if isinstance(entry, HostState):
            if entry.status == "broken" and not entry.num_pins and entry in self._states:
                self._remove_state(entry)
            self._prune(entry.block)
            return
        if entry.state is not None and entry.status == "broken":
            self._collect(entry.state)
        self._prune(entry)


def line(state: HostState) -> list[HostBlock]:
    """The blocks that a state stands upon, from the text's beginning."""
    blocks, block = [], state.block
    while block is not None:
        blocks.append(block)
        block = block.parent
    return blocks[::-1]


def record_of(entry: Entry) -> Record:
    block = entry.block if isinstance(entry, HostState) else entry
    parent = block.parent.block_hash if block.parent else bytes(len(block.block_hash))
    is_state = isinstance(entry, HostState)
    return Record(is_state, block.block_hash, parent, block.depth, isinstance(entry, HostState) and entry.is_anchor)


def _worth(state: HostState, below: Sequence[HostState]) -> tuple[bool, int]:
    """Ascending: what goes first. A state that others went on from alone, and to which nobody came back, is of use to
    hardly anybody; the last anchor of a text is not such."""
    is_last_anchor = state.is_anchor and not any(one.is_anchor for one in below)
    parts = len(state.block.children) >= SEVERAL or state.num_hits >= SEVERAL
    is_waypoint = bool(below) and not is_last_anchor and not parts
    cost = state.block.depth - (state.above.block.depth if state.above else 0)
    return not is_waypoint, cost + (0 if is_waypoint else state.base)


def _others(count: int, taken: Iterable[int]) -> list[int]:
    return sorted(set(range(count)).difference(taken), reverse=True)


def _is_whole(entry: Entry) -> bool:
    return entry.status != "broken"


def _is_next(parent: HostBlock | None, depth: int) -> bool:
    return parent is not None and parent.depth + BLOCK_SIZE == depth


def _is_below(block: HostBlock, above: HostBlock) -> bool:
    found: HostBlock | None = block
    while found is not None and found.depth > above.depth:
        found = found.parent
    return found is above and block is not above


def _state_above(block: HostBlock) -> HostState | None:
    above = block.parent
    while above is not None and above.state is None:
        above = above.parent
    return above.state if above is not None else None


def _descendants(block: HostBlock) -> Iterator[HostBlock]:
    """The block and all below it, those above before those below."""
    found = [block]
    while found:
        block = found.pop()
        yield block
        found.extend(block.children)
