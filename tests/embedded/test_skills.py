"""Every generated item really has the answer that it claims."""

import json
from random import Random

import pytest

from engine.embedded.skills import json_objects, lists, needles, small_talk, tool_calls
from engine.embedded.skills.example import load_template, prompt_text, training_text

HAYSTACK = needles.Haystack(
    ["It rained. The road was long. Nobody spoke.", "A second paragraph of filler. It ends."], [12, 9]
)
ROUNDS = 200


def final_reply(text: str) -> str:
    return text.rpartition("<|im_start|>assistant\n")[2].partition("</think>\n\n")[2].removesuffix("<|im_end|>")


def draw_examples(rng: Random):
    yield needles.needle(rng, HAYSTACK, 300, 4, 2)
    yield needles.records(rng, 8, 3)
    yield needles.told_before(rng, small_talk.talk_pairs())
    yield lists.draw_list_skill(rng, HAYSTACK.paragraphs)
    yield json_objects.json_object(rng)
    yield tool_calls.tool_call(rng)
    yield tool_calls.tool_answer(rng)
    yield tool_calls.plain_answer_with_tools(rng, small_talk.talk_pairs()[0])
    yield small_talk.small_talk(rng)


def test_the_prompt_begins_what_is_trained_on():
    render, rng = load_template(), Random(1)
    for _ in range(ROUNDS // 4):
        for example in draw_examples(rng):
            text = training_text(example, render)
            assert text.startswith(prompt_text(example, render))
            assert text.endswith("<|im_end|>")


def test_needle_answers_stand_in_the_text_once():
    rng = Random(2)
    for _ in range(ROUNDS):
        facts = needles.draw_facts(rng, 5)
        assert len({fact.question for fact in facts}) == 5
        text = HAYSTACK.text(rng, 400, [fact.statement for fact in facts])
        assert all(text.count(fact.statement) == 1 for fact in facts)
        assert all(fact.value in fact.answer for fact in facts)


def test_record_answers_belong_to_the_asked_key():
    rng = Random(3)
    for _ in range(ROUNDS):
        example = needles.records(rng, 20, 1)
        question, value = example.messages[-2]["content"], example.expected["value"]
        key = question.partition("the value for ")[2].partition("?")[0]
        text = example.messages[0]["content"]
        assert any(line.startswith(key) and line.endswith(value) for line in text.split("\n"))


@pytest.mark.parametrize("maker", [lists.count_items, lists.count_word, lists.small_sum])
def test_counted_values_are_in_the_answer(maker):
    rng = Random(4)
    for _ in range(ROUNDS):
        example = maker(rng)
        assert example.expected["value"] in example.messages[-1]["content"]


def test_count_by_hand():
    rng = Random(5)
    for _ in range(ROUNDS):
        example = lists.count_items(rng)
        items = example.messages[-2]["content"].count(",") + 1
        assert str(items) == example.expected["value"]


def test_sorted_lists_are_sorted_and_complete():
    rng = Random(6)
    for _ in range(ROUNDS):
        example = lists.sort_words(rng)
        answer = example.expected["answer"].split(", ")
        assert answer == sorted(answer)
        assert sorted(answer) == sorted(example.messages[-2]["content"].partition(": ")[2].split(", "))


def test_json_answers_fit_their_schema():
    rng = Random(7)
    for _ in range(ROUNDS):
        example = json_objects.json_object(rng)
        assert json_objects.matches_schema(example.expected["answer"], example.expected["schema"])


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"age": 3, "name": "Ann"}', True),
        ('{"age": 3}', False),
        ('{"age": "3", "name": "Ann"}', False),
        ('{"age": true, "name": "Ann"}', False),
        ('{"age": 3, "name": "Bob"}', False),
        ('{"age": 3, "name": "Ann", "more": 1}', False),
        ('{"age": 3, "name": "Ann"', False),
        ("[1]", False),
    ],
)
def test_schema_check_by_hand(text, fits):
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "name": {"type": "string", "enum": ["Ann"]}},
        "required": ["age", "name"],
        "additionalProperties": False,
    }
    assert json_objects.matches_schema(text, schema) is fits


def test_rendered_calls_parse_to_the_expected_calls():
    render, rng = load_template(), Random(8)
    for _ in range(ROUNDS):
        example = tool_calls.tool_call(rng)
        reply = final_reply(training_text(example, render))
        assert tool_calls.parse_calls(reply, example.tools) == example.expected["calls"]


def test_call_parser_by_hand():
    tools = [tool_calls.TOOLS[2].definition(), tool_calls.TOOLS[4].definition()]
    parameters = "<parameter=a>\n1\n</parameter>\n<parameter=b>\n22\n</parameter>\n"
    call = f"<tool_call>\n<function=add_numbers>\n{parameters}</function>\n</tool_call>"
    expected = {"name": "add_numbers", "arguments": {"a": 1, "b": 22}}
    assert tool_calls.parse_calls(call, tools) == [expected]
    assert tool_calls.parse_calls(f"{call}\n{call}", tools) == [expected, expected]
    assert tool_calls.parse_calls(f"{call} and more", tools) is None
    assert tool_calls.parse_calls(call.replace("add_numbers", "unknown"), tools) is None
    assert tool_calls.parse_calls(call.replace("</function>\n", ""), tools) is None
    assert tool_calls.parse_calls("Hello!", tools) is None


def test_tool_answers_come_from_the_result():
    rng = Random(9)
    for _ in range(ROUNDS):
        example = tool_calls.tool_answer(rng)
        result = json.loads(example.messages[-2]["content"])
        assert result.get("status") == "sent" or any(
            str(value) in example.expected["answer"] for value in result.values()
        )
