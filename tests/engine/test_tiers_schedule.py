"""What the scheduler decides about tiers, played by a device whose memory says of itself what was computed in it.

Blocks, states and cells hold a digest of the text that they stand for, so that every copy at a wrong time or place
shows. Copies out of the device are read as late as `written` allows.
"""

import mmap
from hashlib import blake2b
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.host_slab import Geometry, HostSlab, Layout
from engine.cache.tiers import Tiers
from engine.request import Request, SamplingParams
from engine.schedule import Outcome
from engine.scheduler import Scheduler
from engine.tier_copy import written

BLOCK = 64
GEOMETRY = Geometry(num_layers=2, layer_bytes=16, state_bytes=32)


def digest(salt, token_ids):
    return blake2b(repr((salt, tuple(token_ids))).encode(), digest_size=32).digest()


def next_token(token_ids):
    return digest("next", token_ids)[0] % 4


def new_slab(num_blocks, num_states):
    layout = Layout(GEOMETRY, num_blocks, num_states)
    return HostSlab(layout, mmap.mmap(-1, layout.num_bytes))


class Device:
    """Runs schedules as the runners do, in their order."""

    def __init__(self, scheduler, slab, tiers, rng):
        self.scheduler, self.slab, self.tiers, self.rng = scheduler, slab, tiers, rng
        self.blocks, self.states, self.snapshots, self.decoded = {}, {}, {}, {}
        self.late = []
        self.answers = {}
        self.num_stored = self.num_restored = 0

    def step(self):
        schedule = self.scheduler.schedule()
        self.protect(set(), {copy.index for copy in schedule.kept})
        for copy in schedule.kept:
            state = self.decoded[copy.slot]
            self.snapshots[copy.index] = digest(state.request.cache_salt, state.token_ids[: copy.position])
        for transfer in schedule.stores:
            self.late.append(transfer)
        self.protect(*written(schedule))
        for chunk in schedule.chunks:
            self.begin(chunk)
        for chunk in schedule.chunks:
            self.compute(chunk.state, chunk.start, chunk.end)
        for state in schedule.decodes:
            self.compute(state, state.num_computed_tokens, len(state.token_ids))
        self.copy(schedule.copies)
        outcomes = [Outcome((next_token(state.token_ids),)) for state in schedule.sampled]
        self.decoded = {state.slot: state for state in schedule.decodes}
        for event in self.scheduler.update(schedule, outcomes):
            self.answers.setdefault(event.request_id, []).extend(event.token_ids)

    def protect(self, blocks, snapshots):
        for transfer in list(self.late):
            touches = blocks & {block_id for block_id, _ in transfer.blocks}
            touches |= snapshots & ({transfer.state[0]} if transfer.state else set())
            if touches or self.rng.random() < 0.3:
                self.read_out(transfer)

    def read_out(self, transfer):
        self.late.remove(transfer)
        for block_id, cell in transfer.blocks:
            self.write_cell(False, cell, self.blocks[block_id])
        if transfer.state is not None:
            self.write_cell(True, transfer.state[1], self.snapshots[transfer.state[0]])
        self.num_stored += 1
        self.tiers.stored(transfer, lambda: None)

    def write_cell(self, is_state, cell, content):
        start = 0
        for begin, end in self.slab.layout.parts(is_state, cell):
            self.slab.memory[begin:end] = content[start : start + end - begin]
            start += end - begin

    def read_cell(self, is_state, cell):
        return b"".join(self.slab.memory[begin:end] for begin, end in self.slab.layout.parts(is_state, cell))

    def begin(self, chunk):
        salt = chunk.state.request.cache_salt
        if chunk.transfer is not None:
            for block_id, cell in chunk.transfer.blocks:
                self.blocks[block_id] = self.read_cell(False, cell)
            index, cell = chunk.transfer.state
            self.snapshots[index] = self.read_cell(True, cell)
            self.num_restored += 1
            self.tiers.restored(chunk.transfer, lambda: None)
        if chunk.restored is not None:
            self.states[chunk.state.slot] = self.snapshots[chunk.restored]
        elif chunk.is_first:
            self.states[chunk.state.slot] = digest(salt, [])

    def compute(self, state, start, end):
        salt, tokens = state.request.cache_salt, state.token_ids
        for index in range(start // BLOCK):
            assert self.blocks[state.block_ids[index]] == digest(salt, tokens[: (index + 1) * BLOCK])
        if start < state.num_prompt_tokens:
            assert self.states[state.slot] == digest(salt, tokens[:start]), "a prompt goes on from another state"
        for index in range(start // BLOCK, -(-end // BLOCK)):
            self.blocks[state.block_ids[index]] = digest(salt, tokens[: min(end, (index + 1) * BLOCK)])
        self.states[state.slot] = digest(salt, tokens[:end])

    def copy(self, copies):
        for copy in copies:
            self.snapshots[copy.index] = self.states[copy.slot]

    def drain(self):
        while self.scheduler.has_requests or self.scheduler.has_stores or self.late:
            self.step()
        self.tiers.settle()
        self.scheduler.check_integrity()


def play(seed, num_blocks=24, num_snapshots=4, host=(20, 4), num_rounds=120, waits=False):
    """waits  for the threads before each step, so that a seed gives the same every time"""
    rng = Random(seed)
    slab = new_slab(*host)
    tiers = Tiers(slab)
    scheduler = Scheduler(
        num_blocks=num_blocks,
        num_slots=3,
        prefill_chunk=rng.choice([64, 128, 512]),
        num_drafts=0,
        max_queued_requests=100,
        max_queued_tokens=10**6,
        num_snapshots=num_snapshots,
        tiers=tiers,
    )
    device = Device(scheduler, slab, tiers, rng)
    texts = [[rng.randrange(4) for _ in range(150)] for _ in range(3)]
    asked = {}
    for number in range(num_rounds):
        if rng.random() < 0.35:
            text = rng.choice(texts)[: rng.choice([70, 150])] + [rng.randrange(4) for _ in range(rng.choice([0, 60]))]
            each = Request(str(number), tuple(text), SamplingParams(rng.randint(1, 70)), rng.choice("xy"), 0, (70,))
            asked[each.request_id] = each
            scheduler.add(each, seed=0)
        if asked and rng.random() < 0.1:
            name = rng.choice(list(asked))
            if scheduler.abort(name):
                del asked[name]
        if waits:
            tiers.settle()
        device.step()
        if rng.random() < 0.1 and asked:
            texts[rng.randrange(3)] = list(rng.choice(list(asked.values())).prompt_token_ids)
    device.drain()
    for each in asked.values():
        tokens = list(each.prompt_token_ids)
        for _ in range(each.sampling.max_tokens):
            tokens.append(next_token(tokens))
        assert device.answers[each.request_id] == tokens[len(each.prompt_token_ids) :]
    tiers.close()
    return device


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_every_copy_is_of_what_it_says(seed):
    play(seed)


@given(st.integers(0, 10**6))
@settings(max_examples=8, deadline=None)
def test_with_hardly_any_memory_too(seed):
    play(seed, num_blocks=13, num_snapshots=1, host=(7, 2))


def test_much_comes_back_at_all():
    devices = [play(seed, waits=True) for seed in range(5, 8)]
    assert sum(device.num_stored for device in devices) > 60
    assert sum(device.num_restored for device in devices) > 4


def test_a_cell_holds_nothing_while_it_is_written():
    """Otherwise a process that dies then leaves a header beside bytes of something else."""
    tiers = Tiers(slab := new_slab(3, 1))
    for salt in "ab":
        hashes = [digest(salt, [number]) for number in range(3)]
        transfer = tiers.keep(hashes, [0, 1, 2], snapshot=0, is_anchor=False)
        assert list(slab.records()) == []
        tiers.stored(transfer, lambda: None)
        tiers.settle()
        assert {record.block_hash for record, _ in slab.records()} == set(hashes)
    tiers.close()


def test_what_was_given_up_before_it_could_be_copied_is_not_copied():
    """Two prompts end in one step, and there is one place for a state."""
    slab = new_slab(20, 4)
    tiers = Tiers(slab)
    scheduler = Scheduler(
        num_blocks=20,
        num_slots=2,
        prefill_chunk=512,
        num_drafts=0,
        max_queued_requests=1,
        max_queued_tokens=1000,
        num_snapshots=1,
        tiers=tiers,
    )
    for name in "ab":
        scheduler.add(Request(name, tuple(range(130)), SamplingParams(5), cache_salt=name), seed=0)
    schedule = scheduler.schedule()
    while not all(chunk.end == 128 for chunk in schedule.chunks):
        schedule = scheduler.schedule()
    second = schedule.chunks[1].state
    assert [copy.slot for copy in schedule.copies] == [second.slot]
    (transfer,) = scheduler.schedule().stores
    assert [block_id for block_id, _ in transfer.blocks] == second.block_ids[:2]
    tiers.stored(transfer, lambda: None)
    tiers.close()
