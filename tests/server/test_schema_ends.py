"""Schemas that ask for more of themselves for ever, and those that only seem to."""

import time

import pytest

from server.errors import BadRequestError
from server.schema_ends import check_ends
from tests.server.test_chat import ask
from tests.server.test_errors import refusal


def node(required: list, **properties) -> dict:
    return {"type": "object", "properties": properties, "required": required}


SELF = {"$ref": "#"}
A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
TREE = {"$ref": "#/$defs/tree"}
ENDLESS = [
    SELF,
    {"allOf": [SELF]},
    {"anyOf": [SELF, SELF]},
    node(["next"], next=SELF),
    node(["next"], next={"anyOf": [SELF, {"allOf": [SELF]}]}),
    {"type": "array", "items": SELF, "minItems": 1},
    {"type": "array", "prefixItems": [{}, SELF], "minItems": 2},
    {**node(["x"]), "additionalProperties": SELF},
    {"type": ["object", "array"], "required": ["a"], "properties": {"a": SELF}, "items": SELF, "minItems": 3},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": node(["b"], b={"$ref": "#/$defs/b"}), "b": node(["a"], a={"$ref": "#/$defs/a"})},
    },
    {**TREE, "$defs": {"tree": {"oneOf": [TREE, node(["left", "right"], left=TREE, right={"type": "null"})]}}},
]
ENDING = [
    True,
    {},
    {"type": "object"},
    node([], next=SELF),
    node(["next"], next={"anyOf": [{"type": "null"}, SELF]}),
    node(["next"], next={"type": ["object", "null"], "required": ["next"], "properties": {"next": SELF}}),
    node(["children"], children={"type": "array", "items": SELF}),
    {"type": "array", "items": SELF},
    {"type": "array", "prefixItems": [{}], "items": SELF, "minItems": 1},
    {"enum": [1], "items": SELF},
    {**TREE, "$defs": {"tree": {"oneOf": [node(["left"], left=TREE), {"$ref": "#/$defs/leaf"}]}, "leaf": {"const": 1}}},
    # told in another way
    {"$ref": "#/$defs/nothing"},
]


@pytest.mark.parametrize("schema", ENDLESS)
def test_endless(schema):
    with pytest.raises(BadRequestError, match="ever ends") as caught:
        check_ends(schema, "response_format", "response_format")
    assert caught.value.param == "response_format"


def test_no_text_at_all_is_told_as_that():
    with pytest.raises(BadRequestError, match="`false` allows no JSON text"):
        check_ends(False, "response_format", "response_format")
    with pytest.raises(BadRequestError, match="`false` forbids"):
        check_ends({"type": "object", "required": ["a"], "properties": {"a": False}}, "x", "x")


@pytest.mark.parametrize("schema", ENDING)
def test_ending(schema):
    check_ends(schema, "response_format", "response_format")


def test_the_end_may_be_found_after_the_question():
    """The first answer about b is given inside of a, before a is known to end."""
    a = {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}
    b = node(["a"], a={"$ref": "#/$defs/a"})
    check_ends(
        {"$defs": {"a": a, "b": b}, **node(["a", "b"], a={"$ref": "#/$defs/a"}, b={"$ref": "#/$defs/b"})}, "x", "x"
    )


@pytest.mark.parametrize("is_deep", [False, True])
def test_long_chains_take_no_time(is_deep):
    names = [f"n{index}" for index in range(2000)]
    definitions = {
        name: node(["x"], x={"$ref": f"#/$defs/{names[index + 1]}"}) for index, name in enumerate(names[:-1])
    }
    definitions[names[-1]] = {"type": "null"}
    # deeper than the interpreter's stack would allow, if each were asked inside the one before
    first = 0 if is_deep else 1980
    started = time.monotonic()
    check_ends({"$ref": f"#/$defs/{names[first]}", "$defs": definitions}, "x", "x")
    assert time.monotonic() - started < 1


UNSATISFIABLE = [
    False,
    {"enum": []},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    node(["a"], a={"type": "integer", "minimum": 5, "maximum": 3}),
    node(["next"], next=SELF),
    {"type": "array", "items": SELF, "minItems": 1},
]


@pytest.mark.parametrize("schema", UNSATISFIABLE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_produce_nothing_is_refused_by_name(live, schema, stream):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refusal(live.post(ask("hi", response_format=wanted, stream=stream)))
    assert error["param"] == "response_format"
    assert "schema" in error["message"].lower()


def test_of_a_tool_that_has_to_be_called(live):
    tool = {"type": "function", "function": {"name": "grow", "parameters": node(["next"], next=SELF)}}
    error = refusal(live.post(ask("hi", tools=[tool], tool_choice="required")))
    assert (error["param"], "'grow'" in error["message"]) == ("tools", True)
    # where nothing is enforced there is nothing to refuse
    assert live.post(ask("hi", tools=[tool])).status_code == 200
