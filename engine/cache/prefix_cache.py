"""What of a prompt was computed before: blocks of 64 tokens by their content, and where states stand among them."""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from config.engine import BLOCK_SIZE
from engine.cache.block_pool import BlockPool
from engine.cache.tiers import Found

DIGEST_BYTES = 32
# requests that began from a snapshot make it a place from which conversations part
SEVERAL = 2
BLOCK_BYTES = BLOCK_SIZE * array("I").itemsize


@dataclass(slots=True, eq=False)
class Node:
    """One addressed block: 64 tokens after everything above it.

    block_hash  of the tokens from the beginning, the tenant's salt and the cache's key
    depth       tokens from the beginning to the block's end
    children    the blocks that follow, by hash
    snapshot    the state after its last token, if it stands
    """

    block_hash: bytes
    block_id: int
    parent: "Node | None"
    token_ids: tuple[int, ...]
    depth: int
    children: "dict[bytes, Node]" = field(default_factory=dict)
    snapshot: "Snapshot | None" = None


@dataclass(slots=True, eq=False)
class Snapshot:
    """The recurrent state after a node's last token.

    index        where its tensors lie
    is_decoded   made token by token rather than by prefill
    base         what was last given up was worth so much when it was made or last used
    is_anchor    a message ends there after which a client may go on otherwise
    num_hits     requests that began from it
    is_waypoint  whoever made it or began from it has a deeper one, and it is no place from which several went on
    """

    index: int
    node: Node
    is_decoded: bool
    base: int
    is_anchor: bool = False
    num_hits: int = 0
    is_waypoint: bool = False


@dataclass(slots=True)
class CachedPath:
    """A running request's addressed blocks: everything from its first token on, in order.

    hashes     of the prompt's whole blocks that may be reused, once they were looked up
    extra_ids  blocks held beside the request's own: another request's, of the same content
    anchors    depths at which snapshots are anchors
    origin     the snapshot that this request began from
    latest     the one that it made last, or began from; it may have been given up since
    """

    root: bytes
    hashes: tuple[bytes, ...] | None = None
    nodes: list[Node] = field(default_factory=list)
    extra_ids: list[int] = field(default_factory=list)
    anchors: frozenset[int] = frozenset()
    origin: Snapshot | None = None
    latest: Snapshot | None = None

    @property
    def depth(self) -> int:
        return len(self.nodes) * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Hit:
    """What the cache knows of a prompt.

    standing   the deepest block at whose end a state stands: up to there it may be used; None when nothing may
    last       the deepest block that is addressed, state or not
    following  the prompt's next tokens after that, at most a block of them
    brought    what lies outside the device and reaches further; it is used once it was brought back
    """

    standing: Node | None = None
    last: Node | None = None
    following: tuple[int, ...] = ()
    brought: Found | None = None

    @property
    def depth(self) -> int:
        if self.brought is not None:
            return self.brought.depth
        return self.standing.depth if self.standing else 0

    @property
    def known(self) -> int:
        """Tokens up to which blocks are addressed, or brought back."""
        return max(self.last.depth if self.last else 0, self.brought.depth if self.brought else 0)

    @property
    def nodes(self) -> list[Node]:
        """Blocks on the device that may be used, in order."""
        end = self.standing if self.brought is None else self.last
        return [node for node in ancestry(end) if node.depth <= self.depth][::-1]

    @property
    def divergence(self) -> int | None:
        """First token that differs from what is addressed there; None when nothing is addressed beyond `known`."""
        if self.last is None or not self.last.children or self.last.depth < self.known:
            return None
        return self.last.depth + max(_num_equal(c.token_ids, self.following) for c in self.last.children.values())

    def explain(self) -> str:
        """Where the prompt parts from what is cached and why no more of it is reused, without a word of the text."""
        position = self.known if self.divergence is None else self.divergence
        if self.known > self.depth:
            reason = f"blocks are cached up to {self.known}, but no state stands there"
        elif self.divergence is not None:
            reason = "another token follows there in what is cached"
        else:
            reason = "nothing is cached beyond"
        return f"first divergent position {position}: {reason}"


