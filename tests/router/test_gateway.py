"""Who may call, what is refused and how, and what reaches an upstream."""

import json
import re
import socket
import time

import httpx
import pytest

from config import Upstream
from config.keys import digest, generate
from tests.router.live import echo, eventually

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def keys_file(tmp_path):
    """Writes a keys file: ``keys_file(name={...fields})`` returns its path and the keys."""

    def write(**keys):
        secrets = {name: generate() for name in keys}
        lines = []
        for name, fields in keys.items():
            lines += ["[[keys]]", f'name = "{name}"', f'sha256 = "{digest(secrets[name])}"']
            lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
        path = tmp_path / "keys.toml"
        path.write_text("\n".join(lines))
        return path, secrets

    return write


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


def test_keys(gateway, upstream, client, keys_file):
    path, secrets = keys_file(alice={})
    url = gateway(long=upstream(), keys_file=path).url + CHAT
    assert client.post(url, json=BODY, headers=bearer(secrets["alice"])).status_code == 200
    assert client.post(url, json=BODY, headers={"x-api-key": secrets["alice"]}).status_code == 200
    wrong = client.post(url, json=BODY, headers=bearer("ll-wrong"))
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (401, "invalid_api_key")
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert client.post(url, json=BODY).status_code == 401
    assert client.post(url, json=BODY, headers={"authorization": f"Basic {secrets['alice']}"}).status_code == 401


def test_keys_are_read_again_and_a_bad_file_changes_nothing(gateway, upstream, client, keys_file):
    path, secrets = keys_file(alice={})
    running = gateway(long=upstream(), keys_file=path)
    url, old = running.url + CHAT, bearer(secrets["alice"])

    def status(headers):
        # the file is looked at once a second
        running.app._auth._looked_at = 0.0
        return client.post(url, json=BODY, headers=headers).status_code

    good = path.read_text()
    path.write_text("[[keys]]\nname = 5")
    assert status(old) == 200
    path.unlink()
    assert status(old) == 200
    path.write_text(good.replace(digest(secrets["alice"]), digest("ll-new")))
    assert status(old) == 401
    assert status(bearer("ll-new")) == 200
    # the last key was revoked: nobody may call
    path.write_text("")
    assert status(bearer("ll-new")) == 401


def test_key_limits_lanes_and_models(gateway, upstream, client, keys_file):
    path, secrets = keys_file(short={"lanes": ["short"]}, picky={"models": ["tiny"]})
    long, short = upstream(models={"tiny": 99_000, "big": 99_000}), upstream(models={"tiny": 4096})
    url = gateway(long=long, short=short, keys_file=path).url
    for_short, picky = bearer(secrets["short"]), bearer(secrets["picky"])
    assert client.post(url + "/long-context" + CHAT, json=BODY, headers=for_short).status_code == 403
    assert client.get(url + "/long-context/v1/models", headers=for_short).status_code == 403
    assert client.post(url + CHAT, json=BODY | {"model": "big"}, headers=for_short).status_code == 404
    assert client.post(url + CHAT, json=BODY | {"model": "big"}, headers=picky).status_code == 404
    assert client.post(url + CHAT, json={"messages": []}, headers=picky).status_code == 400
    sound = {"content-type": "multipart/form-data"} | picky
    assert client.post(url + "/v1/audio/transcriptions", content=b"x", headers=sound).status_code == 415
    assert client.post(url + CHAT, json=BODY, headers=for_short).status_code == 200
    assert (len(long.requests), len(short.requests)) == (0, 1)


