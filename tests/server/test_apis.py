"""One property over the APIs: however an output is cut, each of them says, streamed as whole, what was read of it."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import TokenEvent
from server import chat, completions, messages, responses
from server.answer import Answer
from server.choice import Choice
from server.prompt import arguments
from server.responses_protocol import ResponsesRequest
from tests.server import test_chat, test_messages
from tests.server.live import events
from tests.server.raw import FREEFORM, TOOLS, Read, read, rules
from tests.server.test_pipeline import ALL_TOOLS, GOLDEN

ASKED = ResponsesRequest(
    input="x", store=False, tools=[*({"type": "function", **tool} for tool in TOOLS), {**FREEFORM, "type": "custom"}]
)


class Played:
    """A generation whose tokens are known."""

    def __init__(self, made: list[TokenEvent]) -> None:
        self._made = made

    async def next(self):
        return [(0, self._made.pop(0))] if self._made else []

    async def end(self, index: int) -> None:
        self._made.clear()

    async def close(self) -> None: ...


def answer(raw: bytes, cuts, reason: str) -> Answer:
    ends = [0, *sorted({cut for cut in cuts if 0 < cut < len(raw)}), len(raw)]
    tokens = [raw[start:end] for start, end in pairwise(ends)]
    choice = Choice(rules(token_bytes=tokens.__getitem__, tools=ALL_TOOLS, starts_in_thought=True), None)
    made = [*(TokenEvent("x", (token,)) for token in range(len(tokens))), TokenEvent("x", finish_reason=reason)]
    return Answer("x", "m", 0, [choice], 1, Played(made))


async def text_of(stream) -> str:
    return b"".join([part async for part in stream]).decode()


def named_events(text: str) -> list[dict]:
    return [json.loads(part.partition("\ndata: ")[2]) for part in text.split("\n\n") if part]


async def by_chat(make) -> tuple[Read, Read]:
    streamed = test_chat.joined(events(await text_of(chat._events(chat.ChatAnswer(make(), False, False), "r"))))[0]
    whole = (await chat._whole(chat.ChatAnswer(make(), False, False)))["choices"][0]
    for made in (*streamed["calls"], *whole["message"].get("tool_calls", ())):
        name = made["name"] if "name" in made else made[made["type"]]["name"]
        assert (made["type"] == "custom") == (name == FREEFORM["name"])
    calls = [(call["name"], call["arguments"]) for call in streamed["calls"]]
    (finish,) = streamed["finishes"]
    return Read(streamed["content"], streamed["reasoning"], calls, finish), Read(*test_chat.message_of(whole).values())


async def by_responses(make) -> tuple[Read, Read]:
    plan = responses._plan(ASKED, (), "t")
    api = responses.Responses(None)
    final = named_events(await text_of(api._events(responses.ResponseWriter(plan, make()), "r")))[-1]["response"]
    return of_items(final), of_items(await api._whole(responses.ResponseWriter(plan, make())))


def of_items(response: dict) -> Read:
    found = Read(finish=response["status"])
    for item in response["output"]:
        match item["type"]:
            case "reasoning":
                found.reasoning += item["content"][0]["text"]
            case "message":
                found.content += item["content"][0]["text"]
            case _:
                assert ("input" in item) == (item["name"] == FREEFORM["name"])
                found.calls.append((item["name"], item["arguments"] if "arguments" in item else item["input"]))
    return found


async def by_messages(make) -> tuple[Read, Read]:
    found = named_events(await text_of(messages._events(make(), "r")))
    (end,) = [event["delta"] for event in found if event["type"] == "message_delta"]
    streamed = test_messages.joined(found)
    for block in streamed:
        if block["type"] == "tool_use":
            block["input"] = arguments(block["json"])
    whole = await messages._whole(make())
    return of_blocks(streamed, end["stop_reason"]), of_blocks(whole["content"], whole["stop_reason"])


def of_blocks(blocks: list[dict], finish: str) -> Read:
    found = Read(finish=finish)
    for block in blocks:
        match block["type"]:
            case "thinking":
                found.reasoning += block["thinking"]
            case "text":
                found.content += block["text"]
            case _:
                found.calls.append((block["name"], block["input"]))
    return found


async def by_completions(make) -> tuple[Read, Read]:
    chunks = events(await text_of(completions._events(completions.TextAnswer(make(), False, False), "r")))
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk != "[DONE]")
    whole = await completions._whole(completions.TextAnswer(make(), False, False))
    return Read(streamed), Read(whole["choices"][0]["text"])


def check(name: str, reason: str, cuts) -> None:
    raw = GOLDEN[name].encode()
    expected = read(raw, cuts, tools=ALL_TOOLS, starts_in_thought=True, reason=reason)

    async def scenario() -> None:
        def make() -> Answer:
            return answer(raw, cuts, reason)

        assert await by_chat(make) == (expected, expected)
        for found in await by_responses(make):
            assert (found.content, found.reasoning, found.calls) == (
                expected.content,
                expected.reasoning,
                expected.calls,
            )
        for found in await by_messages(make):
            calls = [(name, arguments(text)) for name, text in expected.calls]
            assert (found.content, found.reasoning, found.calls) == (expected.content, expected.reasoning, calls)
        for found in await by_completions(make):
            assert found.content == expected.content

    asyncio.run(scenario())


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("name", GOLDEN)
def test_every_api_says_the_same_byte_by_byte(name, reason):
    check(name, reason, range(len(GOLDEN[name].encode())))
    check(name, reason, ())


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(sorted(GOLDEN)), reason=st.sampled_from(["stop", "length"]), cuts=st.lists(st.integers(1, 300))
)
def test_every_api_says_the_same_however_it_is_cut(name, reason, cuts):
    check(name, reason, cuts)
