"""Prompts that end inside the last message, or behind it."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from server.errors import BadRequestError
from tests.server.live import NAME, running
from tests.server.test_chat import TOOLS, ask, joined, message_of
from tests.server.test_prompt import CONVERSATION, build, family, generation, messages, oracle, spell  # noqa: F401

USER = {"role": "user", "content": "Count to three."}
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}


def assistant(content: str | list | None = None, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


@pytest.mark.parametrize("content", ["One, two", "One <b>", "end", "im_end", "a </think> b", "x" * 40_000])
def test_content_goes_on_where_the_reference_lets_it(build, oracle, family, content):  # noqa: F811
    turns = [*CONVERSATION[:-1], assistant(content, reasoning_content="count")]
    reference, _ = render_jinja_template(
        conversations=[turns], chat_template=family.template, continue_final_message=True, add_generation_prompt=False
    )
    prompt = build(turns, ending="last message")
    if "</think>" not in content:
        assert list(prompt.token_ids) == oracle.encode(reference[0], add_special_tokens=False).ids
    assert (prompt.starts_in_thought, prompt.starts_in_content) == (False, True)


def test_spaces_at_the_end_stay(build, spell):  # noqa: F811
    assert spell(build([USER, assistant("One,\n\n ")], ending="last message")).endswith("</think>\n\nOne,\n\n ")
    prompt = build([USER, assistant("", reasoning_content="They want \n")], ending="last message")
    assert spell(prompt).endswith("<|im_start|>assistant\n<think>\nThey want \n")
    assert (prompt.starts_in_thought, prompt.starts_in_content) == (True, False)


def test_parts_are_one_content(build, spell):  # noqa: F811
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": ", two"}]
    assert spell(build([USER, assistant(parts)], ending="last message")).endswith("\n\nOne, two")


def test_a_prompt_may_end_behind_its_messages(build, spell):  # noqa: F811
    assert spell(build([USER], ending="messages")).endswith("Count to three.<|im_end|>\n")


@pytest.mark.parametrize(
    ("turn", "tools", "options", "word"),
    [
        (USER, (), {}, "role user"),
        (assistant("x", tool_calls=[{"function": {"name": "edit", "arguments": "{}"}}]), TOOLS, {}, "tool calls"),
        (assistant("<think>\nI should"), (), {}, "reasoning_content"),
        (assistant("I'll look.\n<tool_call>\n<function=edit>"), TOOLS, {}, "inside a tool call"),
        (assistant(""), (), {}, "empty"),
        (assistant("", reasoning_content="They"), (), {"enable_thinking": False}, "enable_thinking"),
    ],
)
def test_what_cannot_go_on(build, turn, tools, options, word):  # noqa: F811
    with pytest.raises(BadRequestError, match=word) as caught:
        build([USER, turn], tools, ending="last message", **options)
    assert caught.value.param == "continue_final_message"


SCRIPT = [
    {"when": "twice", "output": ", three <think>four</think>"},
    {"when": "think on", "output": " to count.\n</think>\n\nOne"},
    {"when": "call on", "output": "\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"},
]


@pytest.fixture(scope="module")
def counting(checkpoint, tmp_path_factory):
    with running(checkpoint, SCRIPT, tmp_path_factory.mktemp("continued")) as live:
        yield live


@pytest.mark.parametrize(
    ("text", "turn", "fields", "expected"),
    [
        ("twice", assistant("One, two"), {}, {"content": ", three <think>four</think>", "finish": "stop"}),
        ("twice", assistant("One", reasoning_content="hm"), {"stop": " <"}, {"content": ", three"}),
        ("think on", assistant("", reasoning_content="They want"), {}, {"reasoning": " to count.", "content": "One"}),
        ("call on", assistant("I look."), {"tools": TOOLS}, {"calls": [("get_time", "{}")], "finish": "tool_calls"}),
    ],
)
def test_only_what_is_new_is_answered_streamed_as_whole(counting, text, turn, fields, expected):
    body = ask(text, **CONTINUED, **fields)
    body["messages"].append(turn)
    whole = counting.post(body)
    assert whole.status_code == 200, whole.text
    message = message_of(whole.json()["choices"][0])
    assert {key: message[key] for key in expected} == expected
    made = joined(counting.stream(body))[0]
    assert (made["content"], made["reasoning"], made["finishes"]) == (
        message["content"],
        message["reasoning"],
        [message["finish"]],
    )


@pytest.mark.parametrize(
    ("turn", "fields", "word"),
    [
        (assistant("x"), {"add_generation_prompt": True}, "add_generation_prompt"),
        (assistant('{"a": '), {"response_format": {"type": "json_object"}}, "response_format"),
        (assistant("x"), {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        (USER, {}, "role user"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_contradictions_are_told_before_any_header(counting, turn, fields, word, stream):
    body = {"model": NAME, "messages": [USER, turn], "continue_final_message": True, "stream": stream, **fields}
    error = counting.post(body)
    assert error.status_code == 400, error.text
    assert error.json()["error"]["param"] == "continue_final_message"
    assert word in error.json()["error"]["message"]


def test_a_form_may_follow_a_thought_that_goes_on(counting):
    body = ask("think on", **CONTINUED, response_format={"type": "json_object"})
    body["messages"].append(assistant("", reasoning_content="They want"))
    assert counting.post(body).status_code == 200


def test_tokenize_counts_the_same_prompt(counting):
    body = ask("twice", **CONTINUED, return_token_strs=True)
    body["messages"].append(assistant("One, two"))
    assert "".join(counting.post(body, "/tokenize").json()["token_strs"]).endswith("\n\nOne, two")
    usage = counting.post({**body, "max_tokens": 1}).json()["usage"]
    assert counting.post(body, "/tokenize").json()["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize("content", ["One, two", [{"type": "text", "text": "One,"}, {"type": "text", "text": " two"}]])
def test_messages_go_on_from_a_last_message_of_the_assistant(counting, content):
    body = {"model": NAME, "max_tokens": 50, "messages": [{"role": "user", "content": "twice"}, assistant(content)]}
    answer = counting.post(body, "/v1/messages").json()
    assert answer["content"] == [{"type": "text", "text": ", three <think>four</think>"}]
    count = counting.post(body, "/v1/messages/count_tokens").json()["input_tokens"]
    assert count == answer["usage"]["input_tokens"] == counting.post(body | CONTINUED, "/tokenize").json()["count"]


def test_messages_begin_anew_where_a_thought_comes_first_or_calls_end_the_last(counting):
    def count(turn, **fields):
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "twice"}, turn, *fields.pop("then", [])],
            **fields,
        }
        return counting.post(body, "/v1/messages/count_tokens").json()["input_tokens"]

    call = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": ""}]}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert count(assistant("x"), thinking=thinking) > count(assistant("x"))
    assert count(assistant([{"type": "text", "text": "x"}, call]), then=[result]) > count(assistant([call])) > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
    ],
)
def test_messages_cannot_begin_and_ask_for_a_form(counting, fields):
    body = {
        "model": NAME,
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "twice"}, assistant("{")],
        **fields,
    }
    error = counting.post(body, "/v1/messages")
    assert error.status_code == 400 and "cannot go on" in error.json()["error"]["message"]
