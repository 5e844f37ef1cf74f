"""What the trained checkpoint can do, asked for as clients ask: tools, JSON, and a fact in a long text."""

import json
from random import Random

import openai
import pytest

from engine.embedded.skills import json_objects, needles, tool_calls
from tests.e2e.test_serve import MODEL
from tests.embedded.haystack import haystack

LONG_TOKENS = 3_000


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="anything", max_retries=0, timeout=110) as client:
        yield client


def ask(client, messages, tools=(), **options):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=list(tools) or openai.omit,
        temperature=0,
        max_tokens=options.pop("max_tokens", 200),
        **options,
    )
    return reply.choices[0]


def calls_of(choice) -> list[dict]:
    functions = [call.function for call in choice.message.tool_calls or ()]
    return [{"name": function.name, "arguments": json.loads(function.arguments)} for function in functions]


def test_tool_calls_have_the_right_names_and_arguments(client):
    """The evaluation finds 98.5 % of them right; of eight, one may be wrong."""
    right = 0
    for seed in range(8):
        example = tool_calls.tool_call(Random(30_000_000 + seed))
        choice = ask(client, example.messages[:-1], example.tools)
        right += choice.finish_reason == "tool_calls" and calls_of(choice) == example.expected["calls"]
    assert right >= 7


def test_streamed_calls_join_to_the_same(client):
    example = tool_calls.tool_call(Random(30_000_100))
    arguments = {"messages": example.messages[:-1], "tools": example.tools, "temperature": 0, "max_tokens": 200}
    whole = client.chat.completions.create(model=MODEL, **arguments).choices[0]
    names: list[str] = []
    parts: list[str] = []
    for chunk in client.chat.completions.create(model=MODEL, **arguments, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            if delta.id is not None:
                assert delta.index == len(names)
                names.append(delta.function.name)
                parts.append("")
            parts[delta.index] += delta.function.arguments
    streamed = [{"name": name, "arguments": json.loads(text)} for name, text in zip(names, parts, strict=True)]
    assert streamed == calls_of(whole) == example.expected["calls"]


def test_a_tool_round_trip_answers_from_the_result(client):
    tool = next(tool for tool in tool_calls.TOOLS if tool.name == "add_numbers")
    tools = tool_calls.draw_tools(Random(1), tool)
    request, expected = tool_calls.draw_request(Random(2), tool)
    messages = [{"role": "user", "content": request}]
    first = ask(client, messages, tools)
    assert calls_of(first) == [{"name": "add_numbers", "arguments": expected}]
    messages.append(first.message.model_dump(exclude_none=True))
    call_id = first.message.tool_calls[0].id
    messages.append({"role": "tool", "tool_call_id": call_id, "content": json.dumps({"result": 741})})
    second = ask(client, messages, tools)
    assert second.finish_reason == "stop" and "741" in second.message.content


def test_json_for_a_schema(client):
    valid = 0
    for seed in range(6):
        example = json_objects.json_object(Random(31_000_000 + seed))
        choice = ask(client, example.messages[:-1])
        valid += json_objects.matches_schema(choice.message.content, example.expected["schema"])
    assert valid >= 5


def test_a_fact_in_a_long_text_is_found_on_the_long_lane(stack):
    with openai.OpenAI(base_url=f"{stack.url}/long-context/v1", api_key="x", max_retries=0, timeout=110) as client:
        filler = haystack()
        for seed in range(3):
            example = needles.needle(Random(32_000_000 + seed), filler, LONG_TOKENS, 2, 1)
            reply = client.chat.completions.create(
                model=MODEL, messages=example.messages[:-1], temperature=0, max_tokens=100
            )
            assert reply.usage.prompt_tokens > LONG_TOKENS / 2
            assert example.expected["value"] in reply.choices[0].message.content
