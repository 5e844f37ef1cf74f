"""The host tier by itself: what it holds, what it gives up, and what another process finds in its memory."""

import os
from hashlib import blake2b
from itertools import accumulate, pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.host_index import HostIndex, HostState, record_of
from engine.cache.host_slab import Geometry, Layout, create_file, open_slab

GEOMETRY = Geometry(num_layers=3, layer_bytes=100, state_bytes=5000)


def hashes(text):
    """One block per letter; equal beginnings, equal hashes."""
    return [blake2b(start.encode(), digest_size=32).digest() for start in accumulate(text)]


def keep(index, text, is_anchor=False):
    admission = index.admit(hashes(text), is_anchor)
    assert admission is not None
    for entry in admission.entries:
        index.settle(entry, is_sound=True)
    index.check_integrity(is_idle=True)
    return admission


def is_kept(index, text):
    return index.num_known(hashes(text)) == len(text) and index.state(hashes(text)[-1]) is not None


def test_only_what_is_missing_is_brought():
    index = HostIndex(8, 4)
    assert len(keep(index, "abc").blocks) == 3
    further = keep(index, "abcde")
    assert [block.depth for block in further.blocks] == [256, 320]
    assert further.state is not None
    assert keep(index, "abc").entries == ()
    assert index.num_known(hashes("abxde")) == 2


def test_what_is_under_way_is_known_but_not_ready():
    index = HostIndex(8, 4)
    admission = index.admit(hashes("ab"))
    assert [entry.status for entry in admission.entries] == ["copying"] * 3
    assert is_kept(index, "ab")
    index.settle(admission.blocks[0], is_sound=True)
    index.settle(admission.blocks[1], is_sound=True)
    assert index.state(hashes("ab")[-1]).status == "copying"


def test_a_text_that_can_never_fit_leaves_everything_as_it_was():
    index = HostIndex(4, 2)
    keep(index, "abc")
    assert index.admit(hashes("uvwxyz")) is None
    assert is_kept(index, "abc")


def test_what_is_pinned_stays_and_what_finds_no_room_leaves_no_trace():
    index = HostIndex(4, 2)
    keep(index, "abc")
    held = index.state(hashes("abc")[-1])
    index.pin([held])
    assert index.admit(hashes("uv")) is None
    assert is_kept(index, "abc")
    index.check_integrity()
    index.unpin([held])
    keep(index, "uv")
    assert not is_kept(index, "abc")


def test_passed_states_go_first_then_the_cheapest():
    index = HostIndex(64, 3)
    keep(index, "abcd")
    keep(index, "abcdefgh")
    keep(index, "u")
    # nobody returns to where a text went on, though it would cost more than the short text
    keep(index, "v")
    assert [is_kept(index, text) for text in ("abcd", "abcdefgh", "u", "v")] == [False, True, True, True]
    keep(index, "w")
    assert [is_kept(index, text) for text in ("abcdefgh", "u", "v", "w")] == [True, False, True, True]


def test_a_place_from_which_texts_part_and_the_last_anchor_are_not_passed():
    index = HostIndex(64, 4)
    keep(index, "ab")
    keep(index, "abcd")
    keep(index, "abxy")
    keep(index, "u")
    keep(index, "v")
    assert is_kept(index, "ab") and not is_kept(index, "u")
    index = HostIndex(64, 3)
    keep(index, "abc", is_anchor=True)
    keep(index, "abcd")
    keep(index, "u")
    keep(index, "v")
    assert is_kept(index, "abc")


def test_what_is_used_outlives_what_is_not():
    index = HostIndex(64, 2)
    keep(index, "ab")
    keep(index, "uv")
    index.use(index.state(hashes("ab")[-1]))
    keep(index, "x")
    assert is_kept(index, "ab") and not is_kept(index, "uv")


def test_a_damaged_block_takes_all_below_it_along():
    index = HostIndex(16, 4)
    keep(index, "abcd")
    keep(index, "abx")
    keep(index, "a")
    block = index.block(hashes("ab")[-1])
    index.pin([block])
    index.settle(block, is_sound=False)
    index.check_integrity(is_idle=True)
    assert is_kept(index, "a")
    assert (index.num_blocks, index.num_states) == (1, 1)


