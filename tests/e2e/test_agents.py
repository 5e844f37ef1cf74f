"""Coding agents finish a small task, with two tool calls, over the gateway and the server."""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.e2e.headless import (
    AGENTS,
    ANSWER,
    CHAT,
    CODEX_EXEC,
    MESSAGES,
    MINI,
    OPENCODE_CHAT,
    OPENCODE_MESSAGES,
    QWEN,
    SILENCE_S,
    patching_codex,
)
from tests.e2e.recorded import recorded_stack, write_script
from tests.e2e.recorder import write_trace
from tests.e2e.require import require
from tests.e2e.stack import descendants, resident_bytes

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]

BLOCK = 64
LONG_TURNS = 30
NARROW = 1000
GROWTH_BYTES = 48 << 20
PATCHED = 'PATCHED = "</parameter> \\\\n 日本"\n'


class Counts(NamedTuple):
    """Tokens; `cached` of the prompt."""

    prompt: int
    cached: int
    output: int

    @classmethod
    def total(cls, several: Iterable["Counts"]) -> "Counts":
        return cls(*map(sum, zip(*several, strict=True)))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def stack(work):
    slow = {"when": "Slowly", "output": "It took its time.\n</think>\n\nat last", "prefill_ms": 2200 * SILENCE_S}
    script = write_script(work / "script.jsonl", [slow], *(agent.prepare(work) for agent in AGENTS), long_script())
    with recorded_stack(script, "--server-heartbeat-s", "1") as stack:
        yield stack


@pytest.fixture(scope="module")
def narrow_stack(tmp_path_factory):
    """Shorter than the prompt of any agent."""
    script = write_script(tmp_path_factory.mktemp("narrow") / "script.jsonl", [{"when": "nobody", "output": "-"}])
    with recorded_stack(script, "--max-model-len", str(NARROW)) as stack:
        yield stack


def long_script() -> list[dict]:
    """A command after another, each with some output, which tells the turn."""

    def line(turn: int) -> dict:
        command = f"seq {turn} 500; echo and turn {turn + 1} of them"
        if turn == LONG_TURNS:
            command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        call = f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"
        return {"when": f"turn {turn} of them", "output": f"Turn {turn} it is.\n</think>\n\nNext.\n\n{call}"}

    return [line(turn) for turn in range(LONG_TURNS + 1)]


def run(agent, stack, work, *task):
    """What the agent printed, and its requests. Those for a title of the conversation, without tools, do not count."""
    require(agent.client)
    done = agent.run(work, stack.url, *task)
    exchanges = stack.take(agent.path)
    write_trace(work / f"{agent.name}-trace", exchanges)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [exchange.status for exchange in exchanges] == [200] * len(exchanges)
    return done.stdout, [exchange for exchange in exchanges if exchange.request.json.get("tools")]


def told(exchange) -> tuple[str, Counts]:
    """Why an answer ended, and its usage, as the client was told."""
    answer = exchange.response
    events = answer.events if "event-stream" in answer.headers["content-type"] else [answer.json]
    assert not any("error" in event for event in events if isinstance(event, dict) and event.get("error"))
    path = exchange.path.partition("?")[0]
    return TOLD[path](events)


def told_by_chat(events) -> tuple[str, Counts]:
    events = [event for event in events if event != "[DONE]"]
    (reason,) = [one["finish_reason"] for event in events for one in event["choices"] if one["finish_reason"]]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return reason, Counts(usage["prompt_tokens"], cached, usage["completion_tokens"])


def told_by_messages(events) -> tuple[str, Counts]:
    (end,) = [event for event in events if event["type"] == "message_delta"]
    usage = end["usage"]
    cached = usage["cache_read_input_tokens"]
    return end["delta"]["stop_reason"], Counts(usage["input_tokens"] + cached, cached, usage["output_tokens"])


