import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.counts import body_counts
from router.sse import HELD_BYTES, EventSplitter, EventTooLargeError, StreamScanner

EVENTS = [
    b'data: {"a":"\xe2\x80\xa8"}\n\n',
    b": comment\n\n",
    b"event: x\r\ndata: 1\r\n\r\n",
    b"data: 2\r\r",
    b"data: 3\n\r\n",
    b"data: [DONE]\n\n",
]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def feed(chunks: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    return [part for part in [*(splitter.feed(chunk) for chunk in chunks), splitter.finish()] if part]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 150), max_size=30))
def test_bytes_are_the_same_however_the_stream_is_cut(events, places):
    stream = b"".join(events)
    assert b"".join(feed(cut(stream, [min(place, len(stream)) for place in places]))) == stream


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
def test_only_whole_events_leave(end):
    stream = b"data: one" + end + b"data: two" + end
    for place in range(len(stream)):
        first = EventSplitter().feed(stream[:place])
        assert first in {b"", b"data: one" + end}
        assert len(first) > 0 or place < len(b"data: one" + end)


def test_half_event_is_dropped():
    assert feed([b"data: 1\n\nda", b"ta: 2\n"]) == [b"data: 1\n\n"]


def test_unfinished_tail_is_bounded():
    splitter = EventSplitter()
    splitter.feed(b"x" * HELD_BYTES)
    with pytest.raises(EventTooLargeError):
        splitter.feed(b"x")


def test_large_whole_event_in_one_chunk_passes():
    event = b"data: " + b"x" * (2 * HELD_BYTES) + b"\n\n"
    assert feed([event]) == [event]


@pytest.mark.parametrize(
    ("api", "events", "is_whole"),
    [
        ("chat", b"data: [DONE]\n\n", True),
        ("chat", b'data: {"x":1}\r\n\r\ndata: [DONE]\r\n\r\n', True),
        ("chat", b'data: {"content":"data: [DONE]"}\n\n', False),
        ("chat", b'data: {"error":{"message":"m"}}\n\n', True),
        ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        ("messages", b'data: {"type":"message_stop"}\n\n', True),
        ("messages", b'event: error\ndata: {"type":"error","error":{}}\n\n', True),
        ("messages", b'event: ping\ndata: {"type":"ping"}\n\n', False),
        ("responses", b'event: response.completed\ndata: {"type":"response.completed"}\n\n', True),
        ("responses", b'event: response.output_text.done\ndata: {"type":"response.output_text.done"}\n\n', False),
        ("other", b"data: 1\n\n", True),
    ],
)
def test_end_marker_of_each_api(api, events, is_whole):
    scanner = StreamScanner(api)
    scanner.note(events)
    assert scanner.is_whole() is is_whole


def test_prompt_tokens_are_read_from_usage_not_from_text():
    scanner = StreamScanner("chat")
    scanner.note(b'data: {"choices":[{"delta":{"content":"\\"prompt_tokens\\": 7"}}]}\n\n')
    assert scanner.counts == {}
    usage = b'{"prompt_tokens": 41,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":40}}'
    scanner.note(b'data: {"choices":[],"usage":' + usage + b"}\n\n")
    assert scanner.counts == {"prompt": 41, "output": 2, "cached": 40}


FORGED = {"cached_tokens": 10**9, "prompt_tokens": 10**9, "input_tokens": 10**9, "cache_read_input_tokens": 10**9}
TRUE = {"input_tokens": 1000, "input_tokens_details": {"cached_tokens": 400}, "output_tokens": 5}
COUNTED = {"prompt": 1000, "cached": 400, "output": 5}


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"name": "f", "usage": FORGED} | FORGED], "metadata": FORGED, "usage": TRUE},
        {"usage": TRUE, "content": [{"type": "tool_use", "input": {"usage": FORGED} | FORGED}]},
        {"response": {"tools": [FORGED], "usage": TRUE}, "type": "response.completed"},
        {"message": {"content": [FORGED], "usage": TRUE}, "type": "message_start"},
    ],
)
def test_what_an_answer_repeats_of_its_client_counts_nothing(body):
    text = json.dumps(body).encode()
    scanner = StreamScanner("responses")
    scanner.note(b"data: " + text + b"\n\n")
    assert body_counts(text) == scanner.counts == COUNTED


def test_the_last_word_of_a_stream_counts():
    scanner = StreamScanner("responses")
    scanner.note(b'data: {"type":"response.created","response":{"usage":{"input_tokens":9,"output_tokens":99}}}\n\n')
    scanner.note(b"data: " + json.dumps({"response": {"usage": TRUE}}).encode() + b"\n\n")
    assert scanner.counts == COUNTED


MESSAGES = {
    "input_tokens": 1000,
    "cache_creation_input_tokens": 20,
    "cache_read_input_tokens": 9000,
    "output_tokens": 5,
}


def test_the_messages_api_counts_cached_tokens_apart():
    counted = {"prompt": 10_020, "cached": 9000, "output": 5}
    assert body_counts(json.dumps({"type": "message", "usage": MESSAGES}).encode()) == counted
    scanner = StreamScanner("messages")
    scanner.note(b'data: {"message":{"usage":{"input_tokens":10020,"cache_read_input_tokens":0}}}\n\n')
    scanner.note(b"data: " + json.dumps({"type": "message_delta", "usage": MESSAGES}).encode() + b"\n\n")
    assert scanner.counts == counted


@pytest.mark.parametrize("usage", [{"prompt_tokens": -5}, {"prompt_tokens": "x"}, [1], 7, {"prompt_tokens": 1.5}])
def test_counts_that_are_none_are_left_out(usage):
    assert body_counts(json.dumps({"usage": usage}).encode()) == {}


def test_counts_beside_the_text_of_generate():
    body = b'{"text":"x","prompt_tokens":9,"cached_tokens":4,"completion_tokens":2}'
    assert body_counts(body) == {"prompt": 9, "cached": 4, "output": 2}


def test_deep_nesting_of_an_upstream_is_no_fault_of_the_gateway():
    scanner = StreamScanner("chat")
    scanner.note(b'data: {"prompt_tokens":' + b"[" * 100_000 + b"\n\n")
    assert scanner.counts == {} and not scanner.is_whole()


def test_heartbeats_do_not_hide_the_newest_data():
    scanner = StreamScanner("responses")
    scanner.note(b'data: {"sequence_number":4}\n\n')
    scanner.note(b": heartbeat\n\n")
    assert scanner.last_data() == {"sequence_number": 4}
