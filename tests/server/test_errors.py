"""Bad input is answered with a 4xx that says what to change; nothing a client sends makes a 500."""

import json
import math

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router import errors as router_errors
from server.errors import (
    AuthenticationError,
    BodyTooLargeError,
    InternalError,
    MediaTypeError,
    MethodNotAllowedError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    SlowRequestError,
    body_for,
)
from server.pace import UNKNOWN_S, Pace
from tests.server.live import NAME, running
from tests.server.test_chat import TOOLS, ask

JSON = {"content-type": "application/json"}


def refusal(answer, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{}x",
        b'{"model": "m"} trailing',
        b"",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"null",
        b"[]",
        b'"text"',
        b"123",
        b'{"model": NaN}',
        b'{"messages": "\\ud800"}',
        b"{'model': 'm'}",
    ],
)
def test_what_is_no_json_object(live, body):
    for stream in (b"", b" "):
        error = refusal(live.http.post("/v1/chat/completions", content=body + stream, headers=JSON))
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", [r"\ud800", r"a \uDBFF b", r"\udc00", r"\ud83d\ud83d", r"\\\udc00", r"\ude00\ud83d"])
def test_half_a_pair_is_told_as_such(live, text):
    body = json.dumps(ask("hi")).replace("hi", text).encode()
    error = refusal(live.http.post("/v1/chat/completions", content=body, headers=JSON))
    assert "half of a UTF-16 pair" in error["message"]


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud800", r"\\udc00"])
def test_whole_pairs_and_their_mention_are_text(live, text):
    body = json.dumps(ask("hi")).replace("hi", text).encode()
    assert live.http.post("/v1/chat/completions", content=body, headers=JSON).status_code == 200
    error = refusal(live.http.post("/v1/chat/completions", content=body + b"}", headers=JSON))
    assert "UTF-16" not in error["message"]


def test_duplicate_keys_take_the_last(live):
    body = json.dumps(ask("hi"))[:-1] + f', "model": "{NAME}", "max_tokens": 1, "max_tokens": 2}}'
    answer = live.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "hologram"}]}]},
            "messages[0].content[1]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"seed": 1 << 70}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"top_logprobs": -3, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": True}, "stream_options"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a>b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"stream": "yes"}, "stream"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields_are_named_before_any_header(live, fields, param, stream):
    error = refusal(live.post({**ask("hi"), "stream": stream, **fields}))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.rpartition(".")[2] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"prediction": {"type": "content"}}, "prediction"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(live, fields, param):
    error = refusal(live.post(ask("hi", **fields)))
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert param in error["message"]


def test_what_changes_nothing_is_ignored_and_counted(live):
    fields = {"metadata": {"a": "b"}, "user": "u", "store": True, "service_tier": "auto", "verbosity": "low"}
    before = live.metric("longlane:ignored_fields_total", field="store")
    unknown = live.metric("longlane:ignored_fields_total", field="other")
    assert (
        live.post(ask("hi", **fields, safety_identifier="s", made_up=1, response_format={"type": "text"})).status_code
        == 200
    )
    assert live.metric("longlane:ignored_fields_total", field="store") == before + 1
    assert live.metric("longlane:ignored_fields_total", field="other") == unknown + 1