def told_by_responses(events) -> tuple[str, Counts]:
    end = events[-1]
    assert end["type"] == "response.completed"
    usage = end["response"]["usage"]
    counts = Counts(usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"])
    return end["response"]["output"][-1]["type"], counts


TOLD = {CHAT: told_by_chat, MESSAGES: told_by_messages, CODEX_EXEC.path: told_by_responses}


def heard_by_qwen(printed, project) -> Counts:
    result = json.loads(printed)[-1]
    assert (result["is_error"], result["num_turns"]) == (False, 3)
    assert (result["stats"]["tools"]["totalSuccess"], result["stats"]["tools"]["totalFail"]) == (2, 0)
    (model,) = result["stats"]["models"].values()
    assert model["api"]["totalErrors"] == 0
    return Counts(model["tokens"]["prompt"], model["tokens"]["cached"], model["tokens"]["candidates"])


def heard_by_opencode(printed, project) -> Counts:
    events = [json.loads(line) for line in printed.splitlines()]
    assert not [event for event in events if event["type"] == "error"]
    tools = [event["part"]["state"]["status"] for event in events if event["type"] == "tool_use"]
    assert tools == ["completed", "completed"]
    steps = [event["part"] for event in events if event["type"] == "step_finish"]
    assert [step["reason"] for step in steps] == ["tool-calls", "tool-calls", "stop"]
    tokens = [step["tokens"] for step in steps]
    return Counts.total(
        Counts(one["input"] + one["cache"]["read"], one["cache"]["read"], one["output"] + one["reasoning"])
        for one in tokens
    )


def heard_by_mini(printed, project) -> Counts:
    trajectory = json.loads((project / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    answers = [one["extra"]["response"] for one in trajectory["messages"] if one["role"] == "assistant"]
    return Counts.total(told_by_chat([answer])[1] for answer in answers)


def heard_by_codex(printed, project) -> Counts:
    events = [json.loads(line) for line in printed.splitlines()]
    (end,) = [event for event in events if event["type"].startswith("turn.") and event["type"] != "turn.started"]
    assert end["type"] == "turn.completed"
    commands = [event["item"] for event in events if event.get("item", {}).get("type") == "command_execution"]
    assert [item["exit_code"] for item in commands if item["status"] == "completed"] == [0, 0]
    usage = end["usage"]
    return Counts(usage["input_tokens"], usage["cached_input_tokens"], usage["output_tokens"])


HEARD = {
    MINI: heard_by_mini,
    QWEN: heard_by_qwen,
    OPENCODE_CHAT: heard_by_opencode,
    OPENCODE_MESSAGES: heard_by_opencode,
    CODEX_EXEC: heard_by_codex,
}
ENDINGS = {
    CHAT: ["tool_calls", "tool_calls", "stop"],
    MESSAGES: ["tool_use", "tool_use", "end_turn"],
    CODEX_EXEC.path: ["function_call", "function_call", "message"],
}


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_agent_finishes_its_task(stack, work, agent):
    printed, exchanges = run(agent, stack, work)
    assert (agent.project(work) / "bird.py").read_text() == ANSWER
    endings, counts = zip(*map(told, exchanges), strict=True)
    # it ends with a command of its own
    assert list(endings) == (["tool_calls"] * 3 if agent is MINI else ENDINGS[agent.path])
    assert HEARD[agent](printed, agent.project(work)) == Counts.total(counts)
    # what an agent sends back of an answer renders as it was before: every prompt begins with the whole one before it
    for earlier, later in itertools.pairwise(counts):
        assert later.cached == earlier.prompt // BLOCK * BLOCK


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_agent_makes_two_calls_of_one_answer(stack, work, agent):
    (agent.project(work) / "bird.py").unlink(missing_ok=True)
    _, exchanges = run(agent, stack, work, f"Both of {agent.name}: read notes.txt and write bird.py at once.")
    assert (agent.project(work) / "bird.py").read_text() == ANSWER
    assert len(exchanges) == 2
    first, second = (told(exchange)[1] for exchange in exchanges)
    assert second.cached == first.prompt // BLOCK * BLOCK


def test_codex_calls_functions_in_namespaces(stack, work):
    _, exchanges = run(CODEX_EXEC, stack, work, f"Ending of {CODEX_EXEC.name}: close the other agent.")
    call, output = exchanges[1].request.json["input"][-2:]
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
    assert output["type"] == "function_call_output" and output["output"].startswith("invalid agent id nobody-of-codex")


def test_codex_patches_with_a_tool_of_free_text(stack, work):
    require(CODEX_EXEC.client)
    printed, exchanges = run(patching_codex(work), stack, work, f"Patch of {CODEX_EXEC.name}: make a file.")
    assert (CODEX_EXEC.project(work) / "patched.py").read_text() == PATCHED
    assert [told(exchange)[0] for exchange in exchanges] == ["custom_tool_call", "message"]
    assert "apply_patch" in [
        tool.get("name") for tool in exchanges[0].request.json["tools"] if tool["type"] == "custom"
    ]
    call, output = exchanges[1].request.json["input"][-2:]
    assert (call["type"], output["type"]) == ("custom_tool_call", "custom_tool_call_output")
    assert "It is patched." in printed
    # what it sends back renders as it was written
    first, second = (told(exchange)[1] for exchange in exchanges)
    assert second.cached == first.prompt // BLOCK * BLOCK


def test_a_long_conversation_stays_in_the_cache_and_nothing_grows(stack, work):
    def resident() -> list[int]:
        return [resident_bytes(pid) for pid in descendants(stack.stack.process.pid)]

    patient = dataclasses.replace(MINI, name="mini-long")
    patient.project(work).mkdir()
    before = resident()
    _, exchanges = run(patient, stack, work, "Begin with turn 0 of them.")
    assert all(now - then < GROWTH_BYTES for then, now in zip(before, resident(), strict=True))
    trajectory = json.loads((patient.project(work) / "trajectory.json").read_text())
    assert trajectory["info"]["exit_status"] == "Submitted"
    endings, counts = zip(*map(told, exchanges), strict=True)
    assert endings == ("tool_calls",) * (LONG_TURNS + 1)
    assert heard_by_mini("", patient.project(work)) == Counts.total(counts)
    for earlier, later in itertools.pairwise(counts):
        assert later.cached == earlier.prompt // BLOCK * BLOCK
    assert counts[-1].prompt > 30_000


@pytest.mark.parametrize("agent", [CODEX_EXEC, OPENCODE_CHAT, OPENCODE_MESSAGES], ids=lambda agent: agent.name)
def test_heartbeats_count_for_an_agent_that_bears_no_silence(stack, work, agent):
    """It would give the request up, and send it again."""
    printed, exchanges = run(agent, stack, work, "Slowly, please.")
    assert "at last" in printed
    assert len(exchanges) == 1


KNOWN_BY = {
    MINI: "ContextWindowExceededError",
    QWEN: f"maximum context length is {NARROW} tokens",
    # it summarises what there is, and goes on from there
    OPENCODE_CHAT: "Here is the conversation so far",
    OPENCODE_MESSAGES: "Here is the conversation so far",
    CODEX_EXEC: "ran out of room in the model's context window",
}


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_agent_knows_a_full_context(narrow_stack, tmp_path, agent):
    require(agent.client)
    agent.prepare(tmp_path)
    done = agent.run(tmp_path, narrow_stack.url)
    exchanges = narrow_stack.take(agent.path)
    assert len(exchanges) <= 6
    assert KNOWN_BY[agent] in " ".join((done.stdout + done.stderr).split())
