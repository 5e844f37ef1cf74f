"""Decoding, reasoning and stop strings."""

import pytest

from server.pipeline import TextPipeline, join
from server.reasoning import is_open
from server.stop import StopMatcher
from tests.server.raw import TOOLS, call, read, rules


def reads(raw, **options):
    """Byte by byte, which must agree with all at once."""
    size = len(raw.encode() if isinstance(raw, str) else raw)
    found = read(raw, range(size), **options)
    assert read(raw, (), **options) == found
    return found


def test_characters_are_never_split():
    assert reads("🧑‍🚀 日本").content == "🧑‍🚀 日本"


@pytest.mark.parametrize(
    ("raw", "text"),
    [(b"a\xffb", "a\ufffdb"), (b"\xe6\x97", "\ufffd"), (b"\xf0\x9f\x9a", "\ufffd"), (b"\xe6a", "\ufffda")],
)
def test_bytes_that_are_no_text_become_one_replacement(raw, text):
    assert reads(raw).content == text


def test_thought_and_answer():
    result = reads("first\n\nthen\n</think>\n\nThe answer", starts_in_thought=True)
    assert (result.reasoning, result.content) == ("first\n\nthen", "The answer")
    assert result.num_reasoning_tokens == len("first\n\nthen\n</think>")


def test_only_the_framing_line_ends_go():
    result = reads("\n a \n\n</think>\n\n\n b \n", starts_in_thought=True)
    assert (result.reasoning, result.content) == ("\n a \n", "\n b \n")


def test_a_thought_that_never_ends():
    result = reads("still thinking", starts_in_thought=True, reason="length")
    assert (result.reasoning, result.content, result.finish) == ("still thinking", "", "length")


def test_the_prompt_decides_where_generation_starts():
    assert is_open("<|im_start|>assistant\n<think>\n")
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert reads("answer </think> text").content == "answer </think> text"


def test_an_output_may_open_its_own_thought():
    result = reads("<think>\nwhy\n</think>\n\nso")
    assert (result.reasoning, result.content) == ("why", "so")


def test_a_second_close_is_text():
    assert reads("a</think>b</think>c", starts_in_thought=True).content == "b</think>c"


def test_a_call_inside_a_thought_ends_it():
    result = reads("let me " + call(path="/a"), starts_in_thought=True, tools=TOOLS)
    assert (result.reasoning, result.calls) == ("let me ", [("edit", '{"path": "/a"}')])
    assert result.finish == "tool_calls"


@pytest.mark.parametrize(
    "mention",
    [
        "I could use <tool_call> here",
        "the form is <tool_call>\n<function=NAME>\n",
        "maybe <tool_call><function=edit> or not",
        "an unknown <tool_call>\n<function=rm>\n<parameter=a>\n1\n</parameter>",
    ],
)
def test_a_mention_of_a_call_stays_thought(mention):
    result = reads(mention + " hm\n</think>\n\nok", starts_in_thought=True, tools=TOOLS)
    assert (result.reasoning, result.content, result.calls) == (mention + " hm", "ok", [])


def test_without_tools_a_call_inside_a_thought_is_thought():
    assert reads(call(path="/a"), starts_in_thought=True).reasoning == call(path="/a")


def test_a_stop_string_is_found_across_tokens():
    result = reads("The quick brown fox jumps", stops=["own fox"])
    assert (result.content, result.finish) == ("The quick br", "stop")
    assert result.num_tokens == len("The quick brown fox")


def test_what_may_become_a_stop_string_is_held_back():
    matcher = StopMatcher(["own fox"])
    assert [matcher.push(piece) for piece in ("The quick br", "own", " f", "ish")] == [
        "The quick br",
        "",
        "",
        "own fish",
    ]
    assert matcher.flush() == ""
    assert matcher.push("ow") == ""
    assert matcher.flush() == "ow"


def test_stop_strings_apply_to_content_only():
    result = reads("one\n\ntwo STOP\n</think>\n\nthree STOP four", starts_in_thought=True, stops=["STOP", "\n\n"])
    assert (result.reasoning, result.content) == ("one\n\ntwo STOP", "three ")
    result = reads(call(old="a STOP b"), tools=TOOLS, stops=["STOP"])
    assert result.arguments() == {"old": "a STOP b"}


def test_stop_strings_do_not_split_the_end_of_a_thought():
    result = reads("x\n</think>\n\nabc", starts_in_thought=True, stops=["XYZ", "</thinkX"])
    assert (result.reasoning, result.content) == ("x", "abc")


def test_the_stop_that_is_complete_first_wins():
    assert reads("abcd", stops=["bcd", "c"]).content == "ab"
    assert reads("abcd", stops=["bc", "abc"]).content == ""


def test_what_was_held_back_is_read_like_the_rest():
    result = reads("\n</think>\n\n" + call("get_time"), starts_in_thought=True, tools=TOOLS, stops=["</tool_call>!"])
    assert (result.content, result.calls) == ("", [("get_time", "{}")])


def test_a_stop_string_in_the_last_token_is_a_stop():
    assert reads("one STOP", stops=["STOP"], reason="length").finish == "stop"


def test_text_held_for_a_stop_string_comes_before_the_call():
    pipeline = TextPipeline(rules(tools=TOOLS, stops=["STOP"]))
    events = pipeline.push(b"wait ST" + call("get_time").encode()) + pipeline.finish("stop")
    kinds = [type(event).__name__ for event in join(events)]
    assert kinds == ["Content", "CallStart", "CallArguments", "CallEnd"]
    assert join(events)[0].text == "wait ST"
