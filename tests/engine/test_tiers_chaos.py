"""Everything at once: requests, aborts, dying engines, bytes that change, a disk that fills up.

Whatever happens, an acknowledged request gets its answer, the one that nobody disturbed would give, or is told why not;
and when nothing is left to do, nothing is held.
"""

import os
import queue
import random
import threading

import pytest

from engine.cache.disk_tier import DiskTier
from engine.cache.host_slab import create_file
from engine.errors import QueueFullError
from engine.loading import load_engine
from engine.request import Request, SamplingParams
from tests.engine.checkpoints import MOE, Geometry, write_checkpoint
from tests.engine.runtime import Output, engine, settings

# LONGLANE_CHAOS=2000 for a long run, LONGLANE_CHAOS_SEED for another one
NUM_OPERATIONS = int(os.environ.get("LONGLANE_CHAOS", "300"))
SEED = int(os.environ.get("LONGLANE_CHAOS_SEED", "1"))
MAX_TOKENS = 10
DISK_BYTES = 40 * 2**20
CONFIG = {
    "max_model_len": 512,
    "kv_cache_tokens": 768,
    "prefill_chunk": 64,
    "max_num_requests": 3,
    "max_queued_requests": 4,
    "snapshot_bytes": 4 * 2**20,
    "host_cache_bytes": 14 * 2**20,
    "disk_cache_bytes": DISK_BYTES,
}


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), MOE, Geometry(vocab_size=320))


def make_prompts(rng):
    """Conversations that share beginnings and grow."""
    systems = [rng.choices(range(320), k=count) for count in (70, 130)]
    prompts = []
    for system in systems:
        for _ in range(3):
            text = system + rng.choices(range(320), k=rng.randint(40, 120))
            prompts += [text, text + rng.choices(range(320), k=rng.randint(30, 100))]
    return [tuple(prompt) for prompt in prompts]


class Chaos:
    """Acts at random on an engine over memory and a directory that outlive it."""

    def __init__(self, checkpoint_dir, directory, file, prompts, answers, rng):
        self.config = settings(checkpoint_dir, disk_cache_dir=str(directory), **CONFIG)
        self.directory, self.file, self.rng = directory, file, rng
        self.prompts, self.answers = prompts, answers
        self.core = self.load()
        self.open = {}
        self.num_submitted = self.num_answered = self.num_aborted = self.num_lost = self.num_cached = 0
        self.disk_is_full = False
        self.seen = {"num_host_tokens": 0, "num_disk_tokens": 0, "num_host_damaged": 0, "num_disk_damaged": 0}

    def load(self):
        return load_engine(self.config, host_file=os.dup(self.file))

    @property
    def tiers(self):
        return self.core._scheduler._reuse._tiers

    def submit(self):
        name = f"r{self.num_submitted}"
        prompt = self.rng.choice(self.prompts)
        sampling = SamplingParams(max_tokens=self.rng.randint(1, MAX_TOKENS), temperature=0.0)
        marks = (self.rng.randint(1, len(prompt)),) if self.rng.random() < 0.5 else ()
        try:
            self.core.add(Request(name, prompt, sampling, cache_salt=self.rng.choice(["", "", "t"]), marks=marks))
        except QueueFullError:
            return
        self.num_submitted += 1
        self.open[name] = (prompt, sampling.max_tokens, Output())

    def step(self):
        for event in self.core.step():
            prompt, max_tokens, output = self.open[event.request_id]
            output.add(event)
            assert output.token_ids == self.answers[prompt][: len(output.token_ids)]
            if event.finish_reason == "length":
                assert len(output.token_ids) == max_tokens
                self.num_answered += 1
                self.num_cached += event.num_cached_tokens
            elif event.finish_reason == "abort":
                self.num_aborted += 1
            if event.finish_reason:
                del self.open[event.request_id]

    def steps(self):
        for _ in range(self.rng.randint(1, 12)):
            self.step()

    def abort(self):
        if self.open:
            self.core.abort(self.rng.choice(list(self.open)))

    def idle(self):
        while not self.core.is_idle:
            self.step()
        assert not self.open
        self.tiers.settle()
        self.core.check_integrity()
        assert self.tiers.is_idle
        stats = self.core.stats()
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
        assert stats.disk_bytes <= DISK_BYTES

    def kill(self):
        """As a signal does: what was asked of the threads is not done any more. Acknowledged requests fail."""
        self.remember()
        stop(self.tiers)
        self.num_lost += len(self.open)
        self.open.clear()
        for _ in range(self.rng.choice([0, 0, 1, 20])):
            self.flip_in_memory()
        self.core = self.load()

    def remember(self):
        """Counters of an engine that is about to end."""
        stats = self.core.stats()
        for name in self.seen:
            self.seen[name] += getattr(stats, name)

    def flip_in_memory(self):
        """Anywhere behind the first page, headers included."""
        memory = self.tiers._slab.memory
        memory[self.rng.randrange(4096, len(memory))] ^= 1 << self.rng.randrange(8)

    def spoil_file(self):
        files = sorted(path for path in self.directory.rglob("*.*") if path.is_file())
        if not files:
            return
        path = self.rng.choice(files)
        kind = self.rng.choice(["flip", "cut", "remove"])
        if kind == "flip":
            with path.open("r+b") as file:
                place = self.rng.randrange(path.stat().st_size)
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1]))
        elif kind == "cut":
            os.truncate(path, self.rng.randrange(path.stat().st_size))
        else:
            path.unlink()

    def fill_disk(self):
        self.disk_is_full = not self.disk_is_full

    def act(self):
        weights = {
            self.submit: 36,
            self.steps: 40,
            self.abort: 8,
            self.idle: 5,
            self.spoil_file: 12,
            self.kill: 4,
            self.fill_disk: 2,
        }
        self.rng.choices(list(weights), list(weights.values()))[0]()


def stop(tiers):
    for worker in tiers._workers:
        while True:
            try:
                worker._jobs.get_nowait()
            except queue.Empty:
                break
        worker._jobs.put((0, -1, None))
        worker._thread.join()


def num_threads():
    return sum(thread.name.startswith("longlane-") for thread in threading.enumerate())


@pytest.mark.timeout(1800)
def test_whatever_happens_answers_are_right_and_nothing_is_left(checkpoint_dir, tmp_path, monkeypatch):
    rng = random.Random(SEED)
    prompts = make_prompts(rng)
    cold = engine(checkpoint_dir, prefix_caching=False, max_model_len=512)
    answers = {prompt: answer_of(cold, prompt) for prompt in prompts}
    threads = num_threads()
    file = create_file()
    chaos = Chaos(checkpoint_dir, tmp_path, file, prompts, answers, rng)
    real_write = DiskTier._write

    def write(path, parts):
        if chaos.disk_is_full:
            raise OSError(28, "No space left on device")
        real_write(path, parts)

    monkeypatch.setattr(DiskTier, "_write", staticmethod(write))
    for _ in range(NUM_OPERATIONS):
        chaos.act()
    chaos.idle()
    chaos.remember()
    assert chaos.num_submitted == chaos.num_answered + chaos.num_aborted + chaos.num_lost
    assert chaos.num_answered > NUM_OPERATIONS / 10 and chaos.num_cached > 0
    assert all(chaos.seen.values()), chaos.seen
    assert not list(tmp_path.rglob("*.part"))
    stop(chaos.tiers)
    os.close(file)
    assert num_threads() == threads


def answer_of(core, prompt):
    core.add(Request("a", prompt, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)))
    output = Output()
    while not core.is_idle:
        for event in core.step():
            output.add(event)
    return output.token_ids