def test_an_unknown_model_names_the_known_one(live):
    error = refusal(live.post({**ask("hi"), "model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found"
    assert NAME in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_limit(live, stream):
    error = refusal(live.post(ask("word " * 5000, stream=stream)))
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        "messages",
        "invalid_request_error",
    )
    assert "maximum context length is 4096 tokens" in error["message"]
    assert "tokens" in error["message"].partition("resulted in")[2]


def test_a_prompt_just_within_the_limit(live):
    words = 4096 - 11 - 1
    answer = live.post(ask("hi" + " hi" * words, max_tokens=100))
    assert answer.status_code == 200
    assert answer.json()["usage"]["total_tokens"] == 4096
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    error = refusal(live.post(ask("hi" + " hi" * (words + 1), max_tokens=100)))
    assert "4096 tokens, which leaves none for an answer" in error["message"]
    fields = ask("hi" + " hi" * (words + 1), max_tokens=100)
    refused = live.post({**fields, "thinking": {"type": "enabled"}}, "/v1/messages")
    assert refused.json()["error"]["message"] == "prompt is too long: 4096 tokens > 4095 maximum"


def test_paths_methods_and_media_types(live):
    assert refusal(live.http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert refusal(live.http.get("/"), 404)
    assert refusal(live.http.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert refusal(live.http.delete("/v1/models"), 405)
    text = {"content-type": "text/plain"}
    assert refusal(live.http.post("/v1/chat/completions", content=b"{}", headers=text), 415)
    assert refusal(live.http.post("/v1/chat/completions", data={"a": "b"}), 415)
    assert live.http.get("/health/").status_code < 500


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/models", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("PATCH", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(live, method, path, allowed):
    answer = live.http.request(method, path)
    assert allowed in refusal(answer, 405)["message"]
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/openapi.json"])
def test_head_is_get_without_the_body(live, path):
    answer = live.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) > 10


def test_a_packed_body_is_refused_as_such(live):
    answer = live.http.post("/v1/chat/completions", content=b"x", headers={**JSON, "content-encoding": "gzip"})
    assert "gzip" in refusal(answer, 415)["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": ["hi", ""]}),
        ("/generate", {"prompt": "", "raw": True}),
    ],
)
def test_there_is_nothing_to_continue_in_an_empty_prompt(live, path, fields):
    assert refusal(live.post({"model": NAME, **fields}, path))["param"] == "prompt"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"max_tokens": 2.0, "n": 1.0, "top_k": 5e0, "stop_token_ids": [7.0, 8]}),
        ("/v1/completions", {"prompt": [[100.0, 101], [102.0]], "max_tokens": 2.0, "messages": None}),
        ("/v1/messages", {"max_tokens": 2.0, "thinking": {"type": "enabled", "budget_tokens": 1024.0}}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16.0, "messages": None}),
    ],
)
def test_a_whole_number_may_be_written_as_a_fraction(live, path, fields):
    assert live.post(ask("hi", **fields), path).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"max_tokens": 2.5}, "max_tokens"), ({"stop_token_ids": [7.0, 8.5]}, "stop_token_ids[1]"), ({"n": "1.0"}, "n")],
)
def test_a_real_fraction_may_not(live, fields, param):
    assert refusal(live.post(ask("hi", **fields)))["param"] == param


def test_the_sdk_raises_its_own_classes(live):
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai.chat.completions.create(**ask("word " * 5000))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        live.openai.chat.completions.create(**{**ask("hi"), "model": "other"})


def test_errors_of_the_engine_before_the_headers(live):
    answer = live.post(ask("die at once"))
    error = refusal(answer, 503)
    assert error["code"] == "server_is_overloaded"
    seconds = int(answer.headers["retry-after"])
    assert 1 <= seconds <= 60
    assert int(answer.headers["retry-after-ms"]) == seconds * 1000
    refusal(live.post(ask("hi", stream=True)), 503)
    assert live.http.get("/ready").status_code == 503
    live.wait_until(lambda: live.http.get("/ready").status_code == 200)


def test_errors_of_the_engine_after_the_headers(live):
    *chunks, last = live.stream(ask("die soon"))
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert not any(choice["finish_reason"] for chunk in chunks for choice in chunk["choices"])
    live.wait_until(lambda: live.serving.state == "ready")
    with pytest.raises(openai.APIError, match="died"):
        for _ in live.openai.chat.completions.create(**ask("die soon"), stream=True):
            pass
    live.wait_until(lambda: live.serving.state == "ready")
    assert "error" in live.stream(ask("fail at the end"))[-1]


def test_a_failure_nobody_foresaw_says_its_request_id_and_no_more(live, monkeypatch, caplog):
    def fail(*_):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("server.chat.plan_chat", fail)
    answer = live.post(ask("hi"), headers={"x-request-id": "my-id"})
    error = refusal(answer, 500)
    assert answer.headers["x-request-id"] == "my-id"
    assert "my-id" in error["message"]
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_retrying_a_bad_request_is_discouraged(live):
    assert live.post(ask("hi", n=0)).headers["x-should-retry"] == "false"


def test_bodies_are_counted_while_they_arrive(checkpoint, tmp_path):
    with running(checkpoint, [{"output": "x"}], tmp_path, max_body_bytes=4096) as small:
        error = refusal(small.post(ask("x" * 5000)), 413)
        assert "4096 bytes" in error["message"]

        def chunks():
            for _ in range(100):
                yield b" " * 1000

        refusal(small.http.post("/v1/chat/completions", content=chunks(), headers=JSON), 413)
        assert small.post(ask("x")).status_code == 200