class PrefixCache:
    """A tree of addressed blocks over a pool of them, and a fixed number of state snapshots that stand on it.

    Without the state a block is of no use: a hit is the deepest snapshot whose blocks are all there. So blocks are
    kept for snapshots only: what no running request holds and no snapshot stands at or below is free at once, and
    blocks are won back by giving up a snapshot.

    The cost of losing a snapshot are the tokens since the one above it, which would have to be computed again. Given
    up first are waypoints, the cheapest first, so that those of a long text lie apart: a conversation that went on will
    hardly come back to where it was. Then go the others, by their cost plus what the last one that was given up was
    worth when they were used last: what is used stays, and what is not ages as fast as dearer ones have to go.

    Who owns what: a running request holds every block of its path, so nothing that it builds upon is given up.
    """

    def __init__(self, pool: BlockPool, num_snapshots: int, key: bytes = b"") -> None:
        """key  whatever the content of a block depends on beside token ids and salt: weights, types, arithmetic"""
        self._pool = pool
        self._key = key
        self._nodes: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._num_slots = num_snapshots
        self._free_slots = list(range(num_snapshots - 1, -1, -1))
        self._reserved: set[int] = set()
        # in the order of their last use, so that of two equally worthy ones the older goes first
        self._snapshots: dict[Snapshot, None] = {}
        self._floor = 0
        self.counts: Counter[str] = Counter()

    @property
    def is_enabled(self) -> bool:
        return self._num_slots > 0

    @property
    def num_blocks(self) -> int:
        return len(self._nodes)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def begin(self, salt: str) -> CachedPath:
        return CachedPath(hash_root(self._key, salt))

    def lookup(self, path: CachedPath, token_ids: Sequence[int]) -> Hit:
        """At most len(token_ids) - 1 tokens: the last one's logits have to be computed. Changes nothing."""
        if not self.is_enabled:
            return Hit()
        hashes = self.address(path, token_ids)
        # a block is never addressed without those before it
        num_known = bisect_left(range(len(hashes)), True, key=lambda index: hashes[index] not in self._nodes)
        last = self._nodes[hashes[num_known - 1]] if num_known else None
        standing = next((node for node in ancestry(last) if node.snapshot is not None), None)
        return Hit(standing, last, tuple(token_ids[num_known * BLOCK_SIZE : (num_known + 1) * BLOCK_SIZE]))

    def address(self, path: CachedPath, token_ids: Sequence[int]) -> tuple[bytes, ...]:
        """The hashes of a prompt's blocks, computed once: two prompts of one tenant are alike as far as these are."""
        if path.hashes is None:
            limit = (len(token_ids) - 1) // BLOCK_SIZE
            path.hashes = tuple(hash_blocks(path.root, pack(token_ids[: limit * BLOCK_SIZE])))
        return path.hashes

    def adopt(self, path: CachedPath, hit: Hit) -> int | None:
        """The request holds the hit's blocks from now on, each in place of one promised to it.

        return  index of the snapshot to start from, None when there is nothing to reuse
        """
        self.counts["num_prefix_queries"] += 1
        self.counts["num_cached_tokens"] += hit.depth
        path.nodes = hit.nodes
        self._pool.share(node.block_id for node in path.nodes)
        self._pool.release((), len(path.nodes))
        if hit.standing is None or hit.brought is not None:
            return None
        assert hit.standing.snapshot is not None
        return self._begin_from(path, hit.standing.snapshot)

    def take_in(self, path: CachedPath, token_ids: Sequence[int], depth: int, block_ids: Sequence[int]) -> int:
        """What was found outside the device stands from now on in blocks that the request has taken for it.

        block_ids  of everything up to `depth`, where the state stands
        return     index that the state has to be copied to
        """
        self.extend(path, token_ids, depth, block_ids)
        self.stand(path, is_decoded=False)
        snapshot = path.nodes[-1].snapshot
        assert snapshot is not None
        return self._begin_from(path, snapshot)

    def is_standing(self, snapshot: Snapshot) -> bool:
        return snapshot in self._snapshots

    def _begin_from(self, path: CachedPath, snapshot: Snapshot) -> int:
        self._use(snapshot)
        snapshot.num_hits += 1
        snapshot.is_waypoint = False
        path.origin = path.latest = snapshot
        self._leave_behind(snapshot)
        return snapshot.index

    def take(self, count: int) -> list[int]:
        """Blocks out of what was promised, winning some back where not as many are free."""
        while not self._pool.can_take(count):
            self._evict([snapshot for snapshot in self._snapshots if self._frees_a_block(snapshot)])
        return self._pool.take(count)

    def extend(self, path: CachedPath, token_ids: Sequence[int], num_final: int, block_ids: Sequence[int]) -> None:
        """Addresses the request's next whole blocks.

        num_final  leading tokens that are part of the text for good and whose keys and values are computed
        """
        if not self.is_enabled:
            return
        for index in range(len(path.nodes), num_final // BLOCK_SIZE):
            block = tuple(token_ids[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            path.nodes.append(self._address(path, block, block_ids[index]))

    def reserve(self) -> int | None:
        """Room for a snapshot that may come to stand; None where that would leave none for the others."""
        if len(self._free_slots) + len(self._snapshots) < 2:
            return None
        index = self._take_slot()
        self._reserved.add(index)
        return index

    def give_back(self, index: int) -> None:
        """Nothing came to stand in what was reserved."""
        self._reserved.remove(index)
        self._free_slots.append(index)

    def stand(self, path: CachedPath, is_decoded: bool, reserved: int | None = None) -> int | None:
        """A snapshot of the state at the path's end.

        reserved  index that it has been copied to already, if it has
        return    index to copy it to; None when one stands there already or none may
        """
        if not self.is_enabled or not path.nodes:
            return None
        if (standing := path.nodes[-1].snapshot) is not None:
            self._use(standing)
            return None
        self._pass(path, is_decoded)
        if reserved is not None:
            self._reserved.remove(reserved)
        index = self._take_slot() if reserved is None else reserved
        snapshot = Snapshot(index, path.nodes[-1], is_decoded, self._floor, path.depth in path.anchors)
        self._snapshots[snapshot] = None
        path.nodes[-1].snapshot = path.latest = snapshot
        return snapshot.index

    def leave(self, path: CachedPath, block_ids: Sequence[int], num_promised: int) -> None:
        """The request is gone: what no snapshot needs is free, the rest is kept."""
        self._pool.release([*block_ids, *path.extra_ids], num_promised, self._by_block)
        if path.nodes:
            self._prune(path.nodes[-1])

    def check_integrity(self) -> None:
        """Asserts that tree, pool and snapshots tell the same story."""
        self._pool.check_integrity()
        slots = [*self._reserved, *(snapshot.index for snapshot in self._snapshots)]
        assert sorted(self._free_slots + slots) == list(range(self._num_slots)), "a snapshot is lost or doubled"
        assert all(snapshot.node.snapshot is snapshot for snapshot in self._snapshots)
        assert all(self._pool.is_kept(n.block_id) or self._pool.is_held(n.block_id) for n in self._nodes.values())
        assert len(self._by_block) == len(self._nodes), "two nodes share a block"
        for node in self._nodes.values():
            self._check_node(node)
        assert sum(self._pool.is_kept(block_id) for block_id in self._by_block) == self._pool.num_kept

    def _check_node(self, node: Node) -> None:
        assert self._by_block[node.block_id] is node
        assert node.depth == (node.parent.depth if node.parent else 0) + BLOCK_SIZE
        assert node.snapshot is None or node.snapshot in self._snapshots
        if node.parent is not None:
            assert self._nodes[node.parent.block_hash] is node.parent, "a block lost what comes before it"
            assert node.parent.children[node.block_hash] is node
        if self._pool.is_kept(node.block_id):
            assert node.snapshot is not None or node.children, "a block is kept for nothing"
            assert all(self._pool.is_kept(child.block_id) for child in node.children.values())

    def _address(self, path: CachedPath, token_ids: tuple[int, ...], block_id: int) -> Node:
        parent = path.nodes[-1] if path.nodes else None
        if path.hashes is not None and len(path.nodes) < len(path.hashes):
            block_hash = path.hashes[len(path.nodes)]
        else:
            block_hash = hash_block(parent.block_hash if parent else path.root, pack(token_ids))
        node = self._nodes.get(block_hash)
        if node is None:
            node = Node(block_hash, block_id, parent, token_ids, (parent.depth if parent else 0) + BLOCK_SIZE)
            self._nodes[block_hash] = self._by_block[block_id] = node
            if parent is not None:
                parent.children[block_hash] = node
        elif self._pool.is_kept(node.block_id):
            self._replace(node, block_id)
        else:
            # another running request computed the same: what stands on it must outlive that request
            self._pool.share((node.block_id,))
            path.extra_ids.append(node.block_id)
        return node

    def _replace(self, node: Node, block_id: int) -> None:
        """The request that has just computed the same content holds its own block: the old one is free."""
        del self._by_block[node.block_id]
        self._pool.drop(node.block_id)
        node.block_id = block_id
        self._by_block[block_id] = node

    def _use(self, snapshot: Snapshot) -> None:
        snapshot.base = self._floor
        self._snapshots[snapshot] = self._snapshots.pop(snapshot)

    def _pass(self, path: CachedPath, by_decoding: bool) -> None:
        """A request goes on beyond its latest snapshot, which is of less use then unless others began from it too. One
        of its own decoding has no use at all; the one at a prompt's end keeps its place until its answer is reused."""
        snapshot = path.latest
        if snapshot is None or snapshot not in self._snapshots or snapshot.num_hits > (snapshot is path.origin):
            return
        if snapshot.is_decoded and snapshot is not path.origin:
            self._remove(snapshot)
        elif snapshot.is_decoded or not (by_decoding or snapshot.is_anchor):
            snapshot.is_waypoint = True

    def _leave_behind(self, snapshot: Snapshot) -> None:
        """Somebody goes on from it: those above are waypoints now, but where several went on and the last anchor."""
        above = [node.snapshot for node in ancestry(snapshot.node.parent) if node.snapshot is not None]
        kept = next((one for one in above if one.is_anchor), None) if not snapshot.is_anchor else None
        for one in above:
            one.is_waypoint = one is not kept and one.num_hits < SEVERAL

    def _worth(self, snapshot: Snapshot) -> tuple[bool, int]:
        above = next((node for node in ancestry(snapshot.node.parent) if node.snapshot is not None), None)
        cost = snapshot.node.depth - (above.depth if above else 0)
        return not snapshot.is_waypoint, cost + (0 if snapshot.is_waypoint else snapshot.base)

    def _take_slot(self) -> int:
        if not self._free_slots:
            self._evict(self._snapshots)
        return self._free_slots.pop()

    def _frees_a_block(self, snapshot: Snapshot) -> bool:
        return not snapshot.node.children and self._pool.is_kept(snapshot.node.block_id)

    def _evict(self, candidates: Iterable[Snapshot]) -> None:
        before = len(self._nodes)
        snapshot = min(candidates, key=self._worth)
        if not snapshot.is_waypoint:
            self._floor = max(self._floor, self._worth(snapshot)[1])
        self._remove(snapshot)
        self.counts["num_evicted_snapshots"] += 1
        self.counts["num_evicted_blocks"] += before - len(self._nodes)

    def _remove(self, snapshot: Snapshot) -> None:
        del self._snapshots[snapshot]
        self._free_slots.append(snapshot.index)
        snapshot.node.snapshot = None
        self._prune(snapshot.node)

    def _prune(self, node: Node | None) -> None:
        """Frees a block that nobody holds and no snapshot needs, and then those above it."""
        while node and not node.children and node.snapshot is None and self._pool.is_kept(node.block_id):
            self._pool.drop(node.block_id)
            del self._nodes[node.block_hash], self._by_block[node.block_id]
            if node.parent is not None:
                del node.parent.children[node.block_hash]
            node = node.parent


def ancestry(node: Node | None) -> Iterator[Node]:
    """The block, the one before it, and so on to the first."""
    while node is not None:
        yield node
        node = node.parent


def pack(token_ids: Sequence[int]) -> bytes:
    return array("I", token_ids).tobytes()


def hash_block(above: bytes, packed: bytes) -> bytes:
    """Of a block's tokens and everything before it; both parts have a fixed length, so no two texts meet in one."""
    return blake2b(above + packed, digest_size=DIGEST_BYTES).digest()


def hash_blocks(above: bytes, packed: bytes) -> Iterator[bytes]:
    """Of each block of a text."""
    for start in range(0, len(packed), BLOCK_BYTES):
        above = hash_block(above, packed[start : start + BLOCK_BYTES])
        yield above


def hash_root(key: bytes, salt: str) -> bytes:
    """Of what stands before the first token."""
    return blake2b(blake2b(key).digest() + salt.encode(), digest_size=DIGEST_BYTES).digest()


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
