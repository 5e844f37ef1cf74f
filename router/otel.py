"""Spans by OpenTelemetry, sent to a collector from a thread of its own. Needs the extra `otel`."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from config import Upstream
from router.trace import Trace, Tracing

SERVICE = "longlane-router"
LAST_SPANS_S = 2.0
_CONTEXT = TraceContextTextMapPropagator()


class OtelTracing(Tracing):
    """OTEL_* variables (service name, resource, sampler, headers of the collector) hold as the SDK reads them."""

    def __init__(
        self, exporter: SpanExporter, processor: Callable[[SpanExporter], SpanProcessor] = BatchSpanProcessor
    ) -> None:
        own = Resource.create({"service.name": SERVICE})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._exporter = exporter
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)

    def begin(self, method: str, name: str, headers: Mapping[str, str]) -> Trace:
        above = _CONTEXT.extract(headers, Context())
        span = self._tracer.start_span(
            f"{method} {name}", above, SpanKind.SERVER, attributes={"http.request.method": method}
        )
        return OtelTrace(self._tracer, span)

    async def aclose(self) -> None:
        # a collector that is away is asked again and again
        limit = asyncio.get_running_loop().call_later(LAST_SPANS_S, self._exporter.shutdown)
        await asyncio.to_thread(self._provider.shutdown)
        limit.cancel()


class OtelTrace(Trace):
    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())
        self._attempt: Span = INVALID_SPAN

    @contextmanager
    def attempt(self, upstream: Upstream, method: str) -> Iterator[None]:
        address = urlsplit(upstream.url)
        attributes = {
            "http.request.method": method,
            "server.address": address.hostname or "",
            "server.port": address.port or (443 if address.scheme == "https" else 80),
            "longlane.upstream": upstream.name,
        }
        span = self._tracer.start_span(f"{method} {upstream.name}", self._context, SpanKind.CLIENT, attributes)
        self._attempt = span
        try:
            yield
        except asyncio.CancelledError:
            span.set_attribute("longlane.cancelled", True)
            raise
        except Exception as error:
            _fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    def passed_on(self, headers: dict[str, str]) -> dict[str, str]:
        # the state that a client sent beside an invalid parent belongs to no trace
        told = {name: value for name, value in headers.items() if name not in _CONTEXT.fields}
        _CONTEXT.inject(told, set_span_in_context(self._attempt, Context()))
        return told

    def note_status(self, status: int) -> None:
        self._attempt.set_attribute("http.response.status_code", status)
        if status >= 400:
            _fail(self._attempt, str(status))

    def note_failure(self, error: Exception) -> None:
        _fail(self._attempt, type(error).__name__)

    def end(self, attributes: Mapping[str, Any], status: int | None) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})
        if status is not None and status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


def collector(endpoint: str) -> SpanExporter:
    """endpoint  base URL of a collector that takes OTLP over HTTP"""
    return OTLPSpanExporter(f"{endpoint}/v1/traces")


def _fail(span: Span, kind: str) -> None:
    # the kind only: a message could repeat what the client sent
    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)
