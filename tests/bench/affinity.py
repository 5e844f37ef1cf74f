"""`python -m tests.bench.affinity`: prefix affinity beside round robin on a generated agent trace.

Each agent shares a system prompt with the others, has a task of its own, and sends its whole growing conversation at
every step. The engines are scripted: prefill takes time by the tokens that no earlier prompt of the same engine held.
"""

import argparse
import asyncio
import random
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.bench.programs import engines, gateway, machine, percentile

POLICIES = ("round_robin", "least_loaded", "affinity")
WORDS = ("file", "test", "error", "value", "return", "import", "class", "line", "path", "check", "call", "list")


@dataclass(frozen=True)
class Step:
    seconds: float
    prompt_tokens: int
    cached_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--agents", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--system-words", type=int, default=1500)
    parser.add_argument("--step-words", type=int, default=500)
    parser.add_argument("--prefill-ms-per-1k", type=float, default=200.0)
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')}, {machine()}")
    print(f"{arguments.engines} engines, {arguments.agents} agents of {arguments.steps} steps")
    line = {"output": "Done.", "prefill_ms_per_1k_uncached": arguments.prefill_ms_per_1k}
    with tempfile.TemporaryDirectory() as name, engines(arguments.engines, line, Path(name)) as urls:
        for policy in POLICIES:
            with gateway(Path(name), urls, balance=policy) as (url, _):
                started = time.perf_counter()
                steps = asyncio.run(run_agents(url, arguments))
                report(policy, steps, time.perf_counter() - started)


async def run_agents(url: str, arguments: argparse.Namespace) -> list[Step]:
    # other prompts for each policy, so that none finds what the one before has left in a cache
    system = f"{uuid.uuid4()} {words(random.Random(0), arguments.system_words)}"
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        agents = (run_agent(client, model, system, number, arguments) for number in range(arguments.agents))
        return [step for steps in await asyncio.gather(*agents) for step in steps]


async def run_agent(
    client: httpx.AsyncClient, model: str, system: str, number: int, arguments: argparse.Namespace
) -> list[Step]:
    random_words = random.Random(number + 1)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Task {number}."}]
    steps = []
    for _ in range(arguments.steps):
        started = time.perf_counter()
        body = {"model": model, "messages": messages, "max_tokens": 16}
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        steps.append(Step(time.perf_counter() - started, usage["prompt_tokens"], cached))
        messages += [
            answer["choices"][0]["message"],
            {"role": "user", "content": words(random_words, arguments.step_words)},
        ]
        # what the agent itself does between two steps
        await asyncio.sleep(random_words.uniform(0.05, 0.3))
    return steps


def words(source: random.Random, count: int) -> str:
    return " ".join(f"{source.choice(WORDS)}{source.randrange(100)}" for _ in range(count))


def report(policy: str, steps: list[Step], seconds: float) -> None:
    prompt, cached = sum(step.prompt_tokens for step in steps), sum(step.cached_tokens for step in steps)
    times = [step.seconds for step in steps]
    print(
        f"{policy:>12}: {100 * cached / prompt:4.1f} % of {prompt} prompt tokens cached, step "
        f"p50 {percentile(times, 0.5):.2f} s, p95 {percentile(times, 0.95):.2f} s, all {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
