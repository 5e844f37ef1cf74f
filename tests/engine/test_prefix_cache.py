import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import PrefixCache, hash_block, hash_root, pack

BLOCK = 64


def tokens(*letters):
    """One block per letter: equal letters, equal blocks."""
    return tuple(itertools.chain.from_iterable([100 * letter + i % 7 for i in range(BLOCK)] for letter in letters))


class Writer:
    """A request as the cache sees it: it reuses, computes block by block, lets states stand, and leaves."""

    def __init__(self, cache, pool, text, salt=""):
        self.cache, self.pool, self.text = cache, pool, text
        self.path = cache.begin(salt)
        self.promised = -(-len(text) // BLOCK)
        assert pool.reserve(self.promised)
        self.hit = cache.lookup(self.path, text)
        self.restored = cache.adopt(self.path, self.hit)
        self.blocks = [node.block_id for node in self.hit.nodes]
        self.promised -= len(self.blocks)
        self.done = self.hit.depth

    def compute(self, num_tokens):
        while len(self.blocks) * BLOCK < num_tokens:
            self.blocks += self.cache.take(1)
            self.promised -= 1
        self.done = num_tokens
        self.cache.extend(self.path, self.text, num_tokens, self.blocks)
        return self

    def stand(self, is_decoded=False):
        self.cache.stand(self.path, is_decoded)
        return self

    def leave(self):
        self.cache.leave(self.path, self.blocks, self.promised)


@pytest.fixture
def pool():
    return BlockPool(16)


@pytest.fixture
def cache(pool):
    return PrefixCache(pool, num_snapshots=4)


def compute(cache, pool, text, salt="", stands=()):
    """A whole request: states stand at the given depths and at the last whole block."""
    writer = Writer(cache, pool, text, salt)
    for depth in (*stands, len(text)):
        writer.compute(depth)
        if depth % BLOCK == 0 and writer.path.depth == depth:
            writer.stand()
    writer.leave()
    cache.check_integrity()
    return writer


def depth(cache, text, salt=""):
    return cache.lookup(cache.begin(salt), text).depth


def test_hash_is_of_everything_before():
    first, second = (hash_block(hash_root(b"key", ""), pack(tokens(n))) for n in (1, 2))
    assert first != second
    assert hash_block(first, pack(tokens(3))) != hash_block(second, pack(tokens(3)))
    assert pack((1, 256)) != pack((256, 1))


def test_no_salt_is_another_key():
    assert len({hash_root(key, salt) for key, salt in ((b"a", "b"), (b"ab", ""), (b"", "ab"), (b"a", ""))}) == 4


def test_a_hit_leaves_one_token_to_compute(cache, pool):
    compute(cache, pool, tokens(1, 2, 3), stands=(64, 128))
    assert depth(cache, tokens(1, 2, 3)) == 128
    assert depth(cache, (*tokens(1, 2, 3), 5)) == 192


def test_a_hit_is_the_deepest_snapshot_not_the_deepest_block(cache, pool):
    compute(cache, pool, tokens(1, 2, 3), stands=(64,))
    hit = cache.lookup(cache.begin(""), tokens(1, 2, 9))
    assert (hit.depth, hit.known) == (64, 128)
    assert hit.explain() == "first divergent position 128: blocks are cached up to 128, but no state stands there"


def test_the_first_other_token_is_named(cache, pool):
    compute(cache, pool, tokens(1, 2), stands=(64,))
    text = [*tokens(1, 2), 7]
    text[100] = 999
    hit = cache.lookup(cache.begin(""), text)
    assert (hit.depth, hit.divergence) == (64, 100)
    assert "first divergent position 100: another token" in hit.explain()
    assert "position 128: nothing is cached beyond" in cache.lookup(cache.begin(""), (*tokens(1, 2), 7)).explain()
    assert "position 0: nothing is cached beyond" in cache.lookup(cache.begin(""), tokens(5, 6)).explain()


def test_a_partially_filled_block_is_never_addressed(cache, pool):
    writer = Writer(cache, pool, tokens(1, 2)).compute(100).stand()
    assert writer.path.depth == 64
    writer.leave()
    assert depth(cache, tokens(1, 2, 3)) == 64
    assert pool.num_kept == 1


def test_tenants_never_share(cache, pool):
    compute(cache, pool, (*tokens(1, 2), 5), salt="a", stands=(128,))
    assert depth(cache, (*tokens(1, 2), 5), "a") == 128
    assert depth(cache, (*tokens(1, 2), 5), "b") == 0
    assert depth(cache, (*tokens(1, 2), 5), "") == 0


def test_another_key_is_another_content(pool):
    first, second = (PrefixCache(pool, 1, key).begin("a").root for key in (b"weights 1", b"weights 2"))
    assert first != second


def test_without_snapshots_nothing_is_kept(pool):
    cache = PrefixCache(pool, num_snapshots=0)
    compute(cache, pool, tokens(1, 2))
    assert (cache.num_blocks, pool.num_kept) == (0, 0)
    assert depth(cache, tokens(1, 2, 3)) == 0


def test_blocks_beyond_the_last_snapshot_are_free_at_once(cache, pool):
    writer = Writer(cache, pool, tokens(1, 2, 3)).compute(64).stand().compute(192)
    writer.leave()
    assert (cache.num_blocks, pool.num_kept, pool.num_free) == (1, 1, 16)
    cache.check_integrity()


def test_shared_blocks_have_several_holders(cache, pool):
    compute(cache, pool, (*tokens(1, 2), 5), stands=(128,))
    first, second = (Writer(cache, pool, (*tokens(1, 2), last)) for last in (5, 6))
    assert first.blocks == second.blocks
    assert pool.num_unpromised == 16 - 2 - 2
    first.leave()
    cache.check_integrity()
    assert pool.num_kept == 0
    second.leave()
    assert pool.num_kept == 2


def test_equal_content_computed_at_once_is_addressed_once(cache, pool):
    """The second request builds on a block of the first, which therefore outlives it."""
    first, second = Writer(cache, pool, tokens(1, 2)), Writer(cache, pool, tokens(1, 2, 3))
    first.compute(128)
    second.compute(192).stand()
    assert not set(first.blocks) & set(second.blocks)
    first.leave()
    cache.check_integrity()
    second.leave()
    cache.check_integrity()
    assert depth(cache, tokens(1, 2, 3, 4)) == 192
    assert (pool.num_kept, pool.num_free) == (3, 16)


def test_what_is_computed_again_takes_the_place_of_what_was_kept(cache, pool):
    compute(cache, pool, tokens(1, 2, 3), stands=(64,))
    again = Writer(cache, pool, tokens(1, 2, 4))
    assert again.hit.depth == 64
    kept_before = pool.num_kept
    again.compute(128)
    assert pool.num_kept == kept_before - 1
    cache.check_integrity()
    again.leave()
    cache.check_integrity()
    assert depth(cache, tokens(1, 2, 3, 9)) == 192


def test_blocks_are_won_back_from_the_least_worthy(pool):
    cache = PrefixCache(pool, num_snapshots=8)
    for letter in (1, 2, 3):
        compute(cache, pool, tokens(letter, letter + 10, letter + 20))
    assert pool.num_kept == 9
    assert depth(cache, (*tokens(1, 11, 21), 0)) == 192
    Writer(cache, pool, (*tokens(1, 11, 21), 0)).leave()
    # nine blocks are kept and seven free: nine more cost two conversations, those used longest ago
    compute(cache, pool, tokens(*range(40, 49)))
    assert [depth(cache, (*tokens(n, n + 10, n + 20), 0)) for n in (1, 2, 3)] == [192, 0, 192]
    assert cache.counts["num_evicted_blocks"] == 3


def test_cost_outweighs_age(pool):
    """Of two snapshots used at about the same time the one that costs more to compute again stays."""
    cache = PrefixCache(pool, num_snapshots=2)
    compute(cache, pool, tokens(1, 2, 3, 4, 5, 6))
    compute(cache, pool, tokens(7))
    compute(cache, pool, tokens(8))
    assert depth(cache, (*tokens(1, 2, 3, 4, 5, 6), 0)) == 384
    assert [depth(cache, (*tokens(n), 0)) for n in (7, 8)] == [0, 64]


def test_a_conversation_that_went_on_leaves_no_snapshots_behind(pool):
    """Each turn begins from the one before; where it did, nobody is expected back, and others keep their places."""
    cache = PrefixCache(pool, num_snapshots=3)
    compute(cache, pool, tokens(1))
    for end in range(2, 7):
        compute(cache, pool, tokens(*range(20, 20 + end)))
    assert depth(cache, (*tokens(1), 0)) == 64
    assert depth(cache, (*tokens(*range(20, 26)), 0)) == 384
    assert cache.num_snapshots == 3


def test_the_last_anchor_of_a_conversation_stays(pool):
    """Where the user spoke last: a conversation that drops the thoughts after it returns there."""
    cache = PrefixCache(pool, num_snapshots=3)
    for end in (4, 8, 12):
        writer = Writer(cache, pool, (*tokens(*range(20, 20 + end)), 0))
        writer.path.anchors = frozenset((64, 256, 512))
        for part in (64, 64 * end - 64, 64 * end):
            writer.compute(max(part, writer.hit.depth)).stand()
        writer.leave()
    compute(cache, pool, tokens(1))
    assert depth(cache, (*tokens(*range(20, 32)), 0)) == 768
    assert depth(cache, (*tokens(*range(20, 30)), 0)) == 512
    assert depth(cache, (*tokens(*range(20, 27)), 0)) == 0


def test_a_place_from_which_several_went_on_stays(pool):
    """The system prompt of three conversations, of which each has a deeper snapshot."""
    cache = PrefixCache(pool, num_snapshots=4)
    compute(cache, pool, (*tokens(1, 2), 5), stands=(128,))
    for letter in (3, 4, 5):
        compute(cache, pool, tokens(1, 2, letter))
    for letter in (6, 7, 8):
        compute(cache, pool, tokens(letter))
    assert depth(cache, (*tokens(1, 2), 7)) == 128


def test_age_outweighs_cost_in_the_end(pool):
    cache = PrefixCache(pool, num_snapshots=2)
    compute(cache, pool, tokens(1, 2, 3, 4, 5, 6))
    for letter in range(7, 17):
        compute(cache, pool, tokens(letter))
    assert depth(cache, (*tokens(1, 2, 3, 4, 5, 6), 0)) == 0


def test_waypoints_of_a_long_prompt_do_not_evict_conversations(pool):
    cache = PrefixCache(pool, num_snapshots=3)
    compute(cache, pool, tokens(1))
    compute(cache, pool, tokens(2))
    compute(cache, pool, tokens(*range(10, 20)), stands=range(64, 640, 64))
    assert [depth(cache, (*tokens(n), 0)) for n in (1, 2)] == [64, 64]
    assert depth(cache, (*tokens(*range(10, 20)), 0)) == 640


def test_waypoints_that_stay_lie_apart(pool):
    cache = PrefixCache(pool, num_snapshots=4)
    compute(cache, pool, tokens(*range(10, 26)), stands=range(64, 1024, 64))
    depths = {depth(cache, (*tokens(*range(10, 10 + n)), 0)) // 64 for n in range(1, 17)}
    *waypoints, end = sorted(depths - {0})
    assert len(waypoints) == 3 and end == 16
    assert max(b - a for a, b in itertools.pairwise([0, *waypoints, end])) <= 8


def test_only_the_last_state_of_an_answer_stands(cache, pool):
    writer = Writer(cache, pool, tokens(1, 2, 3, 4)).compute(64).stand()
    for end in (128, 192, 256):
        writer.compute(end).stand(is_decoded=True)
    assert cache.num_snapshots == 2
    writer.leave()
    assert depth(cache, tokens(1, 2, 3, 9)) == 64
    assert depth(cache, tokens(1, 2, 3, 4, 9)) == 256
    assert cache.counts["num_evicted_snapshots"] == 0


class Watched(PrefixCache):
    """Asserts the order in which snapshots are given up."""

    def _evict(self, candidates):
        candidates, before, floor = list(candidates), set(self._snapshots), self._floor
        waypoints = [snapshot for snapshot in candidates if snapshot.is_waypoint]
        costs = {snapshot: self._worth(snapshot)[1] for snapshot in candidates}
        super()._evict(candidates)
        (gone,) = before - set(self._snapshots)
        assert costs[gone] == min(costs[snapshot] for snapshot in waypoints or candidates)
        assert gone in (waypoints or candidates)
        assert self._floor == (floor if waypoints else max(floor, costs[gone]))


class Traffic(RuleBasedStateMachine):
    """Requests over a small alphabet of blocks, so that they share, diverge, race and evict all the time.

    What a hit promises is checked against what was written: each block remembers the text that it was computed for.
    """

    @initialize(num_blocks=st.integers(4, 14), num_snapshots=st.integers(1, 6))
    def start(self, num_blocks, num_snapshots):
        self.pool = BlockPool(num_blocks)
        self.cache = Watched(self.pool, num_snapshots)
        self.writers: list[Writer] = []
        self.written: dict[int, tuple] = {}
        self.states: dict[int, tuple] = {}

    @rule(
        letters=st.lists(st.integers(1, 2), min_size=1, max_size=5),
        rest=st.integers(1, 63),
        salt=st.sampled_from("ab"),
        anchors=st.frozensets(st.sampled_from([64, 128, 192]), max_size=2),
    )
    def submit(self, letters, rest, salt, anchors):
        text = tokens(*letters, 3)[: len(letters) * BLOCK + rest]
        if -(-len(text) // BLOCK) > self.pool.num_unpromised:
            return
        writer = Writer(self.cache, self.pool, text, salt)
        writer.salt, writer.path.anchors = salt, anchors
        self.writers.append(writer)
        for index, block_id in enumerate(writer.blocks):
            assert self.written[block_id] == (salt, text[: (index + 1) * BLOCK])
        if writer.restored is not None:
            assert self.states[writer.restored] == (salt, text[: writer.hit.depth])
            assert writer.hit.depth < len(text)

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), stands=st.booleans(), is_decoded=st.booleans(), num_tokens=st.integers(1, 200))
    def compute(self, data, stands, is_decoded, num_tokens):
        writer = data.draw(st.sampled_from(self.writers))
        end = min(len(writer.text), writer.done + num_tokens)
        before = len(writer.blocks)
        writer.compute(end)
        held_by_others = {b for w in self.writers if w is not writer for b in w.blocks}
        assert not held_by_others & set(writer.blocks[before:])
        for index in range(writer.done // BLOCK):
            if index >= writer.hit.depth // BLOCK:
                self.written[writer.blocks[index]] = (writer.salt, writer.text[: (index + 1) * BLOCK])
        if stands and writer.path.nodes and end % BLOCK == 0:
            index = self.cache.stand(writer.path, is_decoded)
            if index is not None:
                self.states[index] = (writer.salt, writer.text[:end])

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def leave(self, data):
        writer = data.draw(st.sampled_from(self.writers))
        self.writers.remove(writer)
        writer.leave()

    @invariant()
    def nothing_is_lost(self):
        self.cache.check_integrity()
        held = {b for w in self.writers for b in (*w.blocks, *w.path.extra_ids)}
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert self.pool.is_idle == (not self.writers)

    def teardown(self):
        for writer in self.writers:
            writer.leave()
        self.cache.check_integrity()
        assert self.pool.is_idle


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
