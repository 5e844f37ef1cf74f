"""Bodies that would become very many objects, and what goes on beside them."""

import http.client
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import BadRequestError
from server.json_size import LIMITS, MAX_ENTRIES, MAX_OBJECTS, MAX_VALUES, OutsideStrings, check_json_size
from tests.server.live import NAME
from tests.server.test_chat import ask

LARGE = 30_000_000
LONGEST_STALL_S = 0.1
IDLE_S = 0.3

VALUE = st.recursive(
    st.integers() | st.text(alphabet='ab"\\,:{}[]\n', max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\,:{[', max_size=3), inner),
    max_leaves=20,
)


def counted(value) -> tuple[int, int, int]:
    """Objects and lists, entries, commas."""
    if not isinstance(value, dict | list):
        return 0, 0, 0
    inner = [counted(item) for item in (value.values() if isinstance(value, dict) else value)]
    own = (1, len(value) if isinstance(value, dict) else 0, max(0, len(value) - 1))
    return tuple(map(sum, zip(own, *inner, strict=True)))


@settings(max_examples=200, deadline=None)
@given(value=VALUE, size=st.integers(1, 40))
def test_only_what_stands_outside_of_strings_counts(value, size):
    raw = json.dumps(value).encode()
    outside = OutsideStrings()
    chars = b"".join(outside.of(raw[start : start + size]).tobytes() for start in range(0, len(raw), size))
    marks = [sum(map(chars.count, marks)) for marks, _ in LIMITS.values()]
    assert tuple(marks) == counted(value)


@pytest.mark.parametrize(
    ("item", "most", "word"),
    [(b"{}", MAX_OBJECTS - 1, "objects"), (b"[]", MAX_OBJECTS - 1, "objects"), (b"1", MAX_VALUES + 1, "values")],
)
def test_limits(item, most, word):
    check_json_size(b"[" + b",".join([item] * most) + b"]")
    with pytest.raises(BadRequestError, match=f"more than .* {word}"):
        check_json_size(b"[" + b",".join([item] * (most + 1)) + b"]")


def test_text_is_no_object(live):
    """Source code is full of the characters that count."""
    check_json_size(json.dumps(ask('{"a": [1, 2]},\n' * 400_000)).encode())
    answer = live.post(ask('{"a": [1, 2]},' * 40_000))
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def repeated(item: bytes, size: int = LARGE) -> bytes:
    return b",".join([item] * (size // (len(item) + 1)))


def numbered(pattern: bytes, count: int) -> bytes:
    return b",".join(pattern % number for number in range(count))


HEAD = b'{"model":"%s","messages":[{"role":"user","content":"hi"}],' % NAME.encode()
TOOL = HEAD + b'"tool_choice":"required","tools":[{"type":"function","function":{"name":"f","parameters":'
BODIES = {
    "text": lambda: json.dumps(ask("a b c " * (LARGE // 6))).encode(),
    "unknown fields": lambda: HEAD + numbered(b'"field%d":1', LARGE // 14) + b"}",
    "messages": lambda: b'{"messages":[' + repeated(b'{"role":"user","content":"a"}') + b"]}",
    "messages within limits": lambda: b'{"messages":[' + repeated(b'{"role":"user","content":"a"}', 1_700_000) + b"]}",
    "a schema": lambda: TOOL + b'{"properties":{' + numbered(b'"p%d":{"type":"string"}', LARGE // 27) + b"}}}}]}",
    "a schema within limits": lambda: (
        TOOL + b'{"properties":{' + numbered(b'"p%d":{"enum":[1]}', MAX_ENTRIES // 3) + b"}}}}]}"
    ),
    "token ids": lambda: HEAD + b'"stop_token_ids":[' + repeated(b"11") + b"]}",
    "half a pair": lambda: b'{"a":"' + b"\\\\" * (LARGE // 2) + b'\\ud800"}',
}


def longest_stall(live, body: bytes | None) -> float:
    """Of /health, while the body is refused; for a while without one."""
    done = threading.Event()

    def send() -> None:
        client = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
        client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        assert client.getresponse().status == 400
        client.close()
        done.set()

    thread = threading.Thread(target=send) if body else threading.Timer(IDLE_S, done.set)
    health = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    longest = 0.0
    thread.start()
    while not done.is_set() and thread.is_alive():
        started = time.monotonic()
        health.request("GET", "/health")
        assert health.getresponse().read() == b'{"status":"alive"}'
        longest = max(longest, time.monotonic() - started)
        time.sleep(0.01)
    thread.join()
    health.close()
    assert done.is_set()
    return longest


@pytest.mark.parametrize("kind", BODIES)
def test_nothing_in_a_large_body_holds_up_others(live, kind):
    body = BODIES[kind]()
    # client and server share this process, and the machine may be busy with other things: the best of five counts,
    # beside what an idle server takes at the same time
    stalls, allowed = [], []
    while not stalls or (min(stalls) > max(allowed) and len(stalls) < 5):
        allowed.append(LONGEST_STALL_S + longest_stall(live, None))
        stalls.append(longest_stall(live, body))
    assert min(stalls) < max(allowed)
