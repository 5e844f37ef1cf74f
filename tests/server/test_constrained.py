"""Asked-for forms through the real server, the real engine and the checkpoint that comes with the project."""

import json
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel, Field

from config import EngineConfig
from engine import EngineClient
from tests.server.live import NAME, running
from tests.server.test_chat import ask, joined, message_of
from tests.server.test_grammar import EDIT, EMBEDDED, GET_TIME
from tests.server.test_streams import is_idle

# makes the model end its thoughts, however hot it runs
ENDS_THOUGHT = {"8191": 5}
EDITS = {
    "name": "edits",
    "parameters": {
        "type": "object",
        "properties": {
            "edits": {
                "type": "array",
                "items": {"type": "object", "properties": {"old": {"enum": ["a", "b"]}}, "additionalProperties": False},
                "maxItems": 2,
            },
            "is_dry": {"type": "boolean"},
        },
        "required": ["edits"],
    },
}
FUNCTIONS = [EDIT, EDITS, GET_TIME]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]


class Animal(BaseModel, extra="forbid"):
    kind: Literal["cat", "dog", "bird"]
    legs: int = Field(ge=0, le=99)
    is_tame: bool
    names: list[Literal["Ada", "Bo"]] = Field(max_length=3)
    note: str = Field(max_length=12)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    config = EngineConfig(model=str(EMBEDDED), device="cpu", max_model_len=2048, num_threads=1, num_drafts=3)
    engine = EngineClient(config)
    with running(EMBEDDED, [{"output": "unused"}], tmp_path_factory.mktemp("local"), engine=engine) as live:
        yield live


@pytest.mark.parametrize("thinks", [False, True])
def test_the_sdk_parses_a_schema_at_a_high_temperature(local, thinks):
    completion = local.openai.chat.completions.parse(
        model=NAME,
        messages=[{"role": "user", "content": "Tell me about the sea."}],
        response_format=Animal,
        temperature=1.5,
        n=2,
        seed=1,
        max_tokens=600,
        logit_bias=ENDS_THOUGHT,
        extra_body={"enable_thinking": thinks},
    )
    for choice in completion.choices:
        assert isinstance(choice.message.parsed, Animal)
        assert choice.finish_reason == "stop"
        assert bool(choice.message.reasoning_content if thinks else None) == thinks
    assert len({choice.message.content for choice in completion.choices}) > 1


def test_json_object_and_its_stream(local):
    fields = {
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": 200,
        "enable_thinking": False,
        "logprobs": True,
        "top_logprobs": 5,
    }
    question = "Answer as a JSON object with the keys name and age. The name is Ada. The age is 36."
    answer = local.post(ask(question, **fields)).json()
    choice = answer["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"name": "Ada", "age": 36}
    assert joined(local.stream(ask(question, **fields)))[0]["content"] == choice["message"]["content"]
    for entry in choice["logprobs"]["content"]:
        assert all(-9999 <= top["logprob"] <= 0 for top in (entry, *entry["top_logprobs"]))


def test_a_thought_that_takes_all_tokens_leaves_no_content(local):
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 4, "logit_bias": {"8191": -100}}
    choice = local.post(ask("Hello", **fields)).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")


def test_a_limit_closes_nothing(local):
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 50}}, "required": ["text"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    fields = {"response_format": response_format, "max_tokens": 8, "enable_thinking": False}
    choice = local.post(ask("Hello", **fields)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith("{") and not choice["message"]["content"].endswith("}")


def check_call(name: str, arguments: str) -> None:
    values = json.loads(arguments)
    needed = {"edit": {"path", "new"}, "edits": {"edits"}, "get_time": set()}[name]
    assert needed <= set(values)
    assert all(isinstance(values.get(key, ""), str) for key in ("path", "new"))


@pytest.mark.parametrize("thinks", [False, True])
def test_a_required_call(local, thinks):
    fields = {"tools": TOOLS, "tool_choice": "required", "temperature": 0.8, "max_tokens": 300, "n": 2}
    fields |= {"seed": 3, "enable_thinking": thinks, "logit_bias": ENDS_THOUGHT if thinks else None}
    answer = local.post(ask("Hello! How are you today?", **fields)).json()
    streamed = joined(local.stream(ask("Hello! How are you today?", **fields)))
    for choice in answer["choices"]:
        message = message_of(choice)
        assert (message["finish"], message["content"]) == ("tool_calls", "")
        for name, arguments in message["calls"]:
            check_call(name, arguments)
        made = streamed[choice["index"]]
        assert [(call["name"], call["arguments"]) for call in made["calls"]] == message["calls"]


def test_a_named_call_is_that_one_and_one_only(local):
    for name in ("get_time", "edits"):
        choice = {"type": "function", "function": {"name": name}}
        completion = local.openai.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=TOOLS,
            tool_choice=choice,
            temperature=0.6,
            seed=5,
            max_tokens=300,
            extra_body={"enable_thinking": False},
        )
        (call,) = completion.choices[0].message.tool_calls
        assert call.function.name == name
        check_call(name, call.function.arguments)


def test_a_call_with_free_text_can_be_required(local):
    note = {"type": "custom", "custom": {"name": "note", "description": "Keeps a text."}}
    for choice, tools in (({"type": "custom", "custom": {"name": "note"}}, [*TOOLS, note]), ("required", [note])):
        completion = local.openai.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Tell me about the sea."}],
            tools=tools,
            tool_choice=choice,
            temperature=0,
            max_tokens=100,
            extra_body={"enable_thinking": False},
        )
        (call,) = completion.choices[0].message.tool_calls
        assert (call.type, call.custom.name, completion.choices[0].message.content) == ("custom", "note", None)
        assert call.custom.input


