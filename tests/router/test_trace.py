"""Spans: one for each request, one for each attempt, and none where nobody asked for them."""

import json
import subprocess
import sys
import time

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from config import ConfigError, RouterConfig, Upstream, load
from config.keys import Key, digest, generate, write_keys
from router import otel
from router.otel import OtelTracing
from router.tracing import start_tracing
from tests.router.live import eventually, running_gateway

CHAT = "/v1/chat/completions"
PRIVATE = "a word that no span repeats"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": PRIVATE}]}
TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n',
    b'data: {"choices":[],"usage":' + json.dumps(USAGE).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
)


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def traced(gateway, exporter):
    def start(**fields):
        return gateway(tracing=OtelTracing(exporter, SimpleSpanProcessor), **fields)

    return start


async def answers_whole(received, connection):
    await connection.answer(200, {"choices": [{"message": {"content": PRIVATE}}], "usage": USAGE})


async def resets(received, connection):
    connection.reset()
    raise ConnectionError


def spans_of(exporter, kind, count=1):
    def found():
        return [span for span in exporter.get_finished_spans() if span.kind is kind]

    eventually(lambda: len(found()) >= count)
    assert len(found()) == count
    return found()


def test_request_and_attempt_continue_the_trace_of_the_client(traced, upstream, client, exporter):
    long = upstream(answer=answers_whole)
    headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "tracestate": "vendor=1"}
    assert client.post(traced(long=long).url + CHAT, json=BODY, headers=headers).status_code == 200
    (server,), (attempt,) = spans_of(exporter, SpanKind.SERVER), spans_of(exporter, SpanKind.CLIENT)
    assert f"{server.context.trace_id:032x}" == f"{attempt.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == ABOVE
    assert attempt.parent.span_id == server.context.span_id
    # the upstream's own spans stand below the attempt
    sent = long.requests[0].headers
    assert sent["traceparent"] == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=1"


@pytest.mark.parametrize("is_stream", [False, True])
def test_span_tells_lane_model_upstream_status_and_counts(traced, upstream, client, exporter, is_stream):
    async def streams(received, connection):
        await connection.stream(*STREAM)

    long = upstream(answer=streams if is_stream else answers_whole)
    reply = client.post(traced(long=long).url + CHAT, json=BODY | {"stream": is_stream})
    (server,), (attempt,) = spans_of(exporter, SpanKind.SERVER), spans_of(exporter, SpanKind.CLIENT)
    assert server.name == "POST chat"
    told = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 3,
        "longlane.lane": "short",
        "longlane.reason": "length",
        "longlane.upstream": "engine",
        "longlane.key": "anyone",
        "longlane.request_id": reply.headers["x-request-id"],
    }
    assert dict(server.attributes) == told
    assert attempt.attributes["server.port"] == long.port
    assert attempt.attributes["http.response.status_code"] == 200
    assert server.start_time <= attempt.start_time <= attempt.end_time <= server.end_time


def test_no_span_holds_content_or_keys(traced, upstream, client, exporter, tmp_path):
    secret = generate()
    write_keys(tmp_path / "keys.toml", [Key(name="alice", sha256=digest(secret))])
    running = traced(long=upstream(answer=answers_whole), keys_file=tmp_path / "keys.toml")
    client.post(running.url + CHAT + "?q=hidden", json=BODY, headers={"authorization": f"Bearer {secret}"})
    (server,) = spans_of(exporter, SpanKind.SERVER)
    assert server.attributes["longlane.key"] == "alice"
    text = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert not any(word in text for word in (PRIVATE, secret, digest(secret), "sk-upstream", "hidden"))


def test_every_attempt_has_its_span(traced, upstream, client, exporter):
    running = traced(long=upstream(answer=answers_whole), short=upstream(answer=resets), health_interval_s=60)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    (server,) = spans_of(exporter, SpanKind.SERVER)
    failed, answered = spans_of(exporter, SpanKind.CLIENT, 2)
    assert (failed.name, answered.name) == ("POST vllm", "POST engine")
    assert (failed.status.status_code, failed.attributes["error.type"]) == (StatusCode.ERROR, "BrokenConnectionError")
    assert answered.status.status_code is server.status.status_code is StatusCode.UNSET


def test_failures_are_told_by_their_kind(traced, upstream, client, exporter):
    async def half(received, connection):
        await connection.stream(STREAM[0])

    url = traced(long=upstream(answer=half)).url
    client.post(url + CHAT, json=BODY | {"stream": True})
    (attempt,) = spans_of(exporter, SpanKind.CLIENT)
    assert (attempt.status.status_code, attempt.attributes["error.type"]) == (StatusCode.ERROR, "UpstreamError")
    client.post(url + CHAT, content=b"{", headers={"content-type": "application/json"})
    whole, refused = spans_of(exporter, SpanKind.SERVER, 2)
    assert whole.attributes["error.type"] == "upstream_error"
    # the caller's own mistake is none of the gateway
    assert (refused.attributes["http.response.status_code"], refused.status.status_code) == (400, StatusCode.UNSET)


