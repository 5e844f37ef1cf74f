import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_pool import BlockPool


def test_reservation_is_all_or_nothing():
    pool = BlockPool(4)
    assert pool.reserve(3)
    assert not pool.reserve(2)
    assert pool.num_unpromised == 1
    assert pool.num_free == 4
    assert pool.reserve(1)


def test_taken_blocks_are_distinct_and_come_back():
    pool = BlockPool(3)
    assert pool.reserve(3)
    ids = pool.take(3)
    assert sorted(ids) == [0, 1, 2]
    assert pool.num_free == 0
    pool.release(ids, 0)
    assert pool.is_idle
    assert pool.num_free == 3


def test_take_without_reservation_fails():
    with pytest.raises(AssertionError, match="reservation"):
        BlockPool(1).take(1)


def test_double_release_fails():
    pool = BlockPool(1)
    assert pool.reserve(1)
    (block_id,) = pool.take(1)
    pool.release([block_id], 0)
    with pytest.raises(KeyError):
        pool.release([block_id], 0)


class Owners(RuleBasedStateMachine):
    """Several owners reserve, take and release in any order; none ever sees another's block."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.owners: list[tuple[list[int], int]] = []

    @rule(count=st.integers(1, 6))
    def reserve(self, count):
        could = count <= self.pool.num_unpromised
        assert self.pool.reserve(count) == could
        if could:
            self.owners.append(([], count))

    @precondition(lambda self: any(left for _, left in self.owners))
    @rule(data=st.data())
    def take(self, data):
        index = data.draw(st.sampled_from([i for i, (_, left) in enumerate(self.owners) if left]))
        blocks, left = self.owners[index]
        self.owners[index] = ([*blocks, *self.pool.take(1)], left - 1)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(*self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1))))

    @invariant()
    def nothing_is_lost_or_shared(self):
        self.pool.check_integrity()
        held = [block_id for blocks, _ in self.owners for block_id in blocks]
        assert len(set(held)) == len(held) == self.pool.num_blocks - self.pool.num_free
        assert self.pool.num_unpromised == self.pool.num_free - sum(left for _, left in self.owners)
        assert self.pool.is_idle == (not self.owners)


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
