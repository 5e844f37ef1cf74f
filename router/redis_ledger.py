"""Balances of keys in Redis, where several gateways share them. The clock is Redis' own.

The scripts apply the rule of `quota` and `ledger` term by term, in doubles like Python's, and atomically. A place is
a lease that expires unless its gateway renews it, so one that dies gives its places back.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from config import Key
from router.ledger import Grant, LedgerError
from router.quota import Balance, Usage, correction, refusal

LEASE_S = 60.0
_TIMEOUT_S = 0.5
_ACCOUNT_S = 2 * 86_400
_NO_LIMIT = -1

_READ = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local held = redis.call('HMGET', KEYS[1], 'requests', 'requests_of', 'tokens', 'tokens_of', 'at', 'day', 'day_tokens')
local function number(value) return tonumber(value or nil) end
local function level(value, of, capacity)
  if capacity < 0 then return nil end
  if number(of) ~= capacity then return capacity end
  return math.min(capacity, number(value) + math.max(0, now - number(held[5])) * capacity / 60)
end
local requests_of, tokens_of = tonumber(ARGV[1]), tonumber(ARGV[2])
local requests = level(held[1], held[2], requests_of)
local tokens = level(held[3], held[4], tokens_of)
local day = math.floor(now / 86400)
local day_tokens = number(held[6]) == day and number(held[7]) or 0
local function exact(value) return value and string.format('%.17g', value) or '' end
local function write()
  redis.call('HSET', KEYS[1], 'requests', exact(requests), 'requests_of', requests_of, 'tokens', exact(tokens),
    'tokens_of', tokens_of, 'at', exact(now), 'day', day, 'day_tokens', exact(day_tokens))
  redis.call('EXPIRE', KEYS[1], %d)
end
""".replace("%d", str(_ACCOUNT_S))

_ADMIT = (
    _READ
    + """
local day_limit, place_limit, prompt = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', exact(now))
local running = redis.call('ZCARD', KEYS[2])
local cost = math.max(0, prompt - (number(redis.call('GET', KEYS[3])) or 0))
local passes = (place_limit < 0 or running < place_limit)
  and (not requests or requests >= 1)
  and (not tokens or tokens >= math.min(cost, tokens_of))
  and (day_limit < 0 or day_tokens < day_limit)
if passes then
  requests = requests and requests - 1
  tokens = tokens and tokens - cost
  day_tokens = day_tokens + cost
  running = running + 1
  write()
  redis.call('ZADD', KEYS[2], exact(now + tonumber(ARGV[7])), ARGV[6])
  redis.call('EXPIRE', KEYS[2], 10 * ARGV[7])
end
return {passes and 1 or 0, cost, exact(now), running, exact(requests), exact(tokens), exact(day_tokens)}
"""
)

_SETTLE = (
    _READ
    + """
local prompt, output = tonumber(ARGV[3]), tonumber(ARGV[4])
tokens = tokens and math.min(tokens_of, tokens - prompt)
day_tokens = math.max(0, day_tokens + prompt + output)
write()
redis.call('ZREM', KEYS[2], ARGV[5])
if ARGV[6] ~= '' then redis.call('SET', KEYS[3], ARGV[6], 'EX', 86400) end
"""
)

# XX: a place that was given back meanwhile stays given back
_RENEW = """
local time = redis.call('TIME')
for _, lease in ipairs(ARGV) do
  redis.call('ZADD', KEYS[1], 'XX', string.format('%.17g', time[1] + LEASE_S), lease)
end
redis.call('EXPIRE', KEYS[1], 10 * LEASE_S)
""".replace("LEASE_S", f"{LEASE_S:.0f}")


class RedisLedger:
    """Decides as the ledger in memory does; raises LedgerError whenever Redis does not answer in time."""

    def __init__(self, url: str, lease_s: float = LEASE_S) -> None:
        # no second attempt: what was lost may have been charged
        self._redis = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._lease_s = lease_s
        self._admit, self._settle, self._renew = (
            self._redis.register_script(text) for text in (_ADMIT, _SETTLE, _RENEW)
        )
        self._leases: dict[str, set[str]] = defaultdict(set)
        self._settling: set[asyncio.Task[None]] = set()

    async def admit(self, key: Key, prompt_tokens: int, conversation: str | None) -> Grant:
        grant = Grant(key, prompt_tokens, conversation, 0, Balance(0.0))
        limits = [_limit(value) for value in (key.tokens_per_day, key.concurrent_requests)]
        arguments = [*_capacities(key), *limits, prompt_tokens, grant.lease, f"{self._lease_s:.0f}"]
        passes, cost, now, num_running, requests, tokens, day_tokens = await _reached(
            self._admit(_keys(key, conversation), arguments)
        )
        balance = Balance(float(now), num_running, _level(requests), _level(tokens), int(float(day_tokens)))
        if not passes:
            error = refusal(key, balance, cost)
            assert error is not None, (key, balance, cost)
            raise error
        self._leases[key.name].add(grant.lease)
        return Grant(key, prompt_tokens, conversation, cost, balance, grant.lease)

    async def settle(self, grant: Grant, usage: Usage | None, is_refused: bool) -> None:
        """Goes on when the caller is cancelled, as it is when its client leaves."""
        task = asyncio.ensure_future(self._send_settlement(grant, usage, is_refused))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        await asyncio.shield(task)

    async def renew(self) -> None:
        """Puts off the end of every lease that is in use; raises LedgerError."""
        for name, leases in list(self._leases.items()):
            if leases:
                await _reached(self._renew([_keys_of(name)[1]], list(leases)))
            else:
                del self._leases[name]

    async def aclose(self) -> None:
        await asyncio.gather(*self._settling, return_exceptions=True)
        await self._redis.aclose()

    async def _send_settlement(self, grant: Grant, usage: Usage | None, is_refused: bool) -> None:
        self._leases[grant.key.name].discard(grant.lease)
        prompt_tokens, output_tokens = correction(grant.tokens, grant.prompt_tokens, usage, is_refused)
        length = "" if is_refused or grant.conversation is None else grant.prompt_tokens
        arguments = [*_capacities(grant.key), prompt_tokens, output_tokens, grant.lease, length]
        await _reached(self._settle(_keys(grant.key, grant.conversation), arguments))


async def _reached(call: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await call
    except (RedisError, OSError) as error:
        raise LedgerError(f"{type(error).__name__}: {error}") from error


def _keys(key: Key, conversation: str | None) -> list[str]:
    return [*_keys_of(key.name), f"longlane:{{{key.name}}}:length:{conversation or ''}"]


def _keys_of(name: str) -> tuple[str, str]:
    # the braces keep the keys of one account on one node of a cluster
    return f"longlane:{{{name}}}:account", f"longlane:{{{name}}}:leases"


def _capacities(key: Key) -> list[int]:
    return [_limit(key.requests_per_minute), _limit(key.prompt_tokens_per_minute)]


def _limit(value: int | None) -> int:
    return _NO_LIMIT if value is None else value


def _level(text: str) -> float | None:
    return float(text) if text else None
