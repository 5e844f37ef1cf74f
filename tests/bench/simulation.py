"""`python -m tests.bench.simulation`: what 1 to 64 engines give to agents, under each way of sharing their requests.

The choice of an engine is the gateway's own code; engines are a model of costs whose constants are arguments:

- prompts are computed one after the other, in the order in which they came, at `prefill` tokens/s less what is cached;
- at most `places` requests run at once, each of which decodes `decode` tokens/s, whatever else runs;
- the cache holds `cache_tokens` in whole messages; what was used least recently goes first, the end of a conversation
  before its beginning, and what several share counts once.

Each engine is given `agents` conversations (or all engines together, with `--all`). A step starts when the pause after
the last answer is over. `--trace FILE` takes a trace of `tests.bench.replay` instead, in which clients that leave stay.
Rates are those until nine of ten requests have ended: the rest waits for the longest ones.
"""

import argparse
import heapq
import itertools
import json
import shlex
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from config import Balance, RouterConfig, Upstream
from router.ask import read_ask
from router.policy import Rule, order
from router.worker import Worker
from tests.bench.agents import agents
from tests.bench.programs import percentile
from tests.bench.replay.trace import Call, read_trace

# with the tokens of the last one
Chains = list[tuple[int, int]]
SLACK = RouterConfig().affinity_slack
POLICIES: tuple[Balance, ...] = ("round_robin", "least_loaded", "affinity")


@dataclass(frozen=True)
class Costs:
    prefill: float = 6_000.0
    decode: float = 100.0
    cache_tokens: int = 524_288
    places: int = 8


@dataclass
class Engine:
    """cached  chain of messages -> tokens of the last of them, the least recently used first"""

    costs: Costs
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_cached: int = 0
    running: list[float] = field(default_factory=list)
    prefill_free_s: float = 0.0

    def take(self, now: float, call: Call) -> "Served":
        """A request that arrives now; no earlier one arrives later."""
        start = max(now, self.prefill_free_s)
        while self.running and self.running[0] <= start:
            heapq.heappop(self.running)
        if len(self.running) == self.costs.places:
            start = heapq.heappop(self.running)
        prompt_tokens, output_tokens = sum(piece.num_tokens for piece in call.messages), call.answer.num_tokens
        chains = _chains(call)
        cached = min(self._look_up(chains), prompt_tokens - 1)
        self.prefill_free_s = start + (prompt_tokens - cached) / self.costs.prefill
        first_s = self.prefill_free_s + 1 / self.costs.decode
        end_s = first_s + (output_tokens - 1) / self.costs.decode
        heapq.heappush(self.running, end_s)
        self._keep(chains)
        return Served(now, first_s, end_s, prompt_tokens, cached, output_tokens)

    def _look_up(self, chains: Chains) -> int:
        known = itertools.takewhile(lambda pair: pair[0] in self.cached, chains[:-1])
        return sum(size for _, size in known)

    def _keep(self, chains: Chains) -> None:
        # the beginning last, so that nothing goes before what stands behind it
        for chain, size in reversed(chains):
            self.num_cached += size - self.cached.get(chain, 0)
            self.cached[chain] = size
            self.cached.move_to_end(chain)
        while self.num_cached > self.costs.cache_tokens:
            self.num_cached -= self.cached.popitem(last=False)[1]


def _chains(call: Call) -> Chains:
    """Each message with all before it, and the answer."""
    chains, chain = [], hash(call.tenant)
    for piece in (*call.messages, call.answer):
        chain = hash((chain, piece.segment, piece.first, piece.num_tokens))
        chains.append((chain, piece.num_tokens))
    return chains


@dataclass(frozen=True)
class Served:
    arrived_s: float
    first_s: float
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


class Gateway:
    """Its own view of the engines: what it sent there itself."""

    def __init__(self, num_engines: int, by: Balance, slack: int) -> None:
        self._workers = [Worker(Upstream(name=f"engine-{n}", url="http://x", lane="long")) for n in range(num_engines)]
        self._numbers = {worker.name: number for number, worker in enumerate(self._workers)}
        self._by, self._slack = by, slack
        self._turns = itertools.count()

    def choose(self, now: float, prefix: bytes) -> tuple[int, ExitStack]:
        """The engine's number, and what gives its place back when closed."""
        worker = order(self._workers, now, Rule(self._by, prefix, self._slack, next(self._turns)))[0]
        lease = ExitStack()
        lease.enter_context(worker.lease())
        return self._numbers[worker.name], lease


