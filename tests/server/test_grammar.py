"""Grammars of answers: what they let through, and that the reader of the output sees the same in it."""

import json
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from engine.constraint import Matcher, load_vocabulary
from engine.errors import SamplingError
from server.errors import BadRequestError, UnsupportedError
from server.grammar import (
    MAX_PARAMETERS,
    AnswerForm,
    ToolChoice,
    answer_form,
    callable_functions,
    response_schema,
    tool_choice,
)
from server.schema_shape import MAX_DEPTH
from tests.server.conftest import ROOT
from tests.server.raw import call, read

EMBEDDED = ROOT / "engine" / "embedded" / "checkpoint"
VOCAB_SIZE = 8192
END = 8168


def string(*names, required=()):
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(required)}


EDIT = {
    "name": "edit",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "old": {"type": ["string", "null"]},
            "new": {"type": "string"},
            "line": {"type": "integer"},
        },
        "required": ["path", "new"],
    },
}
EDITS = {
    "name": "edits",
    "parameters": {
        "$defs": {"edit": {"type": "object", "properties": {"old": {"type": "string"}}, "required": ["old"]}},
        "type": "object",
        "properties": {"edits": {"type": "array", "items": {"$ref": "#/$defs/edit"}}, "dry": {"type": "boolean"}},
        "required": ["edits"],
    },
}
GET_TIME = {"name": "get_time", "parameters": string()}
FUNCTIONS = [
    EDIT,
    EDITS,
    GET_TIME,
    {"name": "anything"},
    {"name": "six", "parameters": string(*"abcdef", required="be")},
]
THOUGHT = "hm, <tool_call>\n<function=edit> is how it is written\n</think>\n\n"


@cache
def vocabulary() -> LLTokenizer:
    return load_vocabulary(EMBEDDED, VOCAB_SIZE)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))


def matcher_of(form: AnswerForm, starts_in_thought: bool = False) -> LLMatcher:
    form.constraint(starts_in_thought)
    made = LLMatcher(vocabulary(), LLMatcher.grammar_from_lark(form.grammar(starts_in_thought)), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def lets_through(form: AnswerForm, text: str, starts_in_thought: bool = False) -> bool:
    matcher = matcher_of(form, starts_in_thought)
    token_ids = tokenizer().encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


CALLS = AnswerForm(None, FUNCTIONS, True, "tool_choice")
NASTY = 'a "q" {b} </parameter> c\n</parameter>\n</parameters> <function=x> </function>\n<a></tool_call> <tool_call> \n'


@pytest.mark.parametrize(
    "text",
    [
        call("edit", path="/a", new="x"),
        call("edit", new="x", path="/a"),
        call("edit", new="x", old="null", path="/a", line="12"),
        call("edit", line="12", path="/a", new=""),
        call("edit", path="/a", new=NASTY),
        call("edit", new=NASTY, path=NASTY),
        call("edit", path="/a", new="docs say </parameter> ends it"),
        call("edits", edits='[{"old": "a"}, {"old": "b", "more": 1}]', dry="true"),
        call("edits", edits="[]"),
        call("get_time"),
        call("anything"),
        call("anything", whatever="x", more='{"a": 1}'),
        call("six", b="1", e="2"),
        call("six", a="1", b="1", c="2", e="2", f="4"),
        call("get_time") + "\n" + call("six", b="1", e="2"),
    ],
)
def test_well_formed_calls(text):
    assert lets_through(CALLS, text)
    assert lets_through(CALLS, THOUGHT + text, starts_in_thought=True)
    seen = read(THOUGHT + text, tools=FUNCTIONS, starts_in_thought=True, calls_end_thought=False)
    assert (seen.finish, seen.content) == ("tool_calls", "")
    assert all(json.loads(arguments) is not None for _, arguments in seen.calls)


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "Hello " + call("get_time"),
        call("get_time") + " bye",
        call("nope"),
        call("edit", path="/a"),
        call("edit", path="/a", new="x", other="y"),
        call("edit", path="/a", new="x") + call("get_time"),
        call("edit", path="/a", new="x", line="12a"),
        call("edit", path="/a", new="x").replace("</function>", "<parameter=path>\nb\n</parameter>\n</function>"),
        call("edits", edits='[{"olds": "a"}]'),
        call("edits", edits='"[]"'),
        call("get_time", zone="x"),
        call("six", b="1"),
        call("six", e="1", b="2"),
        '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>',
        "",
        "<think>hm</think>" + call("get_time"),
    ],
)
def test_anything_else(text):
    assert not lets_through(CALLS, text)


def test_one_call_where_only_one_is_wanted():
    single = AnswerForm(None, FUNCTIONS, False, "tool_choice")
    assert lets_through(single, call("get_time"))
    assert not lets_through(single, call("get_time") + "\n" + call("get_time"))


