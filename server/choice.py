"""One choice of an answer: the engine's events made into what a protocol has to say."""

from collections.abc import Sequence
from typing import NamedTuple

import engine
from server.answers import TokenLogprob, TopLogprob, Usage
from server.checkpoint import Vocabulary
from server.pipeline import Event, TextPipeline, TextRules, join

# JSON has no -Infinity; this stands for a token that cannot be chosen
LOWEST_LOGPROB = -9999.0


class Delta(NamedTuple):
    """What one engine event adds: neighbours joined, log-probabilities of its tokens, and the end if it is the last."""

    events: list[Event]
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class Choice:
    def __init__(self, rules: TextRules, vocabulary: Vocabulary) -> None:
        self._pipeline = TextPipeline(rules)
        self._vocabulary = vocabulary
        self.finish_reason: str | None = None
        self.num_cached_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._pipeline.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._pipeline.num_reasoning_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._pipeline.stop_string

    def push(self, event: engine.TokenEvent) -> Delta:
        """After the end every event is empty: there is exactly one finish reason per choice."""
        if self.finish_reason is not None:
            return Delta([], [], None)
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        before = self._pipeline.num_tokens
        events = self._pipeline.push(event.token_ids)
        count = self._pipeline.num_tokens - before
        if event.finish_reason is not None:
            events += self._pipeline.finish(event.finish_reason)
        if event.finish_reason is not None or self._pipeline.is_stopped:
            self.finish_reason = self._pipeline.finish_reason(event.finish_reason or "stop")
        logprobs = self._logprobs(event, count) if event.logprobs else []
        return Delta(join(events) if len(events) > 1 else events, logprobs, self.finish_reason)

    def _logprobs(self, event: engine.TokenEvent, count: int) -> list[TokenLogprob]:
        pairs = zip(event.token_ids[:count], event.logprobs[:count], strict=False)
        return [token_logprob(self._vocabulary, token_id, logprob) for token_id, logprob in pairs]


def token_logprob(vocabulary: Vocabulary, token_id: int, logprob: engine.TokenLogprob) -> TokenLogprob:
    top = [_spelled(vocabulary, other, value) for other, value in logprob.top]
    return _spelled(vocabulary, token_id, logprob.logprob) | {"top_logprobs": top}


def _spelled(vocabulary: Vocabulary, token_id: int, logprob: float) -> TopLogprob:
    spelling = vocabulary.literal_bytes(token_id)
    return {
        "token": spelling.decode("utf-8", "replace"),
        "logprob": max(logprob, LOWEST_LOGPROB),
        "bytes": list(spelling),
    }


def usage(choices: Sequence[Choice], num_prompt_tokens: int) -> Usage:
    """Prompt tokens count once, however many choices were made of them."""
    output = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": output,
        "total_tokens": num_prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": max(choice.num_cached_tokens for choice in choices)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices)},
    }