def test_a_broken_entry_keeps_its_cell_until_nobody_writes_there():
    index = HostIndex(4, 2)
    admission = index.admit(hashes("ab"))
    index.settle(admission.blocks[0], is_sound=False)
    assert index.num_known(hashes("ab")) == 0
    assert index.admit(hashes("ab")) is None
    assert index.num_blocks == 2
    for entry in admission.entries[1:]:
        index.settle(entry, is_sound=True)
    assert index.num_blocks == index.num_states == 0
    index.check_integrity(is_idle=True)


class Traffic(RuleBasedStateMachine):
    """Texts come and are looked at, copies end well or not, and now and then another process takes over the memory."""

    @initialize(num_blocks=st.integers(1, 9), num_states=st.integers(1, 4))
    def begin(self, num_blocks, num_states):
        self.sizes = num_blocks, num_states
        self.index = HostIndex(*self.sizes)
        self.memory = {}
        self.headers = {}
        self.under_way = []
        self.readers = []

    def place(self, entry):
        return isinstance(entry, HostState), entry.cell

    @rule(text=st.text("ab", min_size=1, max_size=6), is_anchor=st.booleans())
    def admit(self, text, is_anchor):
        before = {id(entry) for entry in self.pinned()}
        admission = self.index.admit(hashes(text), is_anchor)
        if admission is None:
            return
        for entry in admission.entries:
            assert id(entry) not in before
            self.memory.pop(self.place(entry), None)
            self.headers.pop(self.place(entry), None)
            self.under_way.append(entry)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_sound=st.sampled_from([True, True, True, False]))
    def arrive(self, data, is_sound):
        entry = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        # whoever brings it writes its cell until now
        self.memory[self.place(entry)] = record_of(entry)
        if is_sound:
            self.headers[self.place(entry)] = record_of(entry)
        self.index.settle(entry, is_sound)

    @rule(text=st.text("ab", min_size=1, max_size=6))
    def read(self, text):
        state = self.index.state(hashes(text)[-1])
        if state is None or len(self.readers) > 2:
            return
        blocks = [self.index.block(block_hash) for block_hash in hashes(text)]
        entries = [*blocks, state]
        if all(entry.status == "ready" for entry in entries):
            self.index.use(state)
            self.index.pin(entries)
            self.readers.append((entries, [record_of(entry) for entry in entries]))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def let_go(self, data):
        entries, records = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        assert [self.memory[self.place(entry)] for entry in entries] == records
        self.index.unpin(entries)

    @rule(data=st.data())
    def take_over(self, data):
        self.index = HostIndex(*self.sizes)
        found = self.index.restore((record, cell) for (_, cell), record in self.headers.items())
        self.under_way, self.readers = [], []
        for entry in found:
            assert self.memory[self.place(entry)] == record_of(entry)
            assert entry.status == "unchecked"
        for entry in found:
            if entry.status != "broken":
                self.index.pin([entry])
                is_sound = data.draw(st.sampled_from([True, True, False]))
                if not is_sound:
                    self.headers.pop(self.place(entry))
                self.index.settle(entry, is_sound)

    def pinned(self):
        return [*self.under_way, *(entry for entries, _ in self.readers for entry in entries)]

    @invariant()
    def nothing_is_lost(self):
        self.index.check_integrity(is_idle=not self.pinned())
        held = {id(e) for e in (*self.index._blocks.values(), *self.index._states)}
        assert all(id(entry) in held for entry in self.pinned()), "an entry went while somebody had it pinned"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.fixture
def file():
    file = create_file()
    yield file
    os.close(file)


def new_slab(file, key=b"key", num_bytes=200_000, free_bytes=2**30):
    return open_slab(file, GEOMETRY, key, num_bytes, free_bytes)


def fill(slab, text, byte):
    """Entries of a text, published with bytes that tell them apart."""
    index = HostIndex(slab.layout.num_blocks, slab.layout.num_states)
    entries = keep(index, text).entries
    for i, entry in enumerate(entries):
        slab.clear(entry)
        for j, part in enumerate(slab.parts(entry)):
            part[:] = bytes([byte + i + j]) * len(part)
        slab.publish(entry)
    return entries


