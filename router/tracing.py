"""Chooses between spans and none."""

import logging

from config import RouterConfig
from router.trace import Tracing

_log = logging.getLogger("longlane.router")


def start_tracing(config: RouterConfig) -> Tracing:
    if config.otlp_endpoint is None:
        return Tracing()
    try:
        # here, so that a gateway without spans needs no OpenTelemetry and does not load it
        from router.otel import OtelTracing, collector
    except ImportError as error:
        _log.error("otlp_endpoint is set, but there are no spans: %s; pip install '.[otel]' where it lies", error)
        return Tracing()
    return OtelTracing(collector(config.otlp_endpoint))
