"""Runs requests through a real engine in this process."""

from collections.abc import Iterable
from pathlib import Path

from config import EngineConfig
from engine.engine import EngineCore
from engine.loading import load_engine
from engine.request import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprob


def settings(checkpoint_dir: Path, **changes) -> EngineConfig:
    defaults = {"model": str(checkpoint_dir), "device": "cpu", "max_model_len": 2048, "num_threads": 1}
    return EngineConfig(**defaults | changes)


def engine(checkpoint_dir: Path, is_ahead: bool | None = None, **changes) -> EngineCore:
    return load_engine(settings(checkpoint_dir, **changes), is_ahead)


def request(name: str, prompt: Iterable[int], **sampling) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**{"max_tokens": 16, "temperature": 0.0} | sampling))


class Output:
    """What the events of one request add up to."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0

    def add(self, event: TokenEvent) -> None:
        assert self.finish_reason is None, "an event after the last one"
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.finish_reason = event.finish_reason
        self.num_cached_tokens = event.num_cached_tokens


def drain(core: EngineCore, outputs: dict[str, Output] | None = None) -> dict[str, Output]:
    """Steps until nothing is left to do; nothing may be held then."""
    outputs = {} if outputs is None else outputs
    while not core.is_idle:
        for event in core.step():
            outputs.setdefault(event.request_id, Output()).add(event)
    core.check_integrity()
    assert core.stats().num_free_kv_blocks == core.stats().num_kv_blocks
    return outputs


def finish(core: EngineCore, each: Request) -> Output:
    """One request alone, to its end."""
    core.add(each)
    return drain(core)[each.request_id]


def generate(core: EngineCore, *requests: Request) -> list[list[int]]:
    """Tokens of requests that are all there at once."""
    for each in requests:
        core.add(each)
    outputs = drain(core)
    return [outputs[each.request_id].token_ids for each in requests]
