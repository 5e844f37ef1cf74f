"""The manifests of config/kubernetes against Kubernetes' own schemas, and against what the programs do."""

import copy
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from config import ConfigError, EngineConfig, RouterConfig, ServerConfig, load
from config.keys import read_keys
from config.router import read_upstreams
from router.discovery import known_upstreams

FOLDER = Path(__file__).parent.parent / "config/kubernetes"
APPLIED = ("namespace.yaml", "redis.yaml", "gateway.yaml", "engine.yaml")
# a preStop that sleeps came with 1.30
VERSIONS = ("1.30", kubernetes_validate.latest_version())


def documents(*names):
    return [one for name in names for one in yaml.safe_load_all((FOLDER / name).read_text())]


MANIFESTS = documents(*APPLIED, "secrets.example.yaml")


def title(manifest):
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def find(kind, name):
    return next(one for one in MANIFESTS if title(one) == f"{kind}-{name}")


def pod(kind, name):
    return find(kind, name)["spec"]["template"]["spec"]


def secret_file(name, file):
    return find("Secret", name)["stringData"][file]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=title)
def test_manifest_follows_the_schema(manifest, version):
    assert kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_refuses_what_is_wrong():
    wrong = copy.deepcopy(find("StatefulSet", "engine"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_everything_is_applied():
    custom = documents("kustomization.yaml")[0]
    assert custom["resources"] == list(APPLIED)
    assert [one["name"] for one in custom["configMapGenerator"]] == ["gateway"]
    assert all((FOLDER / file).exists() for one in custom["configMapGenerator"] for file in one["files"])
    images = {image["name"] for image in custom["images"]}
    used = {
        pod("Deployment", "gateway")["containers"][0]["image"],
        pod("StatefulSet", "engine")["containers"][0]["image"],
    }
    assert images == used


WORKLOADS = [("Deployment", "gateway"), ("StatefulSet", "engine"), ("Deployment", "redis")]


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_selectors_find_their_pods_and_ports(kind, name):
    labels = find(kind, name)["spec"]["template"]["metadata"]["labels"]
    assert find(kind, name)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in pod(kind, name)["containers"][0]["ports"]}
    mine = [
        one
        for one in MANIFESTS
        if one["kind"] == "Service" and one["spec"]["selector"]["app.kubernetes.io/name"] == name
    ]
    assert mine
    for service in mine:
        assert service["spec"]["selector"].items() <= labels.items()
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        told = pod(kind, name)["containers"][0].get(probe, {})
        assert (told.get("httpGet") or told.get("tcpSocket") or {"port": next(iter(ports))})["port"] in ports
    policies = [one for one in MANIFESTS if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == name]
    assert all(port["port"] in ports for one in policies for rule in one["spec"]["ingress"] for port in rule["ports"])


@pytest.mark.parametrize(("kind", "name"), WORKLOADS)
def test_what_is_mounted_and_read_exists(kind, name):
    container = pod(kind, name)["containers"][0]
    volumes = {volume["name"]: volume for volume in pod(kind, name).get("volumes", ())}
    assert {mount["name"] for mount in container.get("volumeMounts", ())} == set(volumes)
    secrets = [volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume]
    assert all(find("Secret", secret) for secret in secrets)
    for variable in container["env"]:
        if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
            assert reference["key"] in find("Secret", reference["name"])["stringData"]
    if "model" in volumes:
        assert find("PersistentVolumeClaim", volumes["model"]["persistentVolumeClaim"]["claimName"])


def environment(kind, name):
    """Variables as the kubelet sets them, Secrets filled with words."""
    variables = pod(kind, name)["containers"][0]["env"]
    values = {variable["name"]: variable.get("value", f"secret-of-{variable['name']}") for variable in variables}
    return {key: value.replace("$(REDIS_PASSWORD)", values.get("REDIS_PASSWORD", "")) for key, value in values.items()}


def gateway_settings():
    return load(
        {"router": RouterConfig}, ["--config", str(FOLDER / "longlane.toml")], environment("Deployment", "gateway")
    )


def engine_settings():
    return load({"engine": EngineConfig, "server": ServerConfig}, [], environment("StatefulSet", "engine"))


def test_settings_are_those_of_the_programs():
    router, engine = gateway_settings()["router"], engine_settings()
    assert router.gateway_secret.get_secret_value() == "secret-of-LONGLANE_ROUTER_GATEWAY_SECRET"
    assert router.redis_url.get_secret_value() == "redis://:secret-of-REDIS_PASSWORD@redis:6379/0"
    assert engine["engine"].max_model_len == 262_144
    mounts = {
        mount["mountPath"]
        for kind, name in WORKLOADS
        for mount in pod(kind, name)["containers"][0].get("volumeMounts", ())
    }
    for path in (router.keys_file, router.upstreams_file, engine["server"].keys_file, Path(engine["engine"].model)):
        assert str(path.parent) in mounts, path
    with pytest.raises(ConfigError, match="keys_file"):
        load({"server": ServerConfig}, [], {"LONGLANE_SERVER_HOST": "0.0.0.0"})


def test_gateway_reaches_every_engine_by_the_headless_service(tmp_path):
    for text in ((FOLDER / "upstreams.toml").read_text(), secret_file("gateway-upstreams", "upstreams.toml")):
        (tmp_path / "upstreams.toml").write_text(text)
        config = gateway_settings()["router"].model_copy(update={"upstreams_file": tmp_path / "upstreams.toml"})
        (engine,) = known_upstreams(config)
        assert (engine.name, engine.lane, engine.discover, engine.url) == (
            "engine",
            "long",
            "dns",
            "http://engine:8001",
        )
        assert engine.key is not None
    assert find("Service", "engine")["spec"]["clusterIP"] == "None"
    assert find("StatefulSet", "engine")["spec"]["serviceName"] == "engine"
    # the lines about vLLM are comments, and right once they are none
    lines = (FOLDER / "upstreams.toml").read_text().splitlines()
    start = lines.index("# [[upstreams]]")
    (tmp_path / "upstreams.toml").write_text("\n".join(line.removeprefix("# ") for line in lines[start:]))
    assert [one.lane for one in read_upstreams(tmp_path / "upstreams.toml")] == ["short"]


@pytest.mark.parametrize("name", ["gateway-keys", "engine-keys"])
def test_example_keys_are_read(tmp_path, name):
    (tmp_path / "keys.toml").write_text(secret_file(name, "keys.toml"))
    assert len(read_keys(tmp_path / "keys.toml")) == 1


def test_streams_end_before_their_pod_does():
    router, engine = gateway_settings()["router"], engine_settings()
    longest_prefill_s = engine["engine"].max_model_len / router.slowest_prefill_tokens_per_s
    for kind, name, drain_s in (
        ("Deployment", "gateway", router.drain_s),
        ("StatefulSet", "engine", engine["server"].drain_s),
    ):
        before_s = pod(kind, name)["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert drain_s > longest_prefill_s
        assert pod(kind, name)["terminationGracePeriodSeconds"] >= before_s + drain_s + 10
        if name == "engine":
            # CoreDNS keeps a name for 30 s
            assert before_s >= 30 + router.discovery_interval_s


def test_load_ends_no_pod():
    for kind, name in WORKLOADS[:2]:
        container = pod(kind, name)["containers"][0]
        liveness = container["livenessProbe"]
        # /health answers whatever the engine does
        assert liveness["httpGet"]["path"] == "/health"
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60
        budget = find("PodDisruptionBudget", name)["spec"]
        assert budget["maxUnavailable"] == 1
        assert budget["selector"]["matchLabels"] == find(kind, name)["spec"]["selector"]["matchLabels"]
    assert pod("StatefulSet", "engine")["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod("StatefulSet", "engine")["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_no_pod_has_more_rights_than_it_needs():
    for kind, name in WORKLOADS:
        assert pod(kind, name)["securityContext"]["runAsNonRoot"] is True
        assert pod(kind, name)["automountServiceAccountToken"] is False
        rights = pod(kind, name)["containers"][0]["securityContext"]
        assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]


def test_examples_of_vllm_agree_with_the_gateway():
    lines = (FOLDER / "upstreams.toml").read_text()
    limit = int(next(line for line in lines.splitlines() if "max_model_len" in line).partition("=")[2])
    chart = documents("vllm-values.yaml")[0]["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]
    ray = documents("ray-serve.yaml")[0]["spec"]
    (application,) = yaml.safe_load(ray["serveConfigV2"])["applications"]
    (model,) = application["args"]["llm_configs"]
    assert chart["maxModelLen"] == model["engine_kwargs"]["max_model_len"] == limit
    assert "--enable-prompt-tokens-details" in chart["extraArgs"]
    assert model["engine_kwargs"]["enable_prompt_tokens_details"] is True
    for group in (ray["rayClusterConfig"]["headGroupSpec"], *ray["rayClusterConfig"]["workerGroupSpecs"]):
        template = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": group["template"]["spec"]}
        assert kubernetes_validate.validate(template, VERSIONS[-1], strict=True)


def test_page_names_every_file():
    page = (FOLDER / "README.md").read_text()
    for file in FOLDER.iterdir():
        assert file.name == "README.md" or f"{file.name}" in page, file
    # the time that the page tells
    assert "1,200 s" in page and gateway_settings()["router"].drain_s == 1200
