"""Counters and gauges of the gateway. Labels take configured names only, never what a client sent."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFB_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 2560)
DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter(
            "longlane_router_requests",
            "Answered requests by lane (none where it was refused before), API and status",
            ["lane", "api", "status"],
            registry=registry,
        )
        self.decisions = Counter(
            "longlane_router_lane_decisions", "Lane choices by reason", ["lane", "reason"], registry=registry
        )
        self.in_flight = Gauge(
            "longlane_router_in_flight", "Requests at an upstream right now", ["upstream"], registry=registry
        )
        self.open_requests = Gauge("longlane_router_open_requests", "Requests of clients right now", registry=registry)
        self.first_byte = Histogram(
            "longlane_router_time_to_first_byte_seconds",
            "From the request's head to the response's head",
            ["lane"],
            buckets=TTFB_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "longlane_router_request_duration_seconds",
            "From the request's head to the end of the response",
            ["lane"],
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.healthy = Gauge(
            "longlane_router_upstream_healthy", "1 while checks succeed", ["upstream", "lane"], registry=registry
        )
        self.failovers = Counter(
            "longlane_router_failovers",
            "Requests that left an upstream before its response headers",
            ["upstream", "reason"],
            registry=registry,
        )
        self.broken_streams = Counter(
            "longlane_router_broken_streams",
            "Responses that an upstream did not finish",
            ["upstream"],
            registry=registry,
        )
        self.client_gone = Counter(
            "longlane_router_client_gone", "Requests whose client left before the end", registry=registry
        )
        self.replaced = Counter(
            "longlane_router_replaced_requests",
            "Requests that ended for a retry of their own client, which waited for it",
            registry=registry,
        )
        self.shared_limits_away = Gauge(
            "longlane_router_shared_limits_away",
            "1 while Redis is away and requests are admitted by this gateway's own limits, or refused",
            registry=registry,
        )
        self.reloads = Counter(
            "longlane_router_config_reloads", "Settings read again, by what came of it", ["result"], registry=registry
        )
        self.breaker_open = Gauge(
            "longlane_router_breaker_open",
            "1 while an upstream gets no requests because its last ones failed",
            ["upstream"],
            registry=registry,
        )

    def forget(self, upstream: str, lane: str) -> None:
        """An upstream that is gone is neither healthy nor away."""
        self.healthy.remove(upstream, lane)
        self.breaker_open.remove(upstream)