def test_secrets_of_the_client_stay_here(gateway, upstream, client, keys_file, caplog):
    path, secrets = keys_file(alice={})
    long = upstream()
    running = gateway(long=long, keys_file=path, gateway_secret="between-us")
    caplog.set_level("DEBUG")
    headers = bearer(secrets["alice"]) | {
        "x-api-key": secrets["alice"],
        "cookie": "session=1",
        "x-longlane-tenant": "root",
        "x-longlane-gateway-secret": "guess",
        "x-forwarded-for": "1.2.3.4",
        "anthropic-version": "2023-06-01",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": "mine-1",
    }
    response = client.post(running.url + CHAT + "?beta=true", json=BODY, headers=headers)
    got = long.requests[0]
    assert got.target == CHAT + "?beta=true"
    assert got.headers["authorization"] == "Bearer sk-upstream"
    assert got.headers["x-longlane-tenant"] == "alice"
    assert got.headers["x-longlane-gateway-secret"] == "between-us"
    assert not {"cookie", "x-api-key", "x-forwarded-for"} & set(got.headers)
    assert (got.headers["anthropic-version"], got.headers["traceparent"]) == ("2023-06-01", headers["traceparent"])
    assert got.headers["x-request-id"] == response.headers["x-request-id"] == "mine-1"
    assert got.body == response.request.content
    assert secrets["alice"] not in caplog.text
    assert "mine-1" in str([record.__dict__ for record in caplog.records])


def test_short_lane_gets_no_tenant(gateway, upstream, client):
    short = upstream()
    client.post(gateway(long=upstream(), short=short, gateway_secret="s").url + CHAT, json=BODY)
    assert not {"x-longlane-tenant", "x-longlane-gateway-secret", "authorization"} & set(short.requests[0].headers)


def test_response_headers_are_filtered_and_no_cookie_wanders(gateway, upstream, client):
    async def answer(received, connection):
        await connection.answer(200, {}, "set-cookie: a=1\r\nserver: x\r\nx-litellm-key: k\r\nretry-after: 3\r\n")

    long = upstream(answer=answer)
    # by name, since cookies of bare addresses are kept by nobody
    named = Upstream(name="named", url=f"http://localhost:{long.port}", lane="long")
    url = gateway(more=[named]).url + CHAT
    response = client.post(url, json=BODY)
    assert not {"set-cookie", "server", "x-litellm-key"} & set(response.headers)
    assert response.headers["retry-after"] == "3"
    client.post(url, json=BODY)
    assert "cookie" not in long.requests[1].headers


def test_upstream_errors_pass_as_they_are(gateway, upstream, client):
    async def answer(received, connection):
        await connection.answer(422, b'{"error": {"message": "its own",  "code": 7}}')

    response = client.post(gateway(long=upstream(answer=answer)).url + CHAT, json=BODY)
    assert (response.status_code, response.content) == (422, b'{"error": {"message": "its own",  "code": 7}}')


def test_length_decides_between_the_lanes(gateway, upstream, client):
    long, short = upstream(models={"tiny": 99_000}), upstream(models={"tiny": 99_000})
    url = gateway(long=long, short=short, long_prompt_tokens=1000).url
    text = "word " * 2000
    client.post(url + CHAT, json=BODY)
    client.post(url + CHAT, json=BODY | {"messages": [{"role": "user", "content": text}]})
    client.post(url + "/chat" + CHAT, json=BODY | {"messages": [{"role": "user", "content": text}]})
    client.post(url + "/long-context/generate", json={"prompt": "x"})
    assert [one.target for one in short.requests] == [CHAT, CHAT]
    assert [one.target for one in long.requests] == [CHAT, "/generate"]


def test_conversation_stays_in_its_lane(gateway, upstream, client):
    long, short = upstream(models={"tiny": 99_000}), upstream(models={"tiny": 99_000})
    url = gateway(long=long, short=short, long_prompt_tokens=1000).url + CHAT

    def say(num_words, session):
        body = BODY | {"messages": [{"role": "user", "content": "word " * num_words}], "prompt_cache_key": session}
        client.post(url, json=body)

    say(1000, "a")
    say(500, "a")
    say(500, "b")
    assert (len(long.requests), len(short.requests)) == (2, 1)


