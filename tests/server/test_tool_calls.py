"""Tool calls of the family's XML form; each case is one that somebody met."""

import json

import pytest

from tests.server.raw import TOOLS, call, read


def reads(raw: str, **options):
    """Whole and cut at every byte: both must agree."""
    options = {"tools": TOOLS, **options}
    whole = read(raw, (), **options)
    assert read(raw, range(len(raw.encode())), **options) == whole
    return whole


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("\n    if x:\n\n", "    if x:\n"),
        ("\n", ""),
        ("\n\n", ""),
        ("\n\n\n", "\n"),
        ("", ""),
        ("inline", "inline"),
        ("\n  \u00a0 padded \u3000\t\n", "  \u00a0 padded \u3000\t"),
        ("\n\r\nwindows\r\n", "\r\nwindows\r"),
    ],
)
def test_exactly_one_line_end_goes_at_each_end(value, expected):
    raw = f"<tool_call>\n<function=edit>\n<parameter=old>{value}</parameter>\n</function>\n</tool_call>"
    assert reads(raw).arguments() == {"old": expected}


@pytest.mark.parametrize(
    "value",
    [
        "docs say </parameter> ends it",
        "and </tool_call> too",
        "</function> alone",
        "</parameter>\n</param",
        "<parameter=old>\nnested opening",
        "</parameter >",
        "</function>\n</tool_call>\nthen more text",
        "x </parameter>\n\n  but prose",
        "first </tool_call>\n<tool_call> in words",
    ],
)
def test_a_closer_that_nothing_may_follow_is_data(value):
    result = reads(call(old=value, new="kept"))
    assert result.arguments() == {"old": value, "new": "kept"}
    assert result.finish == "tool_calls"


@pytest.mark.parametrize(
    "value", ['"/srv/a"', "a &lt;b&gt; &amp; c", "00123", "true", "null", "140.0", '{"a": 1}', "12"]
)
def test_strings_are_never_interpreted(value):
    assert reads(call(old=value)).arguments() == {"old": value}


def test_a_path_with_quotes_cut_after_its_line_end():
    raw = call(path='"/srv/a"')
    at = raw.index('"/srv')
    assert read(raw, [at], tools=TOOLS).arguments() == {"path": '"/srv/a"'}


@pytest.mark.parametrize(
    ("parameter", "text", "expected"),
    [
        ("line", "12", 12),
        ("line", "140.0", 140),
        ("line", "-3", -3),
        ("line", "1e3", 1000),
        ("line", "007", 7),
        ("line", "12345678901234567890123", 12345678901234567890123),
        ("line", "a few", "a few"),
        ("line", "1.5", "1.5"),
        ("line", "", ""),
        ("line", "1_000", "1_000"),
        ("ratio", "1.50", 1.5),
        ("ratio", ".5", ".5"),
        ("ratio", "5.", 5.0),
        ("ratio", "NaN", "NaN"),
        ("ratio", "1e999", "1e999"),
        ("recursive", "True", True),
        ("recursive", "false", False),
        ("recursive", "yes", "yes"),
        ("limit", "None", None),
        ("limit", "null", None),
        ("limit", "7", 7),
        ("mode", "fast", "fast"),
        ("edits", '[{"old":"a","new":"b"}]', [{"old": "a", "new": "b"}]),
        ("edits", "[{'old': 'a', 'new': None}]", [{"old": "a", "new": None}]),
        ("edits", '[{"old":"a"', '[{"old":"a"'),
        ("edits", '{"not": "a list"}', '{"not": "a list"}'),
        ("edits", "[" * 5000, "[" * 5000),
        ("options", "{'a': 1, 'b': True}", {"a": 1, "b": True}),
        ("options", '{"a": NaN}', '{"a": NaN}'),
        ("options", "__import__('os').getcwd()", "__import__('os').getcwd()"),
        ("place", '{"x": 1}', {"x": 1}),
        ("unheard_of", "12", "12"),
    ],
)
def test_values_take_their_declared_type_or_stay_text(parameter, text, expected):
    raw = call("edit", **{parameter: text})
    result = read(raw, range(0, len(raw), 7), tools=TOOLS)
    assert result == read(raw, (), tools=TOOLS)
    assert result.arguments() == {parameter: expected}
    assert type(result.arguments()[parameter]) is type(expected)


def test_prose_then_a_call():
    result = reads("I'll check.\n" + call(path="/a"))
    assert result.content == "I'll check."
    assert result.arguments() == {"path": "/a"}


def test_white_space_around_calls_is_no_content():
    result = reads("\n\n" + call("get_time") + "\n\n" + call("get_time") + "\n")
    assert result.content == ""
    assert [name for name, _ in result.calls] == ["get_time", "get_time"]
    assert result.calls[0][1] == "{}"


def test_text_after_a_call_is_content():
    assert reads(call("get_time") + "\nDone.").content == "Done."


def test_without_tools_every_output_is_text():
    raw = "like this:\n" + call("get_time") + "\nclear?"
    result = reads(raw, tools=None)
    assert result.content == raw
    assert result.calls == []
    assert result.finish == "stop"


@pytest.mark.parametrize("name", ["rm_rf", "", "edit extra", "Edit"])
def test_undeclared_names_are_text(name):
    raw = call(name, path="/")
    result = reads(raw)
    assert (result.content, result.calls) == (raw, [])


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_the_length_limit_leaves_arguments_open_and_says_so(reason):
    raw = call(path="/a", old="half a val")[: -len("ue\n</parameter>\n</function>\n</tool_call>")]
    result = reads(raw, reason=reason)
    assert result.calls[0][1].startswith('{"path": "/a", "old": "half a ')
    if reason == "length":
        assert result.finish == "length"
        with pytest.raises(ValueError, match="Unterminated string"):
            result.arguments()
    else:
        assert result.finish == "tool_calls"
        assert result.arguments()["path"] == "/a"


