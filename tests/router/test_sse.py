import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_heartbeats_do_not_hide_the_newest_data():
    scanner = StreamScanner("responses")
    scanner.note(b'data: {"sequence_number":4}\n\n')
    scanner.note(b": heartbeat\n\n")
    assert scanner.last_data() == {"sequence_number": 4}
