"""docker-compose.yml and the Dockerfiles, checked without a Docker engine."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docker-compose.yml"
NEEDED = {
    "LONGLANE_KEYS_DIR": "./keys",
    "LONGLANE_ENGINE_KEY": "ll-x",
    "LONGLANE_GATEWAY_SECRET": "s",
    "LONGLANE_ADMIN_TOKEN": "t",
    "GRAFANA_PASSWORD": "p",
    "LONGLANE_MODEL_DIR": "/models/m",
}
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load(FILE.read_text())["services"]


def filled(text, values=NEEDED):
    """The text with its variables put in, as compose does it."""

    def value(match):
        name, kind, rest = match.groups()
        assert name in values or kind == "-", f"{name} has no value and no default"
        return values.get(name, rest or "")

    return VARIABLE.sub(value, text)


def environment(service):
    return {name: filled(str(value)) for name, value in service.get("environment", {}).items()}


def test_services_are_those_of_the_stack(services):
    assert set(services) == {"gateway", "engine", "prometheus", "grafana", "vllm"}
    assert [name for name, service in services.items() if "profiles" in service] == ["vllm"]


def test_every_mounted_path_exists(services):
    mounts = [filled(mount).split(":")[0] for service in services.values() for mount in service["volumes"]]
    named = set(yaml.safe_load(FILE.read_text())["volumes"])
    own = [mount for mount in mounts if mount not in named and mount not in NEEDED.values()]
    assert len(own) == 3
    assert all((ROOT / mount).exists() for mount in own), own


def test_what_is_secret_has_no_default(services):
    required = {name for name, kind, _ in VARIABLE.findall(FILE.read_text()) if kind == "?"}
    assert required == set(NEEDED)
    for name, value in NEEDED.items():
        with pytest.raises(AssertionError, match=name):
            filled(FILE.read_text(), {other: v for other, v in NEEDED.items() if other != name})
        assert value


def test_only_the_gateway_and_grafana_are_published(services):
    published = {name: [filled(port) for port in service.get("ports", [])] for name, service in services.items()}
    assert published.pop("gateway") == ["127.0.0.1:8000:8000"]
    assert published.pop("grafana") == ["127.0.0.1:3000:3000"]
    assert not any(published.values())


def test_every_service_has_a_healthcheck_and_time_to_drain(services):
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert int(service["stop_grace_period"].rstrip("s")) > 30
        assert service["init"] is True


def test_gpus_are_reserved(services):
    for name in ("engine", "vllm"):
        device = services[name]["deploy"]["resources"]["reservations"]["devices"][0]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "8100" in services["vllm"]["expose"]
    assert services["vllm"]["command"][2:4] == ["--port", "8100"]


@pytest.mark.parametrize(("name", "section"), [("gateway", "router"), ("engine", "server")])
def test_settings_in_the_environment_are_real_ones(services, name, section):
    from config import EngineConfig, RouterConfig, ServerConfig, load

    sections = {"router": {"router": RouterConfig}, "server": {"engine": EngineConfig, "server": ServerConfig}}[section]
    values = environment(services[name])
    settings = load(sections, [], values)[section]
    assert settings.keys_file == Path("/keys/keys.toml")
    with pytest.raises(Exception, match="keys_file"):
        load(sections, [], {key: value for key, value in values.items() if "KEYS_FILE" not in key})


def test_gateway_reaches_the_other_services_by_their_names(services):
    values = environment(services["gateway"])
    assert values["LONGLANE_ROUTER_LONG_URL"] == "http://engine:8001"
    scraped = yaml.safe_load((ROOT / "config/prometheus/prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for config in job["static_configs"] for target in config["targets"]]
    for target in targets:
        name, port = target.split(":")
        assert port in services[name]["expose"], target


def test_dockerfiles_copy_what_exists(services):
    for name in ("gateway", "engine"):
        file = ROOT / services[name]["build"]["dockerfile"]
        copied = [
            word for line in re.findall(r"^COPY (.*)$", file.read_text(), re.MULTILINE) for word in line.split()[:-1]
        ]
        assert copied
        assert all((ROOT / path).exists() for path in copied), copied
        module = re.search(r'ENTRYPOINT \["python", "-m", "(\w+)"\]', file.read_text())[1]
        assert (ROOT / module / "__main__.py").exists()


def test_gateway_image_installs_what_the_gateway_imports():
    dockerfile = (ROOT / "router/Dockerfile").read_text()
    words = dockerfile.split("constraints.txt \\\n")[1].split("\nCOPY")[0].replace("\\\n", " ").split()
    installed = {word.replace("-", "_") for word in words}
    imported = set()
    for file in [*(ROOT / "router").rglob("*.py"), *(ROOT / "config").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"router", "config"}
    # the packages of OpenTelemetry share one module
    assert foreign - {"opentelemetry"} <= installed
    assert {"opentelemetry_sdk", "opentelemetry_exporter_otlp_proto_http"} <= installed
    pinned = {line.split("==")[0].replace("-", "_") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert installed <= pinned


@pytest.mark.real
@pytest.mark.parametrize("flags", [(), ("--profile", "vllm")])
def test_docker_compose_accepts_the_file(flags):
    assert shutil.which("docker-compose"), "Debian's docker-compose is not installed"
    command = ["docker-compose", "-f", str(FILE), *flags, "config", "-q"]
    done = subprocess.run(command, env=os.environ | NEEDED, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    missing = {name: value for name, value in NEEDED.items() if name != "LONGLANE_KEYS_DIR"}
    done = subprocess.run(command, env=os.environ | missing, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "router.keys" in done.stderr
