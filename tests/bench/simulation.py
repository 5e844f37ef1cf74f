"""`python -m tests.bench.simulation`: what 1 to 64 engines give to agents, under each way of sharing their requests.

The choice of an engine is the gateway's own code; engines are a model of costs whose constants are arguments:

- prompts are computed one after the other, in the order in which they came, at `prefill` tokens/s less what is cached;
- at most `places` requests run at once, each of which decodes `decode` tokens/s, whatever else runs;
- the cache holds `cache_tokens`; the conversation that was used least recently goes first, and a system prompt that
  several share counts once.

Each engine is given `agents` conversations (or all engines together, with `--all`). A step starts when the pause after
the last answer is over. Rates are those until nine of ten requests have ended: the rest waits for the longest ones.
"""

import argparse
import heapq
import itertools
import shlex
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from config import Balance, RouterConfig, Upstream
from router.ask import read_ask
from router.policy import Rule, order
from router.worker import Worker
from tests.bench.agents import Agent, agents
from tests.bench.programs import percentile

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
    """cached  conversation or system prompt -> tokens that only it needs, the least recently used first"""

    costs: Costs
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict)
    running: list[float] = field(default_factory=list)
    prefill_free_s: float = 0.0

    def take(self, now: float, agent: Agent, prompt_tokens: int, output_tokens: int) -> "Served":
        """A request that arrives now; no earlier one arrives later."""
        start = max(now, self.prefill_free_s)
        while self.running and self.running[0] <= start:
            heapq.heappop(self.running)
        if len(self.running) == self.costs.places:
            start = heapq.heappop(self.running)
        cached = min(self._look_up(agent), prompt_tokens - 1)
        self.prefill_free_s = start + (prompt_tokens - cached) / self.costs.prefill
        first_s = self.prefill_free_s + 1 / self.costs.decode
        end_s = first_s + (output_tokens - 1) / self.costs.decode
        heapq.heappush(self.running, end_s)
        self._keep(agent, prompt_tokens + output_tokens)
        return Served(now, first_s, end_s, prompt_tokens, cached, output_tokens)

    def _look_up(self, agent: Agent) -> int:
        system = self.cached.get(_system(agent), 0)
        # what follows a system prompt is of no use without it
        return system + self.cached.get(agent.name, 0) if system else 0

    def _keep(self, agent: Agent, num_tokens: int) -> None:
        # the system prompt last: it is used as late as any conversation below it
        for name, size in ((agent.name, num_tokens - agent.system_tokens), (_system(agent), agent.system_tokens)):
            self.cached[name] = size
            self.cached.move_to_end(name)
        total = sum(self.cached.values())
        while total > self.costs.cache_tokens:
            total -= self.cached.popitem(last=False)[1]


def _system(agent: Agent) -> str:
    return f"system-{agent.system}"


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
    population: Sequence[Agent], num_engines: int, by: Balance, costs: Costs, num_gateways: int = 1, slack: int = SLACK
) -> list[Served]:
    engines = [Engine(costs) for _ in range(num_engines)]
    gateways = [Gateway(num_engines, by, slack) for _ in range(num_gateways)]
    prefixes = [read_ask(agent.body(), None, "anyone").prefix for agent in population]
    prompts = [list(agent.prompt_tokens()) for agent in population]
    served: list[Served] = []
    # (time, number to break ties, agent, step, lease of the step that ends or None for one that begins)
    numbers = itertools.count()
    events = [(agent.start_s, next(numbers), index, 0, None) for index, agent in enumerate(population)]
    heapq.heapify(events)
    while events:
        now, number, index, at, lease = heapq.heappop(events)
        agent = population[index]
        if lease is not None:
            lease.close()
            if at + 1 < len(agent.steps):
                heapq.heappush(events, (now + agent.steps[at].pause_s, next(numbers), index, at + 1, None))
            continue
        engine, lease = gateways[number % num_gateways].choose(now, prefixes[index])
        served.append(engines[engine].take(now, agent, prompts[index][at], agent.steps[at].output_tokens))
        heapq.heappush(events, (served[-1].end_s, next(numbers), index, at, lease))
    return served


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
        population = agents(arguments.all or num_engines * arguments.agents, arguments.seed)
        for by in POLICIES:
            row = summary(simulate(population, num_engines, by, costs, arguments.gateways, arguments.slack))
            times = f"{row.ttft_p50_s:.2f} s | {row.ttft_p95_s:.2f} s"
            yield (
                f"| {num_engines} | {len(population)} | {by.replace('_', ' ')} | {row.requests:,} | {row.cached:.1%} "
                f"| {times} | {row.requests_per_s:.1f} | {row.tokens_per_s:,.0f} |"
            )


if __name__ == "__main__":
    main()