def test_models_are_listed_with_the_real_limit(gateway, upstream, client):
    long, short = upstream(models={"tiny": 99_000}), upstream(models={"tiny": 4096, "org:small": 2048})
    url = gateway(long=long, short=short).url

    def limits(path):
        return {card["id"]: card["max_model_len"] for card in client.get(url + path).json()["data"]}

    assert limits("/v1/models") == {"tiny": 99_000, "org:small": 2048}
    assert limits("/chat/v1/models") == {"tiny": 4096, "org:small": 2048}
    assert limits("/long-context/v1/models") == {"tiny": 99_000}
    assert client.get(url + "/v1/models/org:small").json()["max_model_len"] == 2048
    missing = client.get(url + "/v1/models/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_unknown_model_lists_the_models(gateway, upstream, client):
    response = client.post(gateway(long=upstream()).url + CHAT, json=BODY | {"model": "gpt"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "models served here: tiny" in error["message"]


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        (CHAT, b'{"model":', {}, 400),
        (CHAT, b"[]", {}, 400),
        (CHAT, b'{"model": 1}', {}, 400),
        (CHAT, b"[" * 100_000, {}, 400),
        (CHAT, b"{}", {"content-type": "text/plain"}, 415),
        (CHAT, b"{}", {"content-encoding": "gzip"}, 415),
        (CHAT, b"{}", {"host": "evil.example"}, 403),
        (CHAT, b"{}", {"host": "127.0.0.1.evil.example:8000"}, 403),
        ("/v1/../metrics", b"{}", {}, 404),
        ("/v1/%2e%2e/metrics", b"{}", {}, 404),
        ("/metrics", b"{}", {}, 404),
        ("/v1/load_lora_adapter", b"{}", {}, 404),
        ("/v1/models", b"{}", {}, 405),
    ],
)
def test_bad_requests_get_a_4xx_and_reach_no_upstream(gateway, upstream, client, path, content, headers, status):
    long = upstream()
    headers = {"content-type": "application/json"} | headers
    response = client.post(gateway(long=long).url + path, content=content, headers=headers)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-should-retry"] == "false"
    assert long.requests == []


def test_errors_take_the_shape_of_the_messages_api(gateway, upstream, client):
    response = client.post(gateway(long=upstream()).url + "/v1/messages", json={"model": "gpt"})
    body = response.json()
    assert (response.status_code, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")
    assert body["request_id"] == response.headers["x-request-id"]


def test_get_of_a_post_path(gateway, upstream, client):
    running = gateway(long=upstream())
    assert client.get(running.url + CHAT).status_code == 405


@pytest.mark.parametrize("path", ["/v1/realtime", CHAT, "/anything"])
def test_websocket_is_refused_with_what_to_do_instead(gateway, upstream, client, path):
    long = upstream()
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    refused = client.get(gateway(long=long).url + path, headers=upgrade)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "websocket_not_supported")
    assert "`stream: true`" in refused.json()["error"]["message"]
    assert long.requests == []


def test_large_body_is_refused_while_it_comes(gateway, upstream, client):
    long = upstream()
    url = gateway(long=long, max_body_bytes=2000).url + CHAT
    declared = client.post(url, json=BODY | {"x": "y" * 3000})
    assert (declared.status_code, declared.json()["error"]["code"]) == (413, "request_too_large")

    def parts():
        yield b'{"x":"'
        for _ in range(100):
            yield b"y" * 100

    chunked = client.post(url, content=parts(), headers={"content-type": "application/json"})
    assert chunked.status_code == 413
    assert long.requests == []
    assert client.post(url, json=BODY).status_code == 200


def test_health_and_readiness(gateway, upstream, client):
    long = upstream(ready=503)
    running = gateway(long=long)
    assert client.get(running.url + "/health").status_code == 200
    away = client.get(running.url + "/ready")
    assert (away.status_code, away.json()["upstreams"]) == (
        503,
        {"engine": "answers 503 on /ready: engine is restarting"},
    )
    long.ready = 200
    eventually(lambda: client.get(running.url + "/ready").status_code == 200)


def test_upstream_without_ready_is_asked_for_its_models(gateway, upstream, client):
    long = upstream(ready=404, answer=echo)

    async def answer(received, connection):
        await connection.answer(404, {})

    long.answer = answer
    running = gateway(long=long)
    assert client.get(running.url + "/ready").status_code == 200
    assert [one.target for one in long.requests][:1] == ["/health"]


def test_request_id_is_made_where_the_given_one_is_no_good(gateway, upstream, client):
    url = gateway(long=upstream()).url + CHAT
    made = client.post(url, json=BODY, headers={"x-request-id": 'bad "id"'}).headers["x-request-id"]
    assert made.startswith("req_")
    assert client.post(url, json=BODY).headers["x-request-id"] != made


def test_configured_models_are_served_before_the_first_check(gateway, threads, client, upstream):
    short = upstream(models={})
    named = Upstream(name="named", url=short.url, lane="short", models=("mine",))
    url = gateway(more=[named]).url
    assert client.post(url + CHAT, json=BODY | {"model": "mine"}).status_code == 200
    assert [card["id"] for card in client.get(url + "/v1/models").json()["data"]] == ["mine"]


def test_least_loaded_worker_gets_the_next_request(gateway, upstream, client):
    async def slow(received, connection):
        await connection.closed()
        raise ConnectionError

    first, second = upstream(answer=slow), upstream(answer=slow)
    more = [Upstream(name=f"e{i}", url=one.url, lane="long") for i, one in enumerate((first, second))]
    running = gateway(more=more)
    host, port = running.url.removeprefix("http://").split(":")
    body = b'{"model":"tiny"}'
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    connections = []
    for number in range(4):
        connections.append(socket.create_connection((host, int(port))))
        connections[-1].sendall(head.encode() + body)
        eventually(lambda wanted=number + 1: len(first.requests) + len(second.requests) == wanted)
        time.sleep(0.02)
    assert (len(first.requests), len(second.requests)) == (2, 2)
    for connection in connections:
        connection.close()
    eventually(lambda: running.num_open == 0)


def test_quota_of_a_key(gateway, upstream, client, keys_file):
    async def answer(received, connection):
        await connection.answer(200, {"usage": {"prompt_tokens": 10, "completion_tokens": 5}})

    path, secrets = keys_file(alice={"requests_per_minute": 2, "concurrent_requests": 1}, bob={})
    long = upstream(answer=answer)
    url = gateway(long=long, keys_file=path).url
    alice, bob = bearer(secrets["alice"]), bearer(secrets["bob"])
    first = client.post(url + CHAT, json=BODY, headers=alice)
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert client.post(url + CHAT, json=BODY, headers=alice).status_code == 200
    refused = client.post(url + CHAT, json=BODY, headers=alice)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert client.post(url + "/v1/messages", json=BODY, headers=alice).json()["error"]["type"] == "rate_limit_error"
    other = client.post(url + CHAT, json=BODY, headers=bob)
    assert other.status_code == 200
    assert not any(name.startswith("x-ratelimit") for name in other.headers)
    assert len(long.requests) == 3


def test_place_of_a_key_is_free_again_after_its_client_left(gateway, upstream, client, keys_file):
    async def never(received, connection):
        await connection.closed()
        raise ConnectionError

    path, secrets = keys_file(alice={"concurrent_requests": 1})
    long = upstream(answer=never)
    running = gateway(long=long, keys_file=path)
    headers = bearer(secrets["alice"])
    with pytest.raises(httpx.ReadTimeout):
        client.post(running.url + CHAT, json=BODY, headers=headers, timeout=0.3)
    eventually(lambda: running.num_open == 0)
    long.answer = echo
    assert client.post(running.url + CHAT, json=BODY, headers=headers).status_code == 200


def test_explain_tells_the_choice_and_sends_nothing(gateway, upstream, client):
    long, short = upstream(models={"tiny": 99_000}), upstream(models={"tiny": 4096})
    running = gateway(long=long, short=short, long_prompt_tokens=1000)
    url = running.url + "/explain"
    short.ready = 503
    eventually(lambda: not running.app.workers["vllm"].healthy)
    told = client.post(url + CHAT, json=BODY).json()
    assert (told["lane"], told["reason"], told["upstreams"]) == ("short", "length", ["engine"])
    assert told["away"] == {"vllm": "answers 503 on /ready: engine is restarting"}
    assert 0 < told["estimated_prompt_tokens"] < told["long_prompt_tokens"] == 1000
    told = client.post(url + "/long-context" + CHAT, json=BODY | {"store": True}).json()
    assert (told["lane"], told["reason"], told["upstreams"], told["is_repeatable"]) == (
        "long",
        "path",
        ["engine"],
        False,
    )
    assert client.post(url + CHAT, json=BODY | {"model": "gpt"}).status_code == 404
    assert client.get(url + "/health").status_code == 404
    assert long.requests == short.requests == []


def test_stream_of_a_limited_key_is_charged_by_its_usage_which_stays_hidden(gateway, upstream, client, keys_file):
    text = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    usage = {"prompt_tokens": 900, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 600}}

    async def answer(received, connection):
        asked = received.json.get("stream_options") == {"include_usage": True}
        counts = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" if asked else b""
        await connection.stream(text + counts, b"data: [DONE]\n\n", pause_s=0.01)

    path, secrets = keys_file(alice={"prompt_tokens_per_minute": 1000}, bob={})
    long = upstream(answer=answer)
    url = gateway(long=long, keys_file=path).url + CHAT
    alice, body = bearer(secrets["alice"]), BODY | {"stream": True}
    assert client.post(url, json=body, headers=alice).content == text + b"data: [DONE]\n\n"
    second = client.post(url, json=body | {"stream_options": {"include_usage": True}}, headers=alice)
    assert b'"usage"' in second.content
    # 300 uncached tokens of the first stream are gone
    assert 690 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 705
    plain = client.post(url, json=body, headers=bearer(secrets["bob"]))
    assert plain.content == text + b"data: [DONE]\n\n"
    assert long.requests[-1].body == plain.request.content


