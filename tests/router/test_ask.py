import json

import pytest

from router.ask import read_ask, text_bytes
from router.errors import RequestError


def ask(body, session=None, key="k"):
    return read_ask(json.dumps(body).encode(), session, key)


def chat(*contents, **fields):
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return {"model": "m", "messages": messages, **fields}


def test_fields():
    plain = ask(chat("s", "u"))
    assert (plain.model, plain.is_stream, plain.is_repeatable) == ("m", False, True)
    assert ask(chat("s", stream=True)).is_stream
    assert not ask(chat("s", store=True)).is_repeatable
    assert not ask({"input": "x", "previous_response_id": "r"}).is_repeatable
    assert ask({"model": None, "store": None}).model is None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model":', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"", "not valid JSON"),
        (b'{"model": 5}', "model must be a string"),
        (b'{"a": ' + b"[" * 100_000, "JSON|deep"),
        (b'{"model": "m"} trailing', "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
    ],
)
def test_bad_bodies_say_what_is_wrong(body, words):
    with pytest.raises(RequestError, match=words):
        read_ask(body, None, "k")


def test_conversation_grows_and_stays_the_same():
    first = ask(chat("s", "u")).conversation
    assert ask(chat("s", "u", "answer", "more")).conversation == first
    assert ask(chat("s", "other")).conversation != first
    assert ask(chat("s", "u"), key="another").conversation != first


def test_conversation_by_name():
    by_key = ask(chat("s", "u", prompt_cache_key="c")).conversation
    assert ask(chat("x", "y", prompt_cache_key="c")).conversation == by_key
    assert ask(chat("x", "y", metadata={"user_id": "c"})).conversation == by_key
    assert ask(chat("x", "y", prompt_cache_key="d"), session="c").conversation == by_key


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": [{"role": "user", "content": "hello"}], "instructions": "be brief"},
        {"prompt": "hello"},
        {"system": [{"type": "text", "text": "x"}], "messages": [{"role": "user", "content": "hello"}]},
        {"messages": "no list"},
        {"messages": [5]},
    ],
)
def test_every_form_has_a_conversation(body):
    assert ask(body).conversation


def test_nothing_to_tell_by():
    assert ask({"model": "m"}).conversation is None


def test_base64_is_no_text():
    picture = "A" * 100_000
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}
    assert text_bytes(json.dumps([url, block]).encode()) < 400
    assert text_bytes(json.dumps(["data " + "A" * 1000]).encode()) > 1000


def test_escapes_count_as_characters():
    assert text_bytes(json.dumps("\u65e5" * 100).encode()) < 310