def simulate(
    calls: Sequence[Call], num_engines: int, by: Balance, costs: Costs, num_gateways: int = 1, slack: int = SLACK
) -> list[Served]:
    engines = [Engine(costs) for _ in range(num_engines)]
    gateways = [Gateway(num_engines, by, slack) for _ in range(num_gateways)]
    waiting = {call.call_id: len(call.after) for call in calls}
    behind: dict[str, list[Call]] = {}
    for call in calls:
        for name in call.after:
            behind.setdefault(name, []).append(call)
    served: list[Served] = []
    # (time, number to break ties, call, lease of the call that ends or None for one that begins)
    numbers = itertools.count()
    events = [(call.wait_s, next(numbers), call, None) for call in calls if not call.after]
    heapq.heapify(events)
    while events:
        now, number, call, lease = heapq.heappop(events)
        if lease is None:
            engine, lease = gateways[number % num_gateways].choose(now, prefix(call))
            served.append(engines[engine].take(now, call))
            heapq.heappush(events, (served[-1].end_s, next(numbers), call, lease))
            continue
        lease.close()
        for later in behind.get(call.call_id, ()):
            waiting[later.call_id] -= 1
            if not waiting[later.call_id]:
                heapq.heappush(events, (now + later.wait_s, next(numbers), later, None))
    return served


def prefix(call: Call) -> bytes:
    """What the gateway would read from the request's opening."""
    opening = [piece for piece in call.messages[:3] if piece.role in ("system", "user")]
    return _prefix(call.tenant, tuple((piece.role, f"{piece.segment} {piece.num_tokens}") for piece in opening))


@lru_cache(maxsize=4096)
def _prefix(tenant: str, opening: tuple[tuple[str, str], ...]) -> bytes:
    messages = [{"role": role, "content": text} for role, text in opening]
    found = read_ask(json.dumps({"model": "m", "messages": messages}).encode(), None, tenant).prefix
    assert found is not None, opening
    return found


@dataclass(frozen=True)
class Row:
    """What the requests of one run had. Tokens are those of prompts and answers together."""

    requests: int
    cached: float
    ttft_p50_s: float
    ttft_p95_s: float
    requests_per_s: float
    tokens_per_s: float


def summary(served: Sequence[Served]) -> Row:
    until_s = percentile([one.end_s for one in served], 0.9)
    ended = [one for one in served if one.end_s <= until_s]
    span_s = until_s - min(one.arrived_s for one in served)
    prompt, times = sum(one.prompt_tokens for one in served), [one.ttft_s for one in served]
    return Row(
        len(served),
        sum(one.cached_tokens for one in served) / prompt,
        percentile(times, 0.5),
        percentile(times, 0.95),
        len(ended) / span_s,
        sum(one.prompt_tokens + one.output_tokens for one in ended) / span_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--agents", type=int, default=8, help="for each engine")
    parser.add_argument("--all", type=int, help="agents of every row together, instead")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--slack", type=int, default=SLACK)
    parser.add_argument("--seed", type=int, default=0)
    for name, kind in (("prefill", float), ("decode", float), ("cache_tokens", int), ("places", int)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Costs, name))
    arguments = parser.parse_args()
    costs = Costs(arguments.prefill, arguments.decode, arguments.cache_tokens, arguments.places)
    print(f"`python -m tests.bench.simulation {shlex.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}: {costs}\n")
    print("| engines | agents | policy | requests | cached | TTFT p50 | TTFT p95 | requests/s | tokens/s |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    for line in table(arguments, costs):
        print(line, flush=True)


def table(arguments: argparse.Namespace, costs: Costs) -> Iterable[str]:
    for num_engines in arguments.engines:
        calls = _calls(arguments, num_engines)
        num_agents = sum(not call.after for call in calls)
        for by in POLICIES:
            row = summary(simulate(calls, num_engines, by, costs, arguments.gateways, arguments.slack))
            times = f"{row.ttft_p50_s:.2f} s | {row.ttft_p95_s:.2f} s"
            yield (
                f"| {num_engines} | {num_agents} | {by.replace('_', ' ')} | {row.requests:,} | {row.cached:.1%} "
                f"| {times} | {row.requests_per_s:.1f} | {row.tokens_per_s:,.0f} |"
            )


def _calls(arguments: argparse.Namespace, num_engines: int) -> list[Call]:
    if arguments.trace:
        return read_trace(arguments.trace)
    population = agents(arguments.all or num_engines * arguments.agents, arguments.seed)
    return [call for agent in population for call in agent.calls()]


if __name__ == "__main__":
    main()
