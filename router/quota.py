"""What each key may still use: token buckets in memory, plain numbers in and out, the clock as an argument."""

import math
from collections import OrderedDict
from dataclasses import dataclass

from config import Key
from router.errors import QuotaError

DAY_S = 86_400
MINUTE_S = 60.0
_CONVERSATIONS = 65_536


@dataclass(frozen=True, slots=True)
class Usage:
    """What an upstream reported of one request; cached prompt tokens cost nothing, None where it does not tell."""

    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0


class Bucket:
    """Holds `per_minute` at most and refills steadily. It may be overdrawn: a prompt larger than it passes once."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        self._level = min(self.capacity, self._level + (now - self._at) * self.capacity / MINUTE_S)
        self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until the amount may be taken; a full bucket admits any amount."""
        missing = min(amount, self.capacity) - self.level(now)
        return max(0.0, missing) * MINUTE_S / self.capacity

    def take(self, amount: float, now: float) -> None:
        """A negative amount gives back."""
        self._level = min(self.capacity, self.level(now) - amount)

    def reset_s(self, now: float) -> float:
        return (self.capacity - self.level(now)) * MINUTE_S / self.capacity


class Account:
    """The balance of one key."""

    def __init__(self, key: Key, now: float) -> None:
        self.num_running = 0
        self._day = 0
        self._day_tokens = 0
        self.set_limits(key, now)

    def set_limits(self, key: Key, now: float) -> None:
        """New limits begin with full buckets; what runs and what the day has used stays."""
        self.key = key
        self.requests = Bucket(key.requests_per_minute, now) if key.requests_per_minute else None
        self.tokens = Bucket(key.prompt_tokens_per_minute, now) if key.prompt_tokens_per_minute else None

    def check(self, tokens: int, now: float, utc: float) -> None:
        """Raises QuotaError that names the limit and says when to come back."""
        key = self.key
        if key.concurrent_requests is not None and self.num_running >= key.concurrent_requests:
            raise QuotaError(f"this key runs {key.concurrent_requests} requests at once (concurrent_requests)", 1)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now)):
            raise QuotaError(f"this key may send {self.requests.capacity} requests per minute", wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(tokens, now)):
            raise QuotaError(
                f"this key may use {self.tokens.capacity} uncached prompt tokens per minute; this request needs "
                f"about {tokens}",
                wait_s,
            )
        if key.tokens_per_day is not None and self.day_tokens(utc) >= key.tokens_per_day:
            raise QuotaError(
                f"this key has used its {key.tokens_per_day} tokens of this UTC day",
                DAY_S - utc % DAY_S,
                is_retry_useful=False,
            )

    def charge(self, prompt_tokens: int, output_tokens: int, now: float, utc: float) -> None:
        """Uncached prompt tokens fill the minute and the day, output the day only. Negative amounts give back."""
        if self.tokens is not None:
            self.tokens.take(prompt_tokens, now)
        self._day_tokens = max(0, self.day_tokens(utc) + prompt_tokens + output_tokens)

    def day_tokens(self, utc: float) -> int:
        if (day := int(utc // DAY_S)) != self._day:
            self._day, self._day_tokens = day, 0
        return self._day_tokens


class Grant:
    """One admitted request: its place, its estimate, and the truth afterwards."""

    def __init__(self, account: Account, tokens: int) -> None:
        self._account = account
        self._tokens = tokens
        account.num_running += 1

    def settle(self, usage: Usage | None, is_refused: bool, now: float, utc: float) -> None:
        """Gives the place back and replaces the estimate.

        usage       None where the upstream reported none: the estimate stays
        is_refused  nothing was computed: the estimate is given back
        """
        self._account.num_running -= 1
        if usage is not None:
            is_known = usage.cached_tokens is not None
            cost = usage.prompt_tokens - usage.cached_tokens if is_known else self._tokens
            self._account.charge(cost - self._tokens, usage.output_tokens, now, utc)
        elif is_refused:
            self._account.charge(-self._tokens, 0, now, utc)

    def headers(self, now: float) -> dict[str, str]:
        """The six `x-ratelimit-*` headers, those of limits that the key has."""
        fields: dict[str, str] = {}
        for name, bucket in (("requests", self._account.requests), ("tokens", self._account.tokens)):
            if bucket is not None:
                fields[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
                fields[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
                fields[f"x-ratelimit-reset-{name}"] = span(bucket.reset_s(now))
        return fields


class Quotas:
    """Accounts by key name, and how long each conversation's prompt was, since what was sent before is cached."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._lengths: OrderedDict[str, int] = OrderedDict()

    def admit(self, key: Key, prompt_tokens: int, conversation: str | None, now: float, utc: float) -> Grant:
        """Raises QuotaError; else takes the estimate of uncached tokens and one place."""
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = Account(key, now)
        elif account.key != key:
            account.set_limits(key, now)
        tokens = max(0, prompt_tokens - self._known_length(conversation))
        account.check(tokens, now, utc)
        if account.requests is not None:
            account.requests.take(1, now)
        account.charge(tokens, 0, now, utc)
        return Grant(account, tokens)

    def note_length(self, conversation: str | None, prompt_tokens: int) -> None:
        """Only after the prompt was really computed."""
        if conversation is None:
            return
        self._lengths[conversation] = prompt_tokens
        self._lengths.move_to_end(conversation)
        if len(self._lengths) > _CONVERSATIONS:
            self._lengths.popitem(last=False)

    def _known_length(self, conversation: str | None) -> int:
        return self._lengths.get(conversation, 0) if conversation else 0


def span(seconds: float) -> str:
    """Like `6m0s`, `1h0m0s`, `250ms`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    hours, minutes = divmod(minutes, 60)
    return "".join((f"{hours}h" if hours else "", f"{minutes}m" if hours or minutes else "", f"{rest}s"))
