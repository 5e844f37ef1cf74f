"""Agent-like traffic from a seed: tool loops that grow, sub-agents, compaction, thoughts that are dropped, cancelled
calls that are tried again, and short questions beside them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from tests.bench.replay.trace import Call, Piece


@dataclass(frozen=True, slots=True)
class Traffic:
    """Shape of a trace; tokens and seconds are means of skewed distributions.

    num_agents      that work at the same time, spread over the tenants and the system prompts
    num_tasks       that a user gives to each, one after the other
    num_steps       of a task: an answer with a tool call, and the tool's result
    compact_tokens  a conversation that is longer goes on as a summary
    """

    num_agents: int = 8
    num_tenants: int = 2
    num_systems: int = 3
    num_tasks: int = 4
    num_steps: int = 12
    system_tokens: int = 9_000
    task_tokens: int = 600
    answer_tokens: int = 220
    result_tokens: int = 1_800
    summary_tokens: int = 2_500
    compact_tokens: int = 110_000
    tool_s: float = 1.5
    think_s: float = 25.0
    num_questions: int = 60
    question_tokens: int = 1_000
    question_every_s: float = 4.0
    sub_agent_share: float = 0.08
    cancel_share: float = 0.03
    drops_thoughts_share: float = 0.25


def generate(traffic: Traffic, seed: int) -> list[Call]:
    """Calls in an order in which each comes after those that it waits for."""
    random = Random(seed)
    calls: list[Call] = []
    for number in range(traffic.num_agents):
        agent = _Agent(f"a{number}", traffic, Random(random.random()), number)
        calls += agent.work(start_s=random.uniform(0, traffic.think_s))
    return calls + list(_questions(traffic, random))


def _questions(traffic: Traffic, random: Random) -> Iterator[Call]:
    at_s = 0.0
    for number in range(traffic.num_questions):
        at_s += random.expovariate(1 / traffic.question_every_s)
        size = _skewed(random, traffic.question_tokens)
        message, answer = Piece("user", f"q{number}", size), Piece("assistant", f"q{number}-answer", 150)
        yield Call(f"q{number}", f"t{number % traffic.num_tenants}", (message,), answer, (), at_s, group="question")


@dataclass(slots=True)
class _Agent:
    """One conversation, and those of its sub-agents."""

    name: str
    traffic: Traffic
    random: Random
    number: int
    messages: list[Piece] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    last: tuple[str, ...] = ()

    def work(self, start_s: float) -> list[Call]:
        drops = self.random.random() < self.traffic.drops_thoughts_share
        system = f"system-{self.number % self.traffic.num_systems}"
        size = self.traffic.system_tokens * (1 + self.number % self.traffic.num_systems) // 2
        self.messages = [Piece("system", system, size)]
        for task in range(self.traffic.num_tasks):
            wait_s = start_s if task == 0 else _skewed_s(self.random, self.traffic.think_s)
            if drops:
                self.messages = [_without_thought(piece) for piece in self.messages]
            self._say("user", self.traffic.task_tokens)
            self._loop(wait_s, self.traffic.num_steps, may_branch=True)
        return self.calls

    def _loop(self, wait_s: float, num_steps: int, may_branch: bool) -> None:
        for _ in range(self.random.randint(num_steps // 2, num_steps * 3 // 2)):
            self._call(wait_s)
            if may_branch and self.random.random() < self.traffic.sub_agent_share:
                self._branch()
            self._say("tool", self.traffic.result_tokens)
            self._compact()
            wait_s = _skewed_s(self.random, self.traffic.tool_s)
        self._call(wait_s)

    def _call(self, wait_s: float) -> None:
        answer = Piece("assistant", self._fresh(), _skewed(self.random, self.traffic.answer_tokens))
        if self.random.random() < self.traffic.cancel_share:
            self._add(answer, wait_s, cancel_s=self.random.uniform(0.05, 1.5))
            wait_s = 1.0
        self._add(answer, wait_s)
        self.messages = [*self.messages, answer]

    def _add(self, answer: Piece, wait_s: float, cancel_s: float | None = None) -> None:
        call_id = f"{self.name}-{len(self.calls)}"
        tenant = f"t{self.number % self.traffic.num_tenants}"
        group = "sub-agent" if "." in self.name else "agent"
        call = Call(call_id, tenant, tuple(self.messages), answer, self.last, wait_s, cancel_s, group)
        self.calls.append(call)
        self.last = (call_id,)

    def _branch(self) -> None:
        """Sub-agents side by side, all with one system prompt; their reports are the tool's result."""
        before, reports = self.last, []
        for _ in range(self.random.randint(1, 3)):
            sub = _Agent(f"{self.name}.{len(self.calls)}", self.traffic, self.random, self.number, last=before)
            sub.messages = [Piece("system", "system-of-sub-agents", self.traffic.system_tokens * 2 // 3)]
            sub._say("user", self.traffic.task_tokens)
            sub._loop(0.05, self.traffic.num_steps // 2, may_branch=False)
            self.calls += sub.calls
            reports += sub.last
        self.last = tuple(reports)

    def _compact(self) -> None:
        if sum(piece.num_tokens for piece in self.messages) > self.traffic.compact_tokens:
            summary = Piece("user", self._fresh(), self.traffic.summary_tokens)
            self.messages = [self.messages[0], summary]

    def _say(self, role: str, mean: int) -> None:
        self.messages = [*self.messages, Piece(role, self._fresh(), _skewed(self.random, mean))]

    def _fresh(self) -> str:
        return f"{self.name}/{len(self.calls)}/{len(self.messages)}"


def _without_thought(piece: Piece) -> Piece:
    """The second half of an answer."""
    if piece.role != "assistant" or piece.first or piece.num_tokens < 2:
        return piece
    half = piece.num_tokens // 2
    return Piece(piece.role, piece.segment, piece.num_tokens - half, half)


def _skewed(random: Random, mean: int) -> int:
    return max(8, round(random.lognormvariate(-0.32, 0.8) * mean))


def _skewed_s(random: Random, mean: float) -> float:
    return random.lognormvariate(-0.32, 0.8) * mean