def test_the_trained_call_comes_as_the_model_would_write_it(local):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": parameters}
    fields = {"tools": [{"type": "function", "function": function}], "temperature": 0, "enable_thinking": False}
    free = local.post(ask("What is the weather in Paris?", **fields)).json()["choices"][0]
    bound = local.post(ask("What is the weather in Paris?", tool_choice="required", **fields)).json()["choices"][0]
    assert message_of(bound) == message_of(free)
    assert message_of(bound)["calls"] == [("get_weather", '{"city": "Paris"}')]


def test_responses(local):
    common = {"model": NAME, "temperature": 0.8, "max_output_tokens": 600, "reasoning": {"effort": "none"}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": Animal.model_json_schema()}}
    answer = local.post({**common, "input": "Tell me about the sea.", "text": text}, "/v1/responses").json()
    assert Animal.model_validate_json(answer["output"][-1]["content"][0]["text"])
    assert answer["text"] == text
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    choice = {"type": "function", "name": "get_time"}
    body = {**common, "input": "Hello!", "tools": tools, "tool_choice": choice}
    answer = local.post(body, "/v1/responses").json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert (answer["output"][0]["name"], answer["tool_choice"]) == ("get_time", choice)


def test_messages(local):
    client = anthropic.Anthropic(base_url=local.url, api_key="any", max_retries=0)
    tools = [{"name": "get_time", "input_schema": {"type": "object", "properties": {}}}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_time"}):
        message = client.messages.create(
            model=NAME,
            max_tokens=300,
            messages=[{"role": "user", "content": "Hello!"}],
            tools=tools,
            tool_choice=choice | {"disable_parallel_tool_use": True},
        )
        assert message.stop_reason == "tool_use"
        assert [(block.type, block.name, block.input) for block in message.content] == [("tool_use", "get_time", {})]
    form = {"format": {"type": "json_schema", "schema": Animal.model_json_schema()}}
    body = {"model": NAME, "max_tokens": 600, "messages": [{"role": "user", "content": "Hello!"}], "temperature": 1}
    answer = local.post({**body, "output_config": form}, "/v1/messages").json()
    assert Animal.model_validate_json(answer["content"][0]["text"])
    client.close()


def test_an_engine_whose_constraints_were_left_is_idle(local):
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 900}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with local.http.stream(
        "POST",
        "/v1/chat/completions",
        json=ask("Count", stream=True, max_tokens=1900, enable_thinking=False, response_format=response_format),
    ) as answer:
        next(answer.iter_lines())
    local.wait_until(lambda: is_idle(local), 3.0)
    assert local.post(ask("hi", max_tokens=2)).status_code == 200


def test_a_budget_closes_the_thought(local):
    fields = {"max_tokens": 60, "temperature": 0.7, "seed": 2, "logit_bias": {"8191": -100}}
    for budget in (0, 9):
        answer = local.post(ask("Hello! How are you?", thinking_token_budget=budget, **fields)).json()
        message = answer["choices"][0]["message"]
        # the line end and the tag that close it are two tokens more
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 2
        assert bool(message.get("reasoning_content")) == bool(budget) and message["content"]
    body = {"model": NAME, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 200}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 3}}
    first, *rest = local.post(body, "/v1/messages").json()["content"]
    assert first["type"] == "thinking" and len(first["thinking"]) < 40
    assert [block["type"] for block in rest] == ["text"]
    endless = local.post(ask("hi", thinking_token_budget=10**30, max_tokens=2))
    assert endless.status_code == 200 and endless.json()["choices"][0]["finish_reason"] == "length"
    refused = local.post(ask("hi", thinking_token_budget=-1))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")