def dribble(url, text, pause_s=0.05):
    """Sends a byte at a time; returns what came back and the seconds until the end."""
    host, port = url.removeprefix("http://").split(":")
    started = time.monotonic()
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(10)
        try:
            for byte in text.encode():
                connection.sendall(bytes([byte]))
                time.sleep(pause_s)
            answer = connection.recv(10_000)
        except ConnectionError:
            answer = b""
        return answer, time.monotonic() - started


def test_client_that_dribbles_its_head_is_left(gateway, upstream):
    url = gateway(long=upstream(), request_timeout_s=0.5).url
    answer, seconds = dribble(url, "POST /v1/chat/completions HTTP/1.1\r\nx-slow: " + "x" * 1000)
    assert answer == b"" and seconds < 3
    answer, seconds = dribble(url, "")
    assert answer == b"" and 0.4 < seconds < 3


def test_client_that_stops_in_its_body_is_told(gateway, upstream, client):
    long = upstream()
    running = gateway(long=long, request_timeout_s=0.5)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    answer, _ = dribble(running.url, head + '{"model"', 0.0)
    assert b"connection: close" in answer
    assert answer.startswith(b"HTTP/1.1 408") and b"no byte of the body came for 0.5 s" in answer
    assert long.requests == []
    # an idle connection between two requests is no slow client
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    time.sleep(0.7)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200