def test_attempt_of_a_client_that_left_ends(traced, upstream, client, exporter):
    async def never_ends(received, connection):
        await connection.start_stream()
        await connection.chunk(STREAM[0])
        await connection.closed()

    url = traced(long=upstream(answer=never_ends)).url
    with client.stream("POST", url + CHAT, json=BODY | {"stream": True}) as response:
        next(response.iter_raw())
    (server,), (attempt,) = spans_of(exporter, SpanKind.SERVER), spans_of(exporter, SpanKind.CLIENT)
    assert attempt.attributes["longlane.cancelled"] and server.attributes["longlane.client_gone"]


def test_state_beside_an_invalid_parent_goes_nowhere(traced, upstream, client, exporter):
    long = upstream(answer=answers_whole)
    client.post(traced(long=long).url + CHAT, json=BODY, headers={"traceparent": "00-x", "tracestate": "vendor=1"})
    (attempt,) = spans_of(exporter, SpanKind.CLIENT)
    assert long.requests[0].headers["traceparent"].split("-")[2] == f"{attempt.context.span_id:016x}"
    assert "tracestate" not in long.requests[0].headers


def test_checks_of_health_leave_no_span(traced, upstream, client, exporter):
    url = traced(long=upstream()).url
    for path in ("/health", "/ready", "/v1/models"):
        assert client.get(url + path).status_code == 200
    (server,) = spans_of(exporter, SpanKind.SERVER)
    assert server.name == "GET models"


def test_untraced_passes_the_context_of_the_client(gateway, upstream, client):
    long = upstream(answer=answers_whole)
    headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "tracestate": "vendor=1"}
    client.post(gateway(long=long).url + CHAT, json=BODY, headers=headers)
    assert {name: long.requests[0].headers[name] for name in headers} == headers


def test_collector_gets_the_spans(gateway, upstream, client):
    """The official protobufs read what arrives, the last of it before the gateway has ended."""
    collector = upstream(answer=takes_spans)
    running = gateway(long=upstream(answer=answers_whole), otlp_endpoint=collector.url)
    assert client.post(running.url + CHAT, json=BODY).status_code == 200
    eventually(lambda: running.num_open == 0)
    running.app._tracing._provider.force_flush()
    sent = [ExportTraceServiceRequest.FromString(one.body) for one in collector.requests]
    assert {one.target for one in collector.requests} == {"/v1/traces"}
    found = [resource for request in sent for resource in request.resource_spans]
    names = {attribute.key: attribute.value.string_value for attribute in found[0].resource.attributes}
    assert names["service.name"] == "longlane-router"
    spans = {span.name: span for one in found for scope in one.scope_spans for span in scope.spans}
    assert set(spans) == {"POST chat", "POST engine"}
    assert spans["POST engine"].parent_span_id == spans["POST chat"].span_id


async def takes_spans(received, connection):
    await connection.answer(200, b"", media_type="application/x-protobuf")


def test_collector_that_is_away_delays_neither_request_nor_end(threads, upstream, client, monkeypatch):
    monkeypatch.setattr(otel, "LAST_SPANS_S", 0.2)
    engine = Upstream(name="engine", url=upstream(answer=answers_whole).url, lane="long")
    with running_gateway(threads, engine, otlp_endpoint="http://127.0.0.1:9") as running:
        started = time.monotonic()
        assert client.post(running.url + CHAT, json=BODY).status_code == 200
    assert time.monotonic() - started < 2


def test_without_an_endpoint_no_exporter_is_loaded():
    code = "import sys, router.app, config\nrouter.app.Gateway(config.RouterConfig())\n"
    code += "assert not {'router.otel', 'opentelemetry.exporter', 'opentelemetry.sdk.trace'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_endpoint_without_the_extra_is_told(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "router.otel", None)
    tracing = start_tracing(RouterConfig(otlp_endpoint="http://127.0.0.1:4318"))
    assert tracing.begin("POST", "chat", {}).passed_on({"a": "b"}) == {"a": "b"}
    assert "pip install '.[otel]' where it lies" in caplog.text


def test_endpoint_is_checked():
    with pytest.raises(ConfigError, match=r"otlp_endpoint.*must start with http"):
        load({"router": RouterConfig}, ["--otlp-endpoint", "collector:4318"], {})
    assert RouterConfig(otlp_endpoint="http://c:4318/v1/traces").otlp_endpoint == "http://c:4318"
