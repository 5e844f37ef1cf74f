"""Prometheus series under the names that vLLM's dashboards know."""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from engine import Engine, EngineDiedError, EngineStats
from server.pace import Pace
from server.protocol import HARMLESS

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
GAP_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
LABELS = ("model_name", "engine")
ENGINE_LABEL = "0"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def token_buckets(longest: int = 1_048_576) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to `longest`."""
    steps = (base * 10**power for power in range(8) for base in (1, 2, 5))
    return tuple(step for step in steps if step <= longest)


class EngineCollector(Collector):
    """The engine's own counts, read when somebody asks. Old and new names stand side by side."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._labels = (model_name, ENGINE_LABEL)

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        used = (stats.num_kv_blocks - stats.num_free_kv_blocks) / stats.num_kv_blocks if stats.num_kv_blocks else 0.0
        yield self._gauge("vllm:num_requests_running", "Requests that the engine works on.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for a place.", stats.num_waiting)
        yield self._gauge("vllm:num_requests_swapped", "Always 0: admitted requests are never swapped out.", 0)
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of KV blocks in use, 0 to 1.", used)
        yield self._counter("vllm:num_preemptions", "Always 0: admitted requests are never preempted.", 0)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens proposed by MTP.", stats.num_draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", stats.num_accepted_tokens)
        yield self._counter("longlane:engine_steps", "Steps since the engine started.", stats.num_steps)
        yield self._counter("longlane:engine_aborted", "Requests aborted in the engine.", stats.num_aborted)
        yield self._gauge("longlane:memory_peak_bytes", "Most memory that the engine has held.", stats.peak_bytes)
        yield self._planned()
        yield self._sources(stats)
        yield from self._tiers(stats)
        yield self._gauge("longlane:engine_ready", "1 when the engine takes requests.", self._engine.state == "ready")

    def _sources(self, stats: EngineStats) -> CounterMetricFamily:
        brought = stats.num_host_tokens
        values = {
            "local_compute": stats.num_prompt_tokens,
            "local_cache_hit": stats.num_cached_tokens - brought,
            "external_kv_transfer": brought,
        }
        about = "Prompt tokens: computed, reused on the device, and reused after they were brought back to it."
        return self._counters("vllm:prompt_tokens_by_source", about, "source", values)

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        """Of the prefix cache outside the device."""

        def by_tier(host: int, disk: int) -> dict[str, int]:
            return {"host": host, "disk": disk}

        held = GaugeMetricFamily("longlane:cache_tier_bytes", "Bytes that a tier holds.", labels=(*LABELS, "tier"))
        for tier, num_bytes in by_tier(stats.host_bytes, stats.disk_bytes).items():
            held.add_metric((*self._labels, tier), num_bytes)
        yield held
        for name, about, values in (
            ("hit_tokens", "Tokens that came from a tier.", by_tier(stats.num_host_tokens, stats.num_disk_tokens)),
            ("evictions", "What made room for others.", by_tier(stats.num_host_evicted, stats.num_disk_evicted)),
            (
                "damaged",
                "What was not as it had been written.",
                by_tier(stats.num_host_damaged, stats.num_disk_damaged),
            ),
        ):
            yield self._counters(f"longlane:cache_tier_{name}", about, "tier", values)
        yield self._counter("longlane:cache_tier_dropped", "What found no room in a tier.", stats.num_tier_dropped)
        about = "Files that could not be read, written or removed."
        yield self._counter("longlane:cache_disk_failures", about, stats.num_disk_failures)

    def _counters(self, name: str, about: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, about, labels=(*LABELS, label))
        for value, count in values.items():
            family.add_metric((*self._labels, value), count)
        return family

    def _planned(self) -> GaugeMetricFamily:
        """What the engine laid out at its start; nothing before it was ready for the first time."""
        about = "Memory that the engine planned at its start, by use."
        family = GaugeMetricFamily("longlane:memory_planned_bytes", about, labels=(*LABELS, "use"))
        with contextlib.suppress(EngineDiedError):
            for use, num_bytes in self._engine.info.planned_bytes.items():
                family.add_metric((*self._labels, use), num_bytes)
        return family

    def _gauge(self, name: str, about: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, about, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, about: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, about, labels=LABELS)
        family.add_metric(self._labels, value)
        return family


