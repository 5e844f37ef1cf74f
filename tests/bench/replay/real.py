"""A trace, scaled down, through the engine itself on the checkpoint that comes with the project.

The clock is the machine's, but waits of clients are left out: what is compared with the simulation is what was reused.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from config import EngineConfig
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_cache import CachedPath, PrefixCache, hash_root
from engine.engine import EngineCore
from engine.loading import load_engine
from engine.request import EngineStats, Request, SamplingParams
from tests.bench.replay.simulate import percentile
from tests.bench.replay.trace import Call, Spelling, scaled


@dataclass(frozen=True, slots=True)
class Replayed:
    calls: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    aborted: int
    hit: float
    infinite: float
    seconds: float
    ttft_p50: float
    ttft_p90: float


@dataclass(slots=True)
class Progress:
    """One submitted call."""

    call: Call
    submitted_s: float
    first_s: float | None = None
    num_cached: int = 0
    num_tokens: int = 0


class Replay:
    """Submits a call when those that it waits for have ended. An answer is as long as the trace says, whatever its
    tokens; the next prompt brings back the trace's, so that only prompts are reused."""

    def __init__(self, core: EngineCore, calls: Sequence[Call]) -> None:
        self._core = core
        self._spelling = Spelling(core.info.vocab_size)
        self._missing = {call.call_id: set(call.after) for call in calls}
        self._waiting = {call.call_id: call for call in calls}
        self.progress: dict[str, Progress] = {}
        self.num_prompt_tokens = self.num_infinite = 0
        self._known: set[bytes] = set()

    def run(self) -> "Replay":
        while self._waiting or not self._core.is_idle:
            for call in [call for call in self._waiting.values() if not self._missing[call.call_id]]:
                if self._core.stats().num_waiting < 8:
                    self._submit(call)
            for event in self._core.step():
                self._observe(event.request_id, len(event.token_ids), event.num_cached_tokens)
                if event.finish_reason is not None:
                    self._end(event.request_id)
        self._core.check_integrity()
        return self

    def _submit(self, call: Call) -> None:
        del self._waiting[call.call_id]
        token_ids, marks = self._spelling.prompt(call)
        sampling = SamplingParams(max_tokens=call.answer.num_tokens, temperature=0.0)
        self._core.add(Request(call.call_id, token_ids, sampling, call.tenant, marks=marks))
        self.progress[call.call_id] = Progress(call, time.monotonic())
        self.num_prompt_tokens += len(token_ids)
        self.num_infinite += self._num_known(call.tenant, token_ids)

    def _num_known(self, tenant: str, token_ids: tuple[int, ...]) -> int:
        """Tokens that a cache that kept every prompt would serve."""
        hashes = PrefixCache(BlockPool(0), 1).address(CachedPath(hash_root(b"", tenant)), token_ids)
        known = next((index for index, each in enumerate(hashes) if each not in self._known), len(hashes))
        self._known.update(hashes)
        return known * 64

    def _observe(self, call_id: str, num_tokens: int, num_cached: int) -> None:
        progress = self.progress[call_id]
        progress.num_cached, progress.num_tokens = num_cached, progress.num_tokens + num_tokens
        if num_tokens and progress.first_s is None:
            progress.first_s = time.monotonic() - progress.submitted_s
            if progress.call.cancel_s is not None:
                self._core.abort(call_id)

    def _end(self, call_id: str) -> None:
        for missing in self._missing.values():
            missing.discard(call_id)


def replay(calls: Sequence[Call], factor: int, num_snapshots: int) -> Replayed:
    """factor  by which texts are shorter; states of the small checkpoint are, too"""
    config = EngineConfig(device="cpu", max_model_len=8192, kv_cache_tokens=131_072, num_threads=1)
    core = load_engine(config.model_copy(update={"snapshot_bytes": num_snapshots * 2**20}))
    began = time.monotonic()
    done = Replay(core, scaled(calls, factor)).run()
    stats: EngineStats = core.stats()
    first = [p.first_s for p in done.progress.values() if p.first_s is not None]
    return Replayed(
        calls=len(done.progress),
        prompt_tokens=done.num_prompt_tokens,
        cached_tokens=stats.num_cached_tokens,
        computed_tokens=stats.num_prompt_tokens,
        output_tokens=stats.num_output_tokens,
        aborted=stats.num_aborted,
        hit=round(stats.num_cached_tokens / done.num_prompt_tokens, 4),
        infinite=round(done.num_infinite / done.num_prompt_tokens, 4),
        seconds=round(time.monotonic() - began, 1),
        ttft_p50=round(percentile(first, 0.5), 3),
        ttft_p90=round(percentile(first, 0.9), 3),
    )
