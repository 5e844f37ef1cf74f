"""One property over the whole text pipeline: however the tokens are cut, the joined answer is the same."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.raw import FREEFORM, TOOLS, call, read, read_tokens, rules

ALL_TOOLS = [*TOOLS, FREEFORM]

GOLDEN = {
    "plain": "Hello, world",
    "thought": "first\nsecond\n</think>\n\nanswer",
    "thought only": "never ends",
    "call": "why\n</think>\n\nI'll look.\n" + call(path="/srv/a", line="12"),
    "two calls": "</think>" + call("get_time") + "\n" + call(old="\n    if x:\n", new=""),
    "call in thought": "let me " + call("get_time") + " done",
    "undeclared": "see </think>" + call("rm_rf", path="/"),
    "closer in value": "</think>" + call(old="docs say </parameter> ends it", new="a </tool_call> b"),
    "missing closers": "</think><tool_call><function=edit><parameter=path>/a</parameter></tool_call> rest",
    "no closers": "</think><tool_call>\n<function=edit>\n<parameter=old>\nabc\n</function>\n</tool_call>",
    "bare function": "</think>\n\n<function=edit>\n<parameter=path>\n/a\n</parameter>\n</function>",
    "json form": '</think><tool_call>\n{"name": "edit", "arguments": {"path": "</tool_call>"}}\n</tool_call>\nok',
    "json of nobody": '</think><tool_call>{"name": "other", "arguments": {}}</tool_call>',
    "astral": "🧑‍🚀 日本\n</think>\n\n日本 🧑‍🚀" + call(old='日本 \u2028 🧑‍🚀 "quoted" \\ \x85'),
    "objects": "</think>" + call(edits='[{"old":"a","new":"b"}]', options="{'a': True}", limit="None", ratio="1e3"),
    "broken object": "</think>" + call(edits='[{"old":"a"', place="{"),
    "stop inside": "a STOP b</think>one STOP two",
    "half opening": "</think>text <tool_call>\n<function=ed",
    "tag soup": "</think><<tool_call><tool_call>\n<function=edit>\n<parameter=old>\n<<</parameter></function></tool_ca",
    "free text": "</think>" + call("patch", input='*** Begin\n-a "b" \\n\n+日本 </parameter> \u2028\n'),
    "free text twice": call("patch", wrong="<a>\n", input="ignored") + call("get_time") + call("patch"),
    "free text in json": '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}</tool_call>',
    "opened by output": "<think>\ninner\n</think>\n\nouter",
}
STOPS = [(), ("STOP",), ("own fox", "OP t", "\n\n")]


def cuttings(length: int):
    return st.lists(st.integers(1, max(1, length - 1)), max_size=12)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_every_cut_reads_the_same(name, reason):
    raw = GOLDEN[name].encode()
    for stops in STOPS:
        options = {
            "tools": ALL_TOOLS,
            "stops": stops,
            "reason": reason,
            "starts_in_thought": name != "opened by output",
        }
        whole = read(raw, (), **options)
        assert read(raw, range(len(raw)), **options) == whole
        for cut in range(1, len(raw), 1 if not stops else 5):
            assert read(raw, [cut], **options) == whole, cut


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_outputs_read_the_same(data):
    pieces = st.one_of(
        st.sampled_from(
            [
                *(
                    "<think>",
                    "</think>",
                    "<tool_call>",
                    "</tool_call>",
                    "<function=edit>",
                    "<function=patch>",
                    "<function=nope>",
                    "<function=",
                ),
                *("</function>", "<parameter=old>", "<parameter=line>", "<parameter=edits>", "</parameter>", "{", "}"),
                *(
                    "\n",
                    "\n\n",
                    " ",
                    "<",
                    "</",
                    ">",
                    "STOP",
                    "ST",
                    '{"name": "edit", "arguments": {}}',
                    "12",
                    "[1, {}]",
                ),
            ]
        ),
        st.text(max_size=4),
    )
    raw = "".join(data.draw(st.lists(pieces, max_size=24))).encode("utf-8", "replace")
    # bytes that are no UTF-8 may stand anywhere
    at = data.draw(st.integers(0, len(raw)))
    raw = raw[:at] + data.draw(st.sampled_from([b"", b"\xff", b"\xe6\x97", b"\xf0\x9f"])) + raw[at:]
    options = {
        "tools": data.draw(st.sampled_from([ALL_TOOLS, None])),
        "stops": data.draw(st.sampled_from(STOPS)),
        "reason": data.draw(st.sampled_from(["stop", "length"])),
        "starts_in_thought": data.draw(st.booleans()),
        "is_parallel": data.draw(st.booleans()),
    }
    whole = read(raw, (), **options)
    assert read(raw, data.draw(cuttings(len(raw))), **options) == whole
    assert read(raw, range(len(raw)), **options) == whole


@settings(max_examples=100, deadline=None)
@given(value=st.text(max_size=60), cuts=cuttings(400))
def test_string_values_come_through_byte_for_byte(value, cuts):
    raw = "</think>" + call(old=value, new="x")
    result = read(raw, cuts, tools=TOOLS, starts_in_thought=True)
    # a value may hold anything but the one sequence that ends it
    if "</" not in value:
        assert result.arguments() == {"old": value, "new": "x"}
        assert result.content == ""


@settings(max_examples=60, deadline=None)
@given(value=st.text(max_size=60), cuts=cuttings(400))
def test_free_text_comes_through_byte_for_byte(value, cuts):
    result = read("</think>" + call("patch", input=value), cuts, tools=ALL_TOOLS, starts_in_thought=True)
    if "</" not in value:
        assert result.calls == [("patch", value)]


def test_the_real_vocabulary_reads_the_same(files, checkpoint):
    """Control tags once as single ids, once as ordinary pieces."""
    from server.tokens import TextEncoder

    encoder = TextEncoder(files.vocabulary)
    text_rules = rules(
        token_bytes=files.vocabulary.token_bytes, tools=ALL_TOOLS, starts_in_thought=True, stops=("STOP",)
    )
    for raw in GOLDEN.values():
        as_ids = encoder.encode_text(raw, 100_000, allows_control=True)
        as_text = encoder.encode_text(raw, 100_000)
        whole = read_tokens(as_ids, (), text_rules)
        by_text = read_tokens(as_text, range(len(as_text)), text_rules)
        assert (by_text.content, by_text.reasoning, by_text.calls) == (whole.content, whole.reasoning, whole.calls)
        assert read_tokens(as_ids, range(len(as_ids)), text_rules) == whole