def test_a_full_queue_is_refused_with_a_time_to_come_back(checkpoint, tmp_path):
    script = [{"when": "slow", "output": "x " * 1000, "token_ms": 20}, {"output": "y"}]
    with running(checkpoint, script, tmp_path, max_num_requests=1, max_queued_requests=1) as busy:
        streams = [busy.http.build_request("POST", "/v1/chat/completions", json=ask("slow", stream=True)) for _ in "ab"]
        open_streams = [busy.http.send(request, stream=True) for request in streams]
        answer = busy.post(ask("slow", stream=True))
        assert refusal(answer, 503)["code"] == "server_is_overloaded"
        assert "max_queued_requests" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == str(math.ceil(UNKNOWN_S))
        # n choices are admitted together or not at all
        refusal(busy.post(ask("hi", n=2)), 503)
        # one that leaves while it waits makes room at once
        open_streams.pop().close()
        busy.wait_until(lambda: busy.engine.stats.num_waiting == 0)
        open_streams.append(busy.http.send(streams[1], stream=True))
        for stream in open_streams:
            stream.close()
        busy.wait_until(lambda: busy.engine.stats.num_running + busy.engine.stats.num_waiting == 0)
        assert busy.post(ask("hi")).status_code == 200
        # what an idle engine would not take either is no matter of time
        answer = busy.post(ask("hi", n=3))
        assert refusal(answer, 400)["param"] == "n"
        assert "max_num_requests" in answer.json()["error"]["message"]
        assert refusal(busy.post({"model": NAME, "prompt": ["a", "b"], "n": 2}, "/v1/completions"))["param"] == "n"


def test_the_time_to_come_back_is_that_of_the_latest_ends():
    now = [100.0]
    pace = Pace(lambda: now[0])
    pace.ended()
    assert pace.wait_s(1) == UNKNOWN_S
    for _ in range(40):
        now[0] += 2.0
        pace.ended()
    # sixteen ends in thirty seconds; and then nothing for as long again
    assert pace.wait_s(1) == 30.0 / 16
    now[0] += 34.0
    assert pace.wait_s(3) == 3 * 64.0 / 16


PAIRS = [
    (AuthenticationError("x"), router_errors.AuthError("x")),
    (PermissionDeniedError("x"), router_errors.ForbiddenError("x")),
    (NotFoundError("x"), router_errors.PathError("x")),
    (NotFoundError("x", param="model", code="model_not_found"), router_errors.ModelNotFoundError("x", ())),
    (MethodNotAllowedError("GET"), router_errors.MethodError("x")),
    (SlowRequestError("x"), router_errors.SlowRequestError("x")),
    (BodyTooLargeError("x"), router_errors.BodyTooLargeError("x")),
    (MediaTypeError("x"), router_errors.MediaTypeError("x")),
    (OverloadedError("x", 5), router_errors.UnavailableError("x")),
    (InternalError("id"), router_errors.GatewayError("x")),
]


@pytest.mark.parametrize(("ours", "gateway"), PAIRS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_fault_has_one_code_on_the_gateway_and_behind_it(ours, gateway, path):
    status, body = body_for(path, ours, "id")
    api = "messages" if path == "/v1/messages" else "chat"
    gateway_status, headers, raw = router_errors.error_response(gateway, api, "id")
    assert status == gateway_status
    without_text = [{**error["error"], "message": ""} for error in (body, json.loads(raw))]
    assert without_text[0] == without_text[1]
    # what a client does next
    assert ours.headers().get("x-should-retry") == headers.get("x-should-retry")
    assert ours.headers().get("retry-after") == headers.get("retry-after")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *("messages", "model", "temperature", "top_p", "top_k", "stop", "n", "seed", "logit_bias", "tools", "tool_choice"),
    *("response_format", "stream", "stream_options", "max_tokens", "chat_template_kwargs", "logprobs", "top_logprobs"),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=4))
def test_no_input_makes_a_500(live, fields):
    assert live.post({**ask("hi"), "max_tokens": 2, **fields}).status_code < 500


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": st.none() | st.text(max_size=8) | st.just([{"type": "text", "text": "part"}]),
        "reasoning_content": st.none() | st.text(max_size=4),
        "tool_calls": st.none() | st.lists(st.just({"function": {"name": "f", "arguments": "{"}}), max_size=2),
    },
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(MESSAGE, max_size=6))
def test_any_order_of_messages_renders_or_is_refused_in_words(live, messages):
    answer = live.post({"model": NAME, "messages": messages, "max_tokens": 2})
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert "user" in answer.json()["error"]["message"]
