"""Our chat template renders the family's form."""

import pytest

from engine.embedded.skills.example import load_template

TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = {
    "type": "function",
    "function": {"name": "get_time", "arguments": {"city": "Oslo", "n": 2, "names": ["a", "b"]}},
}


@pytest.fixture(scope="module")
def render():
    return load_template()


def test_plain_conversation(render):
    text = render(messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": " hi "}])
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("variables", "tail"),
    [
        ({}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": True}, "<|im_start|>assistant\n<think>\n"),
        ({"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_generation_prompt(render, variables, tail):
    text = render(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True, **variables)
    assert text == "<|im_start|>user\nhi<|im_end|>\n" + tail


def test_tool_round_trip(render):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": "", "reasoning_content": "call it", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "12:00"},
        {"role": "tool", "content": "12:01"},
    ]
    text = render(messages=messages, tools=[TOOL])
    block = (
        "<tool_call>\n<function=get_time>\n<parameter=city>\nOslo\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
        '<parameter=names>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>'
    )
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "get_time"' in text
    assert text.partition("<|im_end|>")[0].endswith("\n\nBe kind.")
    assert f"<|im_start|>assistant\n<think>\ncall it\n</think>\n\n{block}\n{block}<|im_end|>\n" in text
    responses = "\n<tool_response>\n12:00\n</tool_response>\n<tool_response>\n12:01\n</tool_response>"
    assert text.endswith(f"<|im_start|>user{responses}<|im_end|>\n")


def test_thoughts_of_earlier_turns_are_dropped(render):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    assert "<|im_start|>assistant\nb<|im_end|>" in render(messages=messages)
    kept = render(messages=messages, preserve_thinking=True)
    assert "<|im_start|>assistant\n<think>\nhm\n</think>\n\nb<|im_end|>" in kept


def test_text_parts_are_joined(render):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "<|im_start|>user\none two<|im_end|>" in render(messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "assistant", "content": "a"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "alien", "content": "b"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_refused_conversations(render, messages):
    with pytest.raises(ValueError, match=r".+"):
        render(messages=messages)
