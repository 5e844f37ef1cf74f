"""Usage of answers that are too large to hold."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config.keys import Key, digest, generate, write_keys
from router.counts import body_counts
from router.large import UsageScanner
from router.sse import HELD_BYTES
from tests.router.live import eventually

USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
TRUTH = {"prompt": 12, "cached": 8, "output": 3}
FORGED = {"prompt_tokens": 1, "completion_tokens": 0}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just('"usage":{"prompt_tokens":1}') | st.just("usage"),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("usage"), inner, max_size=4)
    ),
    max_leaves=12,
)


def scanned(body, places=()):
    scanner = UsageScanner()
    for start, end in zip((0, *places), (*places, len(body)), strict=True):
        scanner.note(body[start:end])
    return scanner.counts


@given(
    before=st.dictionaries(st.text(max_size=8).filter(lambda name: name != "usage"), JSON, max_size=3),
    after=st.dictionaries(st.text(max_size=8).filter(lambda name: name != "usage"), JSON, max_size=3),
    is_ascii=st.booleans(),
    data=st.data(),
)
def test_only_the_outermost_usage_counts_however_the_body_is_cut(before, after, is_ascii, data):
    names = {name: value for name, value in after.items() if name not in before}
    body = json.dumps(before | {"usage": USAGE} | names, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    places = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    assert scanned(body, places) == TRUTH


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [{"usage": FORGED}], "metadata": {"usage": FORGED}},
        {"text": '","usage":{"prompt_tokens":1},"x":"'},
        {"usage": "usage", "usage2": FORGED},
        {"usage": None},
        {"usage": {"prompt_tokens": "many"}},
        {"usage": {"prompt_tokens": 5, "note": "x" * 20_000}},
        [{"usage": FORGED}],
    ],
)
def test_what_is_no_usage_counts_nothing(body):
    assert scanned(json.dumps(body).encode()) == {}


def test_every_cut_of_one_body():
    body = b'{"a":"\\\\\\"","b":[{"usage":{"prompt_tokens":1}}],"usage" : {"prompt_tokens": 7, "x": "}"} ,"c":"\\\\"}'
    assert body_counts(body) == {"prompt": 7}
    assert all(scanned(body, (at,)) == {"prompt": 7} for at in range(len(body)))


def test_dense_bodies_are_read_fast():
    body = json.dumps({"data": [{"embedding": [0.125] * 100} for _ in range(1000)], "usage": USAGE}).encode()
    started = time.process_time()
    assert scanned(body) == TRUTH
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
def test_large_answer_is_charged_by_its_true_usage(gateway, upstream, client, tmp_path, path):
    secret = generate()
    key = Key(name="a", sha256=digest(secret), prompt_tokens_per_minute=100_000, tokens_per_day=100_000)
    write_keys(tmp_path / "keys.toml", [key])

    async def answer(received, connection):
        await connection.answer(200, {"data": "x" * (2 * HELD_BYTES), "usage": USAGE})

    running = gateway(long=upstream(answer=answer), keys_file=tmp_path / "keys.toml")
    # estimated as some 5,000 tokens, of which 4 turn out to be computed
    words = [{"role": "user", "content": "word " * 4000}]
    left = []
    for session in ("one", "two"):
        headers = {"authorization": f"Bearer {secret}", "x-session-id": session}
        reply = client.post(running.url + path, json={"model": "tiny", "messages": words}, headers=headers)
        assert len(reply.content) > 2 * HELD_BYTES
        left.append(int(reply.headers["x-ratelimit-remaining-tokens"]))
    assert left[0] < 96_000 and left[1] > left[0] - 100
    eventually(lambda: running.num_open == 0)
