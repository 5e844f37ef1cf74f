"""What a key may still use: the rule, plain numbers in and out. Ledgers keep the numbers and apply it atomically."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from config import Key
from router.errors import QuotaError

DAY_S = 86_400
MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What an upstream reported of one request. Cached prompt tokens cost nothing; None (untold) means none."""

    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Balance:
    """What one key has at one moment. A level is None where there is no such limit, below zero when overdrawn.

    at_s              Unix time
    requests, tokens  what the two buckets of a minute hold
    day_tokens        used on this UTC day
    """

    at_s: float
    num_running: int = 0
    requests: float | None = None
    tokens: float | None = None
    day_tokens: int = 0


def refilled(level: float, capacity: int, elapsed_s: float) -> float:
    """A bucket refills steadily up to its capacity, which is what one minute brings."""
    return min(capacity, level + max(0.0, elapsed_s) * capacity / MINUTE_S)


def refusal(key: Key, balance: Balance, tokens: int) -> QuotaError | None:
    """The limit that a request of so many uncached prompt tokens meets, and when to come back; None: it may pass.

    A full bucket admits any amount: a prompt larger than it goes into debt once.
    """
    if key.concurrent_requests is not None and balance.num_running >= key.concurrent_requests:
        return QuotaError(f"this key runs {key.concurrent_requests} requests at once (concurrent_requests)", 1)
    if balance.requests is not None and (wait_s := _wait_s(1, balance.requests, key.requests_per_minute)):
        return QuotaError(f"this key may send {key.requests_per_minute} requests per minute", wait_s)
    if balance.tokens is not None and (wait_s := _wait_s(tokens, balance.tokens, key.prompt_tokens_per_minute)):
        return QuotaError(
            f"this key may use {key.prompt_tokens_per_minute} uncached prompt tokens per minute; this request needs "
            f"about {tokens}",
            wait_s,
        )
    if key.tokens_per_day is not None and balance.day_tokens >= key.tokens_per_day:
        return QuotaError(
            f"this key has used its {key.tokens_per_day} tokens of this UTC day",
            DAY_S - balance.at_s % DAY_S,
            is_retry_useful=False,
        )
    return None


def correction(charged: int, prompt_tokens: int, usage: Usage | None, is_refused: bool) -> tuple[int, int]:
    """Prompt and output tokens to charge once a request is over; negative ones are given back.

    charged      when it was admitted, of its estimated `prompt_tokens`
    usage        None where the upstream reported none
    is_refused   nothing was computed: what was charged is given back
    """
    if usage is None:
        # which of its tokens were cached is so far the client's own word only
        return (0 if is_refused else prompt_tokens) - charged, 0
    return max(0, usage.prompt_tokens - (usage.cached_tokens or 0)) - charged, usage.output_tokens


def limit_headers(key: Key, balance: Balance) -> dict[str, str]:
    """The six `x-ratelimit-*` headers, those of limits that the key has."""
    fields: dict[str, str] = {}
    for name, capacity, level in _buckets(key, balance):
        fields[f"x-ratelimit-limit-{name}"] = str(capacity)
        fields[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(level)))
        fields[f"x-ratelimit-reset-{name}"] = span((capacity - level) * MINUTE_S / capacity)
    return fields


def span(seconds: float) -> str:
    """Like `6m0s`, `1h0m0s`, `250ms`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return "".join((f"{hours}h" if hours else "", f"{minutes}m" if hours or minutes else "", f"{rest}s"))


def _buckets(key: Key, balance: Balance) -> Iterator[tuple[str, int, float]]:
    if key.requests_per_minute is not None and balance.requests is not None:
        yield "requests", key.requests_per_minute, balance.requests
    if key.prompt_tokens_per_minute is not None and balance.tokens is not None:
        yield "tokens", key.prompt_tokens_per_minute, balance.tokens


def _wait_s(amount: int, level: float, capacity: int) -> float:
    return max(0.0, min(amount, capacity) - level) * MINUTE_S / capacity
