"""Balances of keys in this gateway's own memory."""

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from config import Key
from router.quota import DAY_S, Balance, Usage, correction, refilled, refusal

_CONVERSATIONS = 65_536


class LedgerError(Exception):
    """The ledger cannot be reached, so nothing is known of any balance."""


@dataclass(frozen=True, slots=True)
class Grant:
    """One admitted request.

    prompt_tokens  estimated
    tokens         of these, what was charged because no cache is known to hold it
    balance        after the charge
    """

    key: Key
    prompt_tokens: int
    conversation: str | None
    tokens: int
    balance: Balance
    lease: str = field(default_factory=lambda: uuid.uuid4().hex)


class Ledger(Protocol):
    async def admit(self, key: Key, prompt_tokens: int, conversation: str | None) -> Grant:
        """Takes the estimate of uncached tokens and one place.

        raises  QuotaError, LedgerError
        """

    async def settle(self, grant: Grant, usage: Usage | None, is_refused: bool) -> None:
        """Gives the place back and replaces the estimate by the truth; raises LedgerError."""


@dataclass(slots=True)
class _Bucket:
    capacity: int
    level: float
    at_s: float


class _Account:
    def __init__(self) -> None:
        self.num_running = 0
        self._day = 0
        self._day_tokens = 0
        self._buckets: dict[str, _Bucket] = {}

    def balance(self, key: Key, now: float) -> Balance:
        if (day := int(now // DAY_S)) != self._day:
            self._day, self._day_tokens = day, 0
        requests = self._level("requests", key.requests_per_minute, now)
        tokens = self._level("tokens", key.prompt_tokens_per_minute, now)
        return Balance(now, self.num_running, requests, tokens, self._day_tokens)

    def charge(self, requests: int, prompt_tokens: int, output_tokens: int) -> None:
        """Uncached prompt tokens fill the minute and the day, output the day only."""
        for name, amount in (("requests", requests), ("tokens", prompt_tokens)):
            if (bucket := self._buckets.get(name)) is not None:
                bucket.level = min(bucket.capacity, bucket.level - amount)
        self._day_tokens = max(0, self._day_tokens + prompt_tokens + output_tokens)

    def _level(self, name: str, capacity: int | None, now: float) -> float | None:
        if capacity is None:
            self._buckets.pop(name, None)
            return None
        bucket = self._buckets.get(name)
        if bucket is None or bucket.capacity != capacity:
            # a new limit begins with a full bucket
            bucket = self._buckets[name] = _Bucket(capacity, float(capacity), now)
        bucket.level, bucket.at_s = refilled(bucket.level, capacity, now - bucket.at_s), now
        return bucket.level


class MemoryLedger:
    """Accounts by key name, and how long each conversation's prompt was, since what was sent before is cached."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._lengths: OrderedDict[str, int] = OrderedDict()

    async def admit(self, key: Key, prompt_tokens: int, conversation: str | None) -> Grant:
        account, now = self._accounts.setdefault(key.name, _Account()), self._clock()
        known = self._lengths.get(conversation, 0) if conversation else 0
        tokens = max(0, prompt_tokens - known)
        if (error := refusal(key, account.balance(key, now), tokens)) is not None:
            raise error
        account.charge(1, tokens, 0)
        account.num_running += 1
        return Grant(key, prompt_tokens, conversation, tokens, account.balance(key, now))

    async def settle(self, grant: Grant, usage: Usage | None, is_refused: bool) -> None:
        account = self._accounts[grant.key.name]
        account.num_running -= 1
        account.balance(grant.key, self._clock())
        account.charge(0, *correction(grant.tokens, grant.prompt_tokens, usage, is_refused))
        if grant.conversation is not None and not is_refused:
            self._note_length(grant.conversation, grant.prompt_tokens)

    def _note_length(self, conversation: str, prompt_tokens: int) -> None:
        self._lengths[conversation] = prompt_tokens
        self._lengths.move_to_end(conversation)
        if len(self._lengths) > _CONVERSATIONS:
            self._lengths.popitem(last=False)
