from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chunk_budget import FIRST_TOKENS, ChunkBudget
from engine.prompt_order import PATIENCE, Candidate, PromptOrder


class Line:
    """Prompts that are computed in the order that is asked for, so many tokens a step."""

    def __init__(self, tokens_per_step=64):
        self.order, self.tokens_per_step = PromptOrder(), tokens_per_step
        self.left: dict[str, Candidate] = {}
        self.num_arrived = 0
        self.served: list[tuple[str, str, int]] = []

    def add(self, key, tenant, num_tokens, priority=0):
        self.left[key] = Candidate(key, tenant, priority, self.num_arrived, num_tokens)
        self.num_arrived += 1

    def step(self):
        """The prompt that was served."""
        self.order.begin_step({each.tenant for each in self.left.values()})
        chosen = self.order.choose(list(self.left.values()))
        count = min(self.tokens_per_step, chosen.num_left)
        self.order.serve(chosen.tenant, count)
        self.served.append((chosen.key, chosen.tenant, count))
        del self.left[chosen.key]
        if chosen.num_left > count:
            left = chosen.num_left - count
            self.left[chosen.key] = Candidate(chosen.key, chosen.tenant, chosen.priority, chosen.arrival, left)
        return chosen.key


def test_the_shortest_comes_first_but_for_every_fourth_step():
    line = Line()
    line.add("long", "a", 6400)
    line.add("short", "a", 128)
    line.add("shorter", "a", 64)
    assert [line.step() for _ in range(5)] == ["shorter", "short", "short", "long", "long"]


def test_priority_comes_before_everything():
    line = Line()
    line.add("short", "a", 64)
    line.add("urgent", "b", 640, priority=1)
    assert [line.step() for _ in range(11)] == ["urgent"] * 10 + ["short"]


def test_a_tenant_that_comes_back_has_no_credit_and_no_debt():
    line = Line()
    line.add("a0", "a", 640)
    for _ in range(10):
        line.step()
    line.add("b0", "b", 640)
    line.step()
    line.add("a1", "a", 64)
    # what was served while nobody else was there does not count against it
    assert "a1" in [line.step() for _ in range(2)]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3000), st.integers(0, 5)), min_size=1, max_size=20),
)
def test_every_prompt_is_done_however_many_short_ones_come(prompts):
    """While another short one comes with every step, those that were there get every fourth step at least."""
    line = Line()
    for index, (tenant, num_tokens, num_steps) in enumerate(prompts):
        line.add(f"p{index}", tenant, num_tokens)
        for _ in range(min(num_steps, len(line.left))):
            line.step()
    names = {f"p{index}" for index in range(len(prompts))}
    steps = PATIENCE * sum(-(-each.num_left // 64) for each in line.left.values())
    for number in range(steps):
        line.add(f"flood{number}", "flood", 64)
        line.step()
    assert not names & set(line.left)


@settings(deadline=None)
@given(
    st.lists(st.integers(64, 1000), min_size=8, max_size=30), st.lists(st.integers(64, 1000), min_size=8, max_size=30)
)
def test_tenants_that_always_have_prompts_are_served_alike(first, second):
    """At no time has one got more than the other by over two of the longest prompts and its share of fourth steps."""
    line = Line(tokens_per_step=1000)
    for tenant, lengths in (("a", first), ("b", second)):
        for index, length in enumerate(lengths):
            line.add(f"{tenant}{index}", tenant, length)
    served = {"a": 0, "b": 0}
    while {each.tenant for each in line.left.values()} == {"a", "b"}:
        line.step()
        _, tenant, count = line.served[-1]
        served[tenant] += count
        assert abs(served["a"] - served["b"]) <= 2000 + 1000


@settings(deadline=None)
@given(
    st.sampled_from([64, 512, 4096]),
    st.lists(st.tuples(st.integers(0, 4096), st.booleans(), st.floats(0, 100)), max_size=30),
)
def test_a_budget_is_always_some_whole_blocks(most, observed):
    budget = ChunkBudget(most, 0.1)
    for num_tokens, has_decodes, seconds in observed:
        budget.observe(num_tokens, has_decodes, seconds)
        for decodes in (True, False):
            assert 64 <= budget.num_tokens(decodes) <= most
            assert budget.num_tokens(decodes) % 64 == 0
        assert budget.num_tokens(True) <= budget.num_tokens(False)


def test_without_a_bound_chunks_are_as_large_as_may_be():
    budget = ChunkBudget(2048, None)
    budget.observe(2048, True, 5.0)
    assert budget.num_tokens(True) == budget.num_tokens(False) == 2048


def test_a_slow_step_counts_at_once_and_is_forgotten_bit_by_bit():
    """Compiling on first use takes seconds; afterwards chunks grow again."""
    budget = ChunkBudget(4096, 0.1)
    assert budget.num_tokens(True) == FIRST_TOKENS
    budget.observe(256, True, 20.0)
    sizes = []
    for _ in range(60):
        sizes.append(budget.num_tokens(True))
        budget.observe(sizes[-1], True, 0.004 + sizes[-1] * 2e-5)
    assert sizes[0] <= 128
    # the next size would take 86 ms of the 80 that are planned
    assert set(sizes[-10:]) == {2048}
