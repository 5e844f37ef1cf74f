"""Coding agents as a gateway meets them: who shares a system prompt, how conversations grow, how long tools run.

Only lengths and times, no text; the same seed gives the same agents. `calls` has the form of the traces of `replay`.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.replay.trace import Call, Piece


@dataclass(frozen=True)
class Shape:
    """Medians are of log-normal distributions whose sigma is `spread`; `max_context` ends a conversation.

    num_systems    different system prompts, each of `system_tokens`; the first ones have the most agents
    step_tokens    what an agent adds before a step: a tool's result, seldom a new task
    pause_s        from an answer to the next step
    """

    num_systems: int = 4
    system_tokens: int = 12_000
    task_tokens: int = 600
    num_steps: int = 30
    step_tokens: int = 1_000
    output_tokens: int = 180
    pause_s: float = 4.0
    spread: float = 1.0
    max_context: int = 200_000
    starts_within_s: float = 60.0


@dataclass(frozen=True)
class Step:
    """One request: what its prompt has beyond the last prompt and answer, its answer, and the pause after that."""

    new_tokens: int
    output_tokens: int
    pause_s: float


@dataclass(frozen=True)
class Agent:
    name: str
    system: int
    system_tokens: int
    start_s: float
    steps: tuple[Step, ...]

    def calls(self) -> Iterator[Call]:
        messages = [Piece("system", f"system-{self.system}", self.system_tokens)]
        after, wait_s = (), self.start_s
        for number, step in enumerate(self.steps):
            name = f"{self.name}-{number}"
            messages.append(Piece("tool" if number else "user", name, step.new_tokens))
            answer = Piece("assistant", f"{name}-answer", step.output_tokens)
            yield Call(name, "anyone", tuple(messages), answer, after, wait_s, group=self.name)
            messages.append(answer)
            after, wait_s = (name,), step.pause_s


def agents(count: int, seed: int, shape: Shape | None = None) -> list[Agent]:
    shape = shape or Shape()
    source = random.Random(seed)
    return [_agent(f"agent-{number}", source, shape) for number in range(count)]


def _agent(name: str, source: random.Random, shape: Shape) -> Agent:
    # half of all agents have the first system prompt, a quarter the second, ...
    system = min(shape.num_systems - 1, int(-math.log2(1.0 - source.random())))
    start_s = source.uniform(0.0, shape.starts_within_s)
    return Agent(name, system, shape.system_tokens, start_s, tuple(_steps(source, shape)))


def _steps(source: random.Random, shape: Shape) -> Iterator[Step]:
    context = shape.system_tokens
    for number in range(max(1, round(_around(source, shape.num_steps, shape.spread / 2)))):
        new = round(_around(source, shape.step_tokens, shape.spread)) if number else shape.task_tokens
        step = Step(max(1, new), max(1, round(_around(source, shape.output_tokens, shape.spread))), 0.0)
        context += step.new_tokens + step.output_tokens
        if context > shape.max_context and number:
            return
        yield Step(step.new_tokens, step.output_tokens, _around(source, shape.pause_s, shape.spread))


def _around(source: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(source.gauss(0.0, sigma))
