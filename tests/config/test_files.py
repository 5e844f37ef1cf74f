"""The ready files: presets, Prometheus, Grafana."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from config import EngineConfig, RouterConfig, ServerConfig, load
from engine import EngineInfo, EngineStats
from router.metrics import Metrics
from server.metrics import EngineCollector, ServerMetrics

CONFIG = Path(__file__).parents[2] / "config"
ALL = {"engine": EngineConfig, "server": ServerConfig, "router": RouterConfig}
DASHBOARD = json.loads((CONFIG / "grafana/dashboards/longlane.json").read_text())
METRIC = re.compile(r"\b(?:longlane|vllm)[_:][a-zA-Z0-9_:]+")


@pytest.mark.parametrize("preset", sorted((CONFIG / "presets").glob("*.toml")), ids=lambda path: path.stem)
def test_presets_hold_real_settings(preset):
    settings = load(ALL, ["--config", str(preset)], {})
    assert any(section != cls() for section, cls in zip(settings.values(), ALL.values(), strict=True))


def test_a_ready_gateway_with_keys_keeps_their_callers_apart():
    for preset in (CONFIG / "presets").glob("*.toml"):
        router = load(ALL, ["--config", str(preset)], {})["router"]
        assert router.keys_file is None or router.gateway_secret is not None, preset


def test_the_composed_vllm_tells_what_was_cached():
    compose = yaml.safe_load((CONFIG.parent / "docker-compose.yml").read_text())
    assert "--enable-prompt-tokens-details" in compose["services"]["vllm"]["command"]


class Engine:
    stats = EngineStats()
    info = EngineInfo("", 64, 1, "cpu", 0, 1, 64)
    state = "ready"


def exposed():
    """Every series that the gateway and the engine's server expose."""
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, "m")
    metrics.finished("stop")
    registry.register(EngineCollector(Engine(), "m"))
    families = [*registry.collect(), *Metrics().registry.collect()]
    names = {sample.name for family in families for sample in family.samples}
    # a labelled family without a child yet has no sample
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_dashboard_asks_only_for_what_is_exposed():
    asked = {
        name
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", [])
        for name in METRIC.findall(target["expr"])
    }
    asked |= {name for variable in DASHBOARD["templating"]["list"] for name in METRIC.findall(variable["query"])}
    assert len(asked) > 15
    assert asked <= exposed(), asked - exposed()


def test_dashboard_is_laid_out_and_finds_its_source():
    source = yaml.safe_load((CONFIG / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels if "datasource" in panel} == {source["uid"]}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_provisioned_folder_is_the_mounted_one():
    provider = yaml.safe_load((CONFIG / "grafana/provisioning/dashboards/longlane.yml").read_text())["providers"][0]
    compose = yaml.safe_load((CONFIG.parent / "docker-compose.yml").read_text())
    assert f"./config/grafana/dashboards:{provider['options']['path']}:ro" in compose["services"]["grafana"]["volumes"]


@pytest.mark.real
def test_promtool_accepts_the_configuration():
    assert shutil.which("promtool"), "Debian's prometheus is not installed"
    command = ["promtool", "check", "config", "--syntax-only", str(CONFIG / "prometheus/prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.real
def test_promtool_accepts_what_the_gateway_exposes():
    from prometheus_client import generate_latest

    metrics = Metrics()
    metrics.requests.labels("long", "chat", "200").inc()
    metrics.first_byte.labels("long").observe(0.1)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(metrics.registry), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