@pytest.mark.parametrize(
    "cut",
    [
        lambda comment: [b"data: [DONE]\n\n" + comment],
        lambda comment: [comment + b"data: [DONE]\n\n"],
        lambda comment: [b"data: [DONE]\n\n", comment],
        lambda comment: [comment, b"data: [DONE]\n\n"],
    ],
)
def test_usage_comment_of_the_engines_server_is_counted_and_taken_out(gateway, upstream, client, keys_file, cut):
    usage = {"prompt_tokens": 900, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 600}}
    comment = b": usage " + json.dumps(usage).encode() + b"\n\n"

    async def answer(received, connection):
        await connection.stream(*cut(comment), pause_s=0.05)

    path, secrets = keys_file(alice={"prompt_tokens_per_minute": 1000})
    long = upstream(answer=answer)
    url = gateway(long=long, keys_file=path, gateway_secret="s").url + CHAT
    headers, body = bearer(secrets["alice"]), BODY | {"stream": True}
    assert client.post(url, json=body, headers=headers).content == b"data: [DONE]\n\n"
    assert "stream_options" not in long.requests[0].json
    second = client.post(url, json=body, headers=headers)
    assert 690 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 705


def test_whole_answer_from_the_cache_is_charged_and_learned_by_its_true_length(gateway, upstream, client, keys_file):
    usage = {"input_tokens": 100, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 900, "output_tokens": 5}

    async def answer(received, connection):
        await connection.answer(200, {"type": "message", "content": [], "usage": usage})

    path, secrets = keys_file(alice={"prompt_tokens_per_minute": 10_000})
    running = gateway(long=upstream(answer=answer), keys_file=path)
    body, headers = BODY | {"system": "x" * 4000}, bearer(secrets["alice"])
    client.post(running.url + "/v1/messages", json=body, headers=headers)
    second = client.post(running.url + "/v1/messages", json=BODY, headers=headers)
    assert 9800 <= int(second.headers["x-ratelimit-remaining-tokens"]) <= 9905
    assert 3.8 < running.app._ratio.bytes_per_token["tiny"] < 4.0