def test_content_or_a_call():
    form = answer_form({"type": "object", "required": ["a"]}, [EDIT], ToolChoice())
    assert lets_through(form, '{"a": 1}')
    assert lets_through(form, THOUGHT + '{"a":\n  {"b": [1, 2.5e3, null, "é\\n"]}}', starts_in_thought=True)
    assert lets_through(form, call("edit", path="a", new="b"))
    for text in ("{}", "Sure: " + '{"a": 1}', '{"a": 1} ', '{"a": 1}' + call("edit", path="a", new="b"), '"a"'):
        assert not lets_through(form, text)


def test_a_client_s_schema_does_not_set_the_library_s_switches():
    lenient = {"not": {}, "x-guidance": {"lenient": True}}
    with pytest.raises(SamplingError, match='"not"'):
        AnswerForm(lenient, [], True, "response_format").constraint(False)


def test_a_tool_s_schema_is_followed_as_far_as_it_can_be():
    ids = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"ids": ids}, "required": ["ids"]}}
    form = AnswerForm(None, [tool], True, "tool_choice")
    assert lets_through(form, call("f", ids="[1, 1]"))
    assert not lets_through(form, call("f", ids='["1"]'))
    with pytest.raises(SamplingError, match="uniqueItems"):
        AnswerForm(None, [tool | {"strict": True}], True, "tool_choice").constraint(False)


def test_a_schema_that_is_a_reference():
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/c"}}}}}
    schema["$defs"]["c"] = {"type": "integer"}
    form = answer_form(schema, [], ToolChoice())
    assert lets_through(form, '{"b": 1}') and not lets_through(form, '{"b": "1"}')


PIECES = (*("</", "<", "parameter", ">", "=", "function", "\n", " ", "tool_call"), "</tool_call>", "<tool_call>", "a")
WAYS_OUT = (
    "\n</parameter>\n</function>\n</tool_call>",
    "\n</parameter>\n<parameter=",
    *(f"{name}>\n" for name in ("path", "new", "b", "e")),
    "12\n</parameter>\n</function>\n</tool_call>",
)


class Walk:
    """A text that a grammar lets through, token by token."""

    def __init__(self, rng: random.Random, matcher: LLMatcher) -> None:
        self._rng = rng
        self._matcher = matcher
        self._view = Matcher(matcher, VOCAB_SIZE, [END])
        self.token_ids: list[int] = []

    def run(self) -> bytes:
        """At random, mostly parts of tags; then the way out."""
        for _ in range(self._rng.randint(10, 120)):
            options = self._possible(PIECES) if self._rng.random() < 0.8 else []
            if not self._step(options or self._allowed()):
                break
        while not self._matcher.is_accepting():
            # none of the ways is open in the middle of a name, a number or a tag
            assert self._step(self._possible(WAYS_OUT) or self._allowed())
            assert len(self.token_ids) < 2000
        assert not self._view.has_failed
        return vocabulary().decode_bytes(self.token_ids)

    def _possible(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = [tokenizer().encode(text).ids for text in texts]
        return [ids for ids in encoded if self._matcher.validate_tokens(ids) == len(ids)]

    def _allowed(self) -> list[list[int]]:
        bits = np.unpackbits(self._view.mask(()).words.view(np.uint8), bitorder="little")
        return [[token_id] for token_id in bits.nonzero()[0].tolist() if token_id != END]

    def _step(self, options: Sequence[list[int]]) -> bool:
        if options:
            chosen = self._rng.choice(options)
            self._view.advance(chosen)
            self.token_ids += chosen
        return bool(options)


@pytest.mark.parametrize("seed", range(30))
def test_what_the_grammar_lets_through_reads_as_whole_calls(seed):
    form = AnswerForm(None, [EDIT, FUNCTIONS[4]], True, "tool_choice")
    raw = Walk(random.Random(seed), matcher_of(form)).run()
    seen = read(raw, tools=FUNCTIONS)
    assert (seen.finish, seen.content) == ("tool_calls", ""), raw
    assert seen == read(raw, range(len(raw)), tools=FUNCTIONS)
    needed = {"edit": {"path", "new"}, "six": {"b", "e"}}
    for name, arguments in seen.calls:
        pairs = json.loads(arguments, object_pairs_hook=list)
        names = [key for key, _ in pairs]
        assert needed[name] <= set(names) and len(set(names)) == len(names), raw
        assert all(isinstance(value, str) for key, value in pairs if key != "line")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "edit"}}, ToolChoice("required", "edit")),
        ({"type": "function", "name": "edit"}, ToolChoice("required", "edit")),
    ],
)
def test_choices(choice, expected):
    assert tool_choice(choice) == expected


