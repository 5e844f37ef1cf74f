"""What the server counts itself."""

import time

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from server.errors import BadRequestError
from server.metrics import ServerMetrics
from server.protocol import MAX_FIELDS, ChatRequest, parse


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
