"""What the server counts itself."""

import time
from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from engine import EngineDiedError, EngineInfo, EngineStats
from server.errors import BadRequestError
from server.metrics import EngineCollector, ServerMetrics
from server.protocol import MAX_FIELDS, ChatRequest, parse

TIER_SERIES = ("bytes", "hit_tokens_total", "evictions_total", "damaged_total")


def test_ignored_fields_count_by_known_name_or_together():
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, "m")
    fields = ["user", "metadata", *(f"field{number}" for number in range(1_000_000))]
    started = time.process_time()
    metrics.count_ignored(fields)
    assert time.process_time() - started < 1
    counts = {
        name: registry.get_sample_value("longlane:ignored_fields_total", {"field": name})
        for name in ("user", "metadata", "other", "store")
    }
    assert counts == {"user": 1, "metadata": 1, "other": 1_000_000, "store": None}


def test_a_body_of_very_many_fields_is_refused():
    body = {"messages": []} | {f"field{number}": 1 for number in range(MAX_FIELDS - 1)}
    _, unknown = parse(msgspec.json.encode(body), ChatRequest)
    assert len(unknown) == MAX_FIELDS - 1
    with pytest.raises(BadRequestError, match=f"{MAX_FIELDS + 1} fields"):
        parse(msgspec.json.encode(body | {"more": 1}), ChatRequest)


def test_tiers_of_the_cache_are_told_apart():
    stats = EngineStats(num_prompt_tokens=10, num_cached_tokens=700, num_host_tokens=640, num_disk_tokens=64)
    stats = replace(stats, host_bytes=5, disk_bytes=6, num_host_evicted=1, num_disk_damaged=2, num_disk_failures=3)
    started = Started(None)
    started.stats = stats
    registry = CollectorRegistry()
    registry.register(EngineCollector(started, "m"))

    def value(name, **more):
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **more})

    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    assert [value("vllm:prompt_tokens_by_source_total", source=source) for source in sources] == [10, 60, 640]
    both = [[value(f"longlane:cache_tier_{name}", tier=tier) for tier in ("host", "disk")] for name in TIER_SERIES]
    assert both == [[5, 6], [640, 64], [1, 0], [0, 2]]
    assert value("longlane:cache_disk_failures_total") == 3


class Started:
    """An engine as metrics see it."""

    state, stats = "ready", EngineStats(peak_bytes=70)

    def __init__(self, info):
        self._info = info

    @property
    def info(self):
        if self._info is None:
            raise EngineDiedError("the engine is loading")
        return self._info


def test_planned_memory_stands_beside_its_peak():
    planned = {"weights: experts": 40, "KV blocks": 30}
    info = EngineInfo("dir", 64, 10, "cpu", 0, 1, 64, planned)
    registry = CollectorRegistry()
    registry.register(EngineCollector(Started(info), "m"))
    labels = {"model_name": "m", "engine": "0"}
    found = {use: registry.get_sample_value("longlane:memory_planned_bytes", labels | {"use": use}) for use in planned}
    assert found == planned
    assert registry.get_sample_value("longlane:memory_peak_bytes", labels) == 70


def test_nothing_is_planned_before_the_engine_is_ready():
    registry = CollectorRegistry()
    registry.register(EngineCollector(Started(None), "m"))
    assert not [s for family in registry.collect() for s in family.samples if "planned" in s.name]