class TokenTimes(Collector):
    """Tokens and the time between them, counted for every token: so in plain numbers, and under all names at once."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._created = time.time()
        self._num_tokens = 0
        self._sum_s = 0.0
        # of each bucket alone
        self._counts = [0] * (len(GAP_BUCKETS) + 1)

    def count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens

    def observe_gap(self, seconds: float) -> None:
        self._sum_s += seconds
        self._counts[bisect_left(GAP_BUCKETS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated.", labels=LABELS)
        tokens.add_metric(self._labels, self._num_tokens, self._created)
        yield tokens
        edges = [*map(floatToGoString, GAP_BUCKETS), "+Inf"]
        for name in ("inter_token_latency", "time_per_output_token"):
            family = HistogramMetricFamily(f"vllm:{name}_seconds", "Time between two tokens.", labels=LABELS)
            family.add_metric(self._labels, list(zip(edges, accumulate(self._counts), strict=True)), self._sum_s)
            named = dict(zip(LABELS, self._labels, strict=True))
            family.add_sample(f"{family.name}_created", named, self._created)
            yield family


class ServerMetrics:
    """What the server itself counts; nothing is labelled by what a client writes."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self.pace = Pace()
        self._model = (model_name, ENGINE_LABEL)

        def counter(name: str, about: str) -> Counter:
            return Counter(name, about, LABELS, registry=registry).labels(*self._model)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, LABELS, buckets=buckets, registry=registry).labels(*self._model)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.")
        self.tokens = TokenTimes(self._model)
        registry.register(self.tokens)
        self.cache_queries = [
            counter(f"vllm:{old}prefix_cache_queries", "Prompt tokens looked up.") for old in ("", "gpu_")
        ]
        self.cache_hits = [counter(f"vllm:{old}prefix_cache_hits", "Prompt tokens found.") for old in ("", "gpu_")]
        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.mean_token_gap = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between two tokens of a request.", GAP_BUCKETS
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS)
        self.prefill_time = histogram("vllm:request_prefill_time_seconds", "Admission to first token.", LATENCY_BUCKETS)
        self.decode_time = histogram("vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS)
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", token_buckets())
        self.request_output = histogram("vllm:request_generation_tokens", "Tokens of an answer.", token_buckets())
        self.request_limit = histogram("vllm:request_params_max_tokens", "Output limit of a request.", token_buckets())
        self.choices = histogram("vllm:request_params_n", "Choices asked for.", CHOICE_BUCKETS)
        self._finished = Counter(
            "vllm:request_success", "Finished generations.", (*LABELS, "finished_reason"), registry=registry
        )
        self._http = Counter(
            "http_requests", "Requests by path, method and status.", ("handler", "method", "status"), registry=registry
        )
        self._ignored = Counter(
            "longlane:ignored_fields", "Request fields without effect, by name.", ("field",), registry=registry
        )

    def finished(self, reason: str) -> None:
        self.pace.ended()
        self._finished.labels(*self._model, reason).inc()

    def answered(self, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, str(status)).inc()

    def count_ignored(self, fields: Sequence[str]) -> None:
        """A known name counts once, all others together: a body may hold millions of them."""
        known = HARMLESS.intersection(fields)
        for field in known:
            self._ignored.labels(field).inc()
        if others := len(fields) - len(known):
            self._ignored.labels("other").inc(others)

    def text(self) -> bytes:
        return generate_latest(self._registry)


async def metrics_page(request: Request) -> Response:
    return Response(request.app.state.metrics.text(), headers={"content-type": CONTENT_TYPE})
