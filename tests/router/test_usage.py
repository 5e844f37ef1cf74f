import json

import pytest

from router.usage import ask_for_usage, without_usage_comment, without_usage_event

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \xe2\x80\xa8"}}],"usage":null}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m"}',
        b'{ "model" : "m" } \n',
        b"{}",
        b'{"model":"m","stream_options":{"include_usage":false}}',
        b'{"model":"m","stream_options":null}',
    ],
)
def test_body_asks_and_keeps_the_rest(body):
    asked = ask_for_usage(body)
    assert json.loads(asked) == json.loads(body) | {"stream_options": {"include_usage": True}}
    assert asked.startswith(body.rstrip()[:-1])


@pytest.mark.parametrize(
    ("events", "kept"),
    [
        (TEXT + USAGE + DONE, TEXT + DONE),
        (USAGE, b""),
        (TEXT, TEXT),
        (b": heartbeat\n\n" + USAGE.replace(b"\n\n", b"\r\n\r\n") + DONE, b": heartbeat\n\n" + DONE),
        (b'data: {"choices":[]}\n\n' + DONE, b'data: {"choices":[]}\n\n' + DONE),
    ],
)
def test_only_the_usage_event_is_taken_out(events, kept):
    assert without_usage_event(events) == kept


def test_only_the_usage_comment_is_taken_out():
    comment = b': usage {"prompt_tokens":3}\n\n'
    assert without_usage_comment(TEXT + DONE + comment) == TEXT + DONE
    assert without_usage_comment(comment) == b""
    text = b'data: {"content":": usage {"}\n\n: heartbeat\n\n'
    assert without_usage_comment(text) == text


@pytest.mark.parametrize(
    "event",
    [b'data: {"choices":[]\n\n', b'data: [{"choices":[]}]\n\n', b'data: {"choices":[],"x":' + b"[" * 100_000 + b"\n\n"],
)
def test_what_is_no_event_of_usage_passes_as_it_is(event):
    assert without_usage_event(event) == event