def test_end_marker_without_the_usage_comment_arrives(gateway, upstream, client):
    async def answer(received, connection):
        await connection.stream(b"data: 1\n\n", b"data: [DONE]\n\n")

    url = gateway(long=upstream(answer=answer), gateway_secret="s").url + CHAT
    assert client.post(url, json=BODY | {"stream": True}).content == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(("secret", "is_told"), [(None, True), ("s", False)])
def test_keys_without_a_secret_for_the_engine_are_told(gateway, upstream, keys_file, caplog, secret, is_told):
    path, _ = keys_file(alice={})
    gateway(long=upstream(), keys_file=path, gateway_secret=secret)
    assert ("keys_file is set without gateway_secret" in caplog.text) is is_told


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_goes_on_where_it_is_kept(gateway, upstream, client, is_stream):
    engines = {}

    def engine(name):
        async def answer(received, connection):
            response = {"id": f"resp_{name}_{len(engines[name].requests)}", "object": "response"}
            if not is_stream:
                await connection.answer(200, response)
                return
            events = [{"type": f"response.{word}", "response": response} for word in ("created", "completed")]
            await connection.stream(*(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

        engines[name] = upstream(answer=answer)
        return Upstream(name=name, url=engines[name].url, lane="long")

    running = gateway(more=[engine("a"), engine("b")], short=upstream(), long_prompt_tokens=100)

    def ask(text, previous=None):
        body = {"model": "tiny", "input": text, "previous_response_id": previous, "stream": is_stream}
        answer = client.post(running.url + "/v1/responses", json=body)
        assert answer.status_code == 200
        return re.search(r"resp_\w+", answer.text)[0]

    for number in range(8):
        first = ask(f"{number} " * 400)
        second = ask(f"short {number}", first)
        # the new turn alone would take the short lane, and by its prefix another engine
        assert second.split("_")[1] == first.split("_")[1]
        assert ask(f"again {number}", second).split("_")[1] == first.split("_")[1]
    assert all(engines[name].requests for name in engines)


def test_responses_of_keys_are_remembered_apart(gateway, upstream, client, keys_file):
    async def answer(received, connection):
        await connection.answer(200, {"id": "resp_1", "object": "response"})

    path, secrets = keys_file(alice={}, bob={})
    long, short = upstream(), upstream(answer=answer)
    url = gateway(long=long, short=short, keys_file=path).url
    body = {"model": "tiny", "input": "hi"}
    client.post(url + "/v1/responses", json=body, headers=bearer(secrets["alice"]))
    explained = {}
    for name in secrets:
        asked = body | {"previous_response_id": "resp_1", "input": "x" * 100_000}
        told = client.post(url + "/explain/v1/responses", json=asked, headers=bearer(secrets[name])).json()
        explained[name] = told["lane"], told["upstreams"]
    assert explained == {"alice": ("short", ["vllm"]), "bob": ("long", ["engine"])}