@pytest.mark.parametrize("choice", ["sometimes", {"type": "web_search"}, {"type": "function"}, {}])
def test_choices_that_are_none(choice):
    with pytest.raises(BadRequestError):
        tool_choice(choice)


def test_what_a_choice_leaves():
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    assert callable_functions(tools, ToolChoice()) == FUNCTIONS
    assert callable_functions(tools, ToolChoice("none")) == []
    assert callable_functions(tools, ToolChoice("required", "six")) == FUNCTIONS[4:]
    for choice in (ToolChoice("required"), ToolChoice("required", "six")):
        with pytest.raises(BadRequestError):
            callable_functions([], choice)
    with pytest.raises(UnsupportedError, match="'<a>'"):
        AnswerForm(None, [{"name": "f", "parameters": string("<a>", required=["<a>"])}], True, "t").constraint(False)


def test_schemas_where_the_apis_put_them():
    schema = {"type": "object"}
    assert response_schema(None, "x") is None
    assert response_schema({"type": "text"}, "x") is None
    assert response_schema({"type": "json_object"}, "x") == schema
    assert response_schema({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, "x") == schema
    assert response_schema({"type": "json_schema", "name": "a", "schema": schema}, "x") == schema
    for wrong in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": []}, {"type": "grammar"}):
        with pytest.raises(BadRequestError):
            response_schema(wrong, "x")


def parameters(**root) -> list:
    return [{"name": "f", "parameters": {"type": "object", **root}}]


@pytest.mark.parametrize(
    ("root", "field"),
    [
        ({"required": 5}, "parameters.required"),
        ({"required": True}, "parameters.required"),
        ({"required": [["a"]]}, "parameters.required"),
        ({"properties": []}, "parameters.properties"),
        ({"properties": "ab"}, "parameters.properties"),
        ({"properties": {"a": 5}}, "parameters.properties.a"),
        ({"properties": {"a": None}}, "parameters.properties.a"),
        ({"properties": {"a": {"type": {}}}}, "parameters.properties.a.type"),
        ({"properties": {"a": {"enum": 5}}}, "parameters.properties.a.enum"),
        ({"properties": {"a": {"items": "string"}}}, "parameters.properties.a.items"),
        ({"properties": {"a": {"anyOf": {}}}}, "parameters.properties.a.anyOf"),
        ({"properties": {"a": {"anyOf": [1]}}}, "parameters.properties.a.anyOf[0]"),
        ({"properties": {"a": {"type": "array", "items": {"required": 1}}}}, "parameters.properties.a.items.required"),
        ({"$defs": 1}, "parameters.$defs"),
    ],
)
def test_a_schema_that_is_none_is_refused_by_tool_and_field(root, field):
    with pytest.raises(BadRequestError) as caught:
        answer_form(None, parameters(**root), ToolChoice("required"))
    assert caught.value.message.startswith(f"tools: 'f': {field} is no ")
    assert caught.value.param == "tools"
    # nobody reads it where nothing is asked for
    assert answer_form(None, parameters(**root), ToolChoice()) is None


def test_a_schema_of_very_many_levels_is_refused():
    schema = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadRequestError, match=f"nested deeper than {MAX_DEPTH} levels") as caught:
        answer_form(None, parameters(properties={"a": schema}), ToolChoice("required"))
    assert caught.value.param == "tools"


def optional(count: int) -> list:
    return parameters(properties={f"p{index}": {"type": "string"} for index in range(count)}, required=["p3"])


def test_a_grammar_grows_with_its_parameters_and_no_faster():
    small, large = (
        len(answer_form(None, optional(count), ToolChoice("required")).grammar(False)) for count in (64, MAX_PARAMETERS)
    )
    assert large / small < 1.2 * MAX_PARAMETERS / 64


def test_the_most_parameters_work():
    form = answer_form(None, optional(MAX_PARAMETERS), ToolChoice("required"))
    last = f"p{MAX_PARAMETERS - 1}"
    assert lets_through(form, call("f", p0="1", p3="2", **{last: "3"}))
    assert lets_through(form, call("f", p3="2"))
    assert not lets_through(form, call("f", p4="2", **{last: "3"}))
    assert not lets_through(form, call("f", p3="2", p0="1"))
    assert lets_through(form, call("f", **{f"p{index}": "x" for index in range(MAX_PARAMETERS)}))


def test_more_parameters_are_refused_in_words():
    half = optional(MAX_PARAMETERS // 2 + 1)
    with pytest.raises(BadRequestError, match=f"may have {MAX_PARAMETERS}") as caught:
        answer_form(None, [*half, *half], ToolChoice("required"))
    assert caught.value.param == "tools"