@pytest.mark.parametrize("num_bytes", [0, 5000, 30_000, 200_000, 1_234_567])
def test_the_layout_fits_and_nothing_in_it_overlaps(num_bytes):
    layout = Layout.of_size(GEOMETRY, num_bytes)
    if layout.is_empty:
        assert num_bytes <= 30_000
        return
    assert layout.num_bytes <= num_bytes
    spans = [span for cell in range(layout.num_blocks) for span in layout.parts(False, cell)]
    spans += [span for cell in range(layout.num_states) for span in layout.parts(True, cell)]
    spans += [(layout.header(False, c), layout.header(False, c) + 128) for c in range(layout.num_blocks)]
    spans += [(layout.header(True, c), layout.header(True, c) + 128) for c in range(layout.num_states)]
    spans.sort()
    assert spans[0][0] >= 4096 and spans[-1][1] <= layout.num_bytes
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_another_process_finds_what_was_published(file):
    slab = new_slab(file)
    entries = fill(slab, "abc", 1)
    other = new_slab(os.dup(file), free_bytes=0)
    found = dict(other.records())
    assert found == {record_of(entry): entry.cell for entry in entries}
    assert all(other.is_sound(entry) for entry in entries)
    assert bytes(other.parts(entries[1])[2]) == bytes([4]) * 100


def test_what_was_half_written_is_not_found(file):
    slab = new_slab(file)
    entries = fill(slab, "abc", 1)
    slab.clear(entries[1])
    slab.parts(entries[1])[0][:] = bytes(100)
    assert {record.depth for record, _ in new_slab(file).records()} == {64, 192}
    index = HostIndex(slab.layout.num_blocks, slab.layout.num_states)
    # what lies below it is of no use, and neither is what no state stands on
    assert index.restore(new_slab(file).records()) == []
    index.check_integrity(is_idle=True)


@pytest.mark.parametrize("is_state", [False, True])
def test_a_flipped_bit_is_noticed(file, is_state):
    slab = new_slab(file)
    entries = fill(slab, "abc", 1)
    entry = entries[-1] if is_state else entries[0]
    slab.parts(entry)[-1][-1] ^= 1
    assert [slab.is_sound(each) for each in entries].count(False) == 1
    assert not slab.is_sound(entry)
    header = slab.layout.header(is_state, entry.cell)
    slab.memory[header + 3] ^= 1
    assert len(list(slab.records())) == len(entries) - 1


def test_another_key_or_geometry_begins_anew(file):
    fill(new_slab(file), "abc", 1)
    assert list(new_slab(file, key=b"other").records()) == []
    fill(new_slab(file, key=b"other"), "abc", 1)
    other = open_slab(file, Geometry(2, 100, 5000), b"other", 200_000, 2**30)
    assert list(other.records()) == []


def test_it_shrinks_with_a_warning_and_never_fails(file, monkeypatch, caplog):
    assert new_slab(file, free_bytes=100_000).layout.num_bytes <= 100_000
    assert "instead of 200000" in caplog.text
    caplog.clear()
    assert new_slab(file, key=b"other", free_bytes=100) is None
    assert "is off: 100 bytes" in caplog.text
    least = Layout.least_bytes(GEOMETRY)
    assert f"at least {least}" in caplog.text
    assert Layout.of_size(GEOMETRY, least - 1).is_empty and not Layout.of_size(GEOMETRY, least).is_empty
    taken = []

    def fallocate(file, offset, length):
        if len(taken) == 3:
            raise OSError(28, "No space left on device")
        taken.append(length)
        os.truncate(file, offset + length)

    monkeypatch.setattr("engine.cache.host_slab.PIECE_BYTES", 40_000)
    monkeypatch.setattr("os.posix_fallocate", fallocate)
    slab = new_slab(file, key=b"third")
    assert 80_000 < slab.layout.num_bytes <= 120_000
    assert "ends early" in caplog.text
    fill(slab, "ab", 1)