def test_a_limit_in_a_number_keeps_what_came():
    raw = "<tool_call>\n<function=edit>\n<parameter=line>\n14"
    assert reads(raw, reason="length").calls == [("edit", '{"line": 14')]
    assert reads(raw, reason="stop").arguments() == {"line": 14}


def test_a_limit_after_a_whole_call_is_a_limit():
    assert reads(call("get_time") + " and", reason="length").finish == "length"


@pytest.mark.parametrize(
    "raw",
    [
        "<tool_call><function=edit><parameter=path>/a</parameter></function></tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</function>\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</tool_call>",
        "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</parameter>\n</function>",
        "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</parameter>",
        "<tool_call>\n<function=edit>\n<parameter=path>\n/a",
        "<function=edit>\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>",
        "<function=edit>\n<parameter=path>\n/a\n</parameter>\n</function>",
        '<tool_call>\n{"name": "edit", "arguments": {"path": "/a"}}\n</tool_call>',
        '<tool_call>\n{"name": "edit", "arguments": {"path": "/a"}}',
        "<tool_call>\n<function=edit>\nnoise\n<parameter=path>\n/a\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_drifted_forms_are_recovered(raw):
    result = reads(raw)
    assert [name for name, _ in result.calls] == ["edit"]
    assert result.arguments() == {"path": "/a"}
    assert result.content == ""
    assert result.finish == "tool_calls"


def test_a_missing_closer_between_two_calls():
    raw = "<tool_call>\n<function=edit>\n<parameter=path>\n/a\n</function>\n</tool_call>\n" + call("get_time")
    result = reads(raw)
    assert [name for name, _ in result.calls] == ["edit", "get_time"]
    assert result.arguments() == {"path": "/a"}


def test_two_functions_in_one_frame():
    raw = "<tool_call>\n<function=get_time>\n</function>\n<function=edit>\n</function>\n</tool_call>"
    assert [name for name, _ in reads(raw).calls] == ["get_time", "edit"]


def test_a_function_in_running_prose_is_prose():
    raw = "write <function=edit>\n<parameter=path>\n/a\n</parameter>\n</function> to edit"
    assert reads(raw).content == raw


def test_json_of_no_declared_tool_is_text():
    raw = '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call> and so on'
    assert reads(raw).content == raw


def test_one_call_only_when_parallel_calls_are_off():
    result = reads(call("get_time") + call("get_time") + "more", is_parallel=False)
    assert (len(result.calls), result.content, result.finish) == (1, "", "tool_calls")


def test_a_long_string_streams_while_it_is_written():
    from server.tool_calls import CallArguments, ToolCallParser
    from server.tool_schema import ToolSchemas

    parser = ToolCallParser(ToolSchemas(TOOLS))
    parser.push("<tool_call>\n<function=edit>\n<parameter=new>\n")
    longest_wait = wait = 0
    for number in range(4000):
        line = f"line {number} </p <b>\n"
        wait = 0 if any(isinstance(event, CallArguments) for event in parser.push(line)) else wait + len(line)
        longest_wait = max(longest_wait, wait)
    assert longest_wait == 0


def test_arguments_are_always_json_when_the_output_ended_by_itself():
    for raw in (call(old='"\\\n\t\x00\x7f'), call(edits="{"), call(edits='"', line='"', options="'")):
        assert isinstance(json.loads(reads(raw).calls[0][1]), dict)


CALL_FORMS = {
    "xml": call(path="/a", line="21", old="txto"),
    "bare": call(path="/a", line="21", old="txto").removeprefix("<tool_call>\n"),
    "json": '<tool_call>\n{"name": "edit", "arguments": {"path": "/a", "line": 21, "dry": true}}\n</tool_call>',
}


@pytest.mark.parametrize("form", CALL_FORMS)
@pytest.mark.parametrize("before", ["", "I'll check.\n"])
def test_a_limit_anywhere_in_a_call_leaks_no_markup(form, before):
    raw = before + CALL_FORMS[form]
    for end in range(len(before), len(raw)):
        result = reads(raw[:end], reason="length")
        assert result.content.rstrip() == before.rstrip(), raw[:end]
        assert result.finish == "length"
        written = "".join(arguments for _, arguments in result.calls)
        assert "<" not in written, raw[:end]
        assert not written or written.startswith('{"path": "')


@pytest.mark.parametrize(
    "text", ["a <", "see <tool_call>", "x\n<function=ed", "<tool_call>\n<function=edit", "a </too"]
)
def test_what_only_looks_like_the_beginning_of_a_call_is_content(text):
    assert reads(text, reason="stop").content == text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "other", "arguments": {}}',
        "the form is <tool_call>{...} with JSON in it, as everybody",
        "an undeclared <tool_call>\n<function=rm>\n<parameter=a>\n1",
        "a < b and c",
    ],
)
def test_a_limit_behind_what_is_no_call_keeps_it(text):
    assert reads(text, reason="length").content == text


@pytest.mark.parametrize(("value", "expected"), [("txto\n</", "txto"), ("a </b", "a </b"), ("a\n</parameter> b", None)])
def test_a_half_closer_at_the_limit_is_no_part_of_the_value(value, expected):
    raw = "<tool_call>\n<function=edit>\n<parameter=old>\n" + value
    written = json.dumps(expected or value)[:-1]
    assert reads(raw, reason="length").calls == [("edit", '{"old": ' + written)]
    assert reads(raw, reason="stop").arguments() == {"old": value}
