"""Upstreams and settings that change while the gateway runs."""

import asyncio
import signal

import httpx
import pytest

from config import ConfigError, RouterConfig, Upstream, read_upstreams
from router.discovery import Discovery, expand, known_upstreams
from router.reload import Reloader
from tests.router.live import eventually
from tests.router.test_main import Process

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def table(name, url, lane="long", **fields):
    values = {"name": name, "url": url, "lane": lane} | fields
    return "\n".join(["[[upstreams]]", *(f"{key} = {value!r}" for key, value in values.items())]).replace(
        "True", "true"
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "upstreams.toml"
    path.write_text("")
    return path


def test_file_of_upstreams_is_read_again_and_a_bad_one_changes_nothing(gateway, upstream, client, file, caplog):
    first, second = upstream(), upstream()
    running = gateway(upstreams_file=file, discovery_interval_s=0.05)
    url = running.url + CHAT
    assert client.post(url, json=BODY).status_code == 503
    file.write_text(table("one", first.url))
    eventually(lambda: client.post(url, json=BODY).status_code == 200)
    file.write_text(table("one", first.url, wieght=2))
    eventually(lambda: "did you mean weight?" in caplog.text)
    assert client.post(url, json=BODY).status_code == 200
    file.unlink()
    eventually(lambda: "No such file" in caplog.text)
    assert client.post(url, json=BODY).status_code == 200
    file.write_text(table("two", second.url))
    eventually(lambda: list(running.app.workers) == ["two"])
    eventually(lambda: client.post(url, json=BODY).status_code == 200 and len(second.requests) > 0)
    # one complaint a fault, however often it is looked at
    assert caplog.text.count("did you mean weight?") == caplog.text.count("No such file") == 1


def test_request_in_flight_outlives_its_upstream(gateway, upstream, client, file):
    async def slow(received, connection):
        await connection.stream(b"data: 1\n\n", b"data: [DONE]\n\n", pause_s=0.6)

    first, second = upstream(answer=slow), upstream()
    file.write_text(table("one", first.url))
    running = gateway(upstreams_file=file, discovery_interval_s=0.05)
    with client.stream("POST", running.url + CHAT, json=BODY) as response:
        events = response.iter_raw()
        assert next(events) == b"data: 1\n\n"
        file.write_text(table("two", second.url))
        eventually(lambda: list(running.app.workers) == ["two"])
        assert b"".join(events) == b"data: [DONE]\n\n"
    metrics = running.app.metrics.registry
    assert metrics.get_sample_value("longlane_router_upstream_healthy", {"upstream": "one", "lane": "long"}) is None


def test_upstreams_of_both_sources_have_different_names(file):
    file.write_text(table("one", "http://a"))
    with pytest.raises(ConfigError, match="the same name: one"):
        known_upstreams(
            RouterConfig(upstreams_file=file, upstreams=(Upstream(name="one", url="http://b", lane="long"),))
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "only"),
        ("[[upstreams]]\nname = 1", "upstream 1: name"),
        ("[", "not TOML"),
        (table("a", "https://a", discover="dns"), "certificate"),
    ],
)
def test_wrong_file_of_upstreams_is_told(file, text, words):
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_upstreams(file)


NAMED = Upstream(name="pool", url="http://engines.local:8001", lane="long", key="k", discover="dns", weight=2)


def test_each_address_of_a_name_is_an_upstream():
    other = Upstream(name="vllm", url="http://v", lane="short")
    found = expand((NAMED, other), {"engines.local": ("10.0.0.1", "fd00::2")})
    assert [(one.name, one.url) for one in found] == [
        ("pool-10.0.0.1", "http://10.0.0.1:8001"),
        ("pool-fd00--2", "http://[fd00::2]:8001"),
        ("vllm", "http://v"),
    ]
    assert found[0].key.get_secret_value() == "k" and found[0].weight == 2
    assert expand((NAMED,), {}) == ()


def test_addresses_stay_while_the_name_cannot_be_resolved(caplog):
    answers = [("10.0.0.1",), OSError("no such name"), OSError("no such name"), ("10.0.0.2", "10.0.0.3")]

    async def ask(host):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    discovery = Discovery(RouterConfig(upstreams=(NAMED,)), ask)
    seen = []
    for _ in range(4):
        asyncio.run(discovery.look())
        seen.append([one.url for one in discovery.upstreams()])
    assert seen == [["http://10.0.0.1:8001"]] * 3 + [["http://10.0.0.2:8001", "http://10.0.0.3:8001"]]
    assert caplog.text.count("no such name") == 1


def test_name_is_resolved_while_the_gateway_runs(gateway, upstream, client):
    long = upstream()
    pool = Upstream(name="pool", url=f"http://localhost:{long.port}", lane="long", discover="dns")
    running = gateway(more=[pool], wait=False, discovery_interval_s=0.05)
    eventually(lambda: "pool-127.0.0.1" in running.app.workers)
    eventually(lambda: client.post(running.url + CHAT, json=BODY).status_code == 200)


def test_settings_change_together_or_not_at_all(gateway, upstream, client, threads):
    first, second = upstream(), upstream(models={"tiny": 4096, "big": 4096})
    running = gateway(long=first)
    app = running.app
    told = []
    fields = {
        "port": 1,
        "upstreams": (Upstream(name="other", url=second.url, lane="long"),),
        "aliases": ({"name": "gpt", "model": "big"},),
    }
    settings = [lambda: told.append("read") or RouterConfig(**fields)]
    reloader = Reloader(app, lambda: settings[0](), None)

    async def reload():
        return reloader.reload()

    def refuse():
        raise ConfigError("[router] prot is not a setting")

    settings.insert(0, refuse)
    assert "prot" in threads.run(reload())
    assert list(app.workers) == ["engine"] and app.config.aliases == ()
    settings.insert(0, lambda: RouterConfig(upstreams_file="/nowhere.toml"))
    assert "nowhere" in threads.run(reload())
    assert list(app.workers) == ["engine"] and app.config.upstreams_file is None
    settings.insert(0, settings[-1])
    assert threads.run(reload()) is None and told == ["read"]
    eventually(lambda: client.post(running.url + CHAT, json=BODY | {"model": "gpt"}).status_code == 200)
    assert second.requests[-1].json["model"] == "big"
    assert app.metrics.reloads.labels("refused")._value.get() == 2


def test_what_only_a_restart_changes_stays_as_a_whole_and_is_told_again(gateway, upstream):
    app = gateway(long=upstream()).app
    new = app.config.model_copy(update={"request_timeout_s": 1.0, "connect_timeout_s": 2.0, "balance": "round_robin"})
    for _ in range(2):
        assert app.apply(new) == ["request_timeout_s", "connect_timeout_s"]
    assert (app.config.request_timeout_s, app.config.connect_timeout_s, app.config.balance) == (30, 5, "round_robin")


def test_same_address_keeps_what_is_known(gateway, upstream, threads):
    long = upstream()
    app = gateway(long=long).app
    worker = app.workers["engine"]

    async def apply(**fields):
        app.apply(RouterConfig(upstreams=(Upstream(name="engine", lane="long", **fields),)))

    threads.run(apply(url=long.url, weight=3))
    assert app.workers["engine"] is worker and worker.upstream.weight == 3 and worker.healthy
    threads.run(apply(url="http://127.0.0.1:1"))
    assert app.workers["engine"] is not worker


def test_upstream_that_changes_its_lane_is_told_in_one_lane_only(gateway, upstream, threads):
    long = upstream()
    app = gateway(long=long).app

    async def apply():
        app.apply(RouterConfig(upstreams=(Upstream(name="engine", lane="short", url=long.url),), health_interval_s=0.1))

    def healthy(lane):
        labels = {"upstream": "engine", "lane": lane}
        return app.metrics.registry.get_sample_value("longlane_router_upstream_healthy", labels)

    assert (healthy("long"), healthy("short")) == (1, None)
    threads.run(apply())
    eventually(lambda: healthy("short") == 1)
    assert healthy("long") is None


def test_draining_by_configuration_and_by_the_admin_port(upstream, tmp_path):
    first, second = upstream(), upstream()
    file = tmp_path / "longlane.toml"

    def settings(draining=False):
        one, two = table("one", first.url, draining=draining), table("two", second.url)
        return f"[router]\nhealth_interval_s = 0.1\n{one}\n{two}".replace("[[", "[[router.").replace("False", "false")

    file.write_text(settings())
    running = Process("--config", str(file))
    try:
        eventually(running.answers, 20)
        eventually(lambda: all(one["healthy"] for one in state(running).values()))

        def ask():
            del first.requests[:], second.requests[:]
            for _ in range(4):
                assert httpx.post(running.url + CHAT, json=BODY).status_code == 200
            return len(first.requests), len(second.requests)

        drain = f"{running.admin_url}/upstreams/one/drain"
        assert httpx.post(drain, headers={"origin": "http://evil.example"}).status_code == 403
        assert httpx.post(f"{running.admin_url}/upstreams/none/drain").status_code == 404
        assert httpx.post(drain).json()["obstacle"] == "is draining"
        assert ask() == (0, 4)
        assert httpx.delete(drain).json()["obstacle"] is None
        file.write_text(settings(draining=True))
        eventually(lambda: state(running)["one"]["draining"])
        assert ask() == (0, 4)
        # a bad file keeps the old settings and says why
        file.write_text(settings().replace("health_interval_s", "helth_interval_s"))
        running.popen.send_signal(signal.SIGHUP)
        eventually(lambda: any("did you mean health_interval_s?" in line for line in running.lines))
        assert ask() == (0, 4)
        file.write_text(settings())
        assert httpx.post(f"{running.admin_url}/reload").json() == {"status": "applied"}
        assert not state(running)["one"]["draining"]
        told = httpx.get(running.admin_url + "/metrics").text
        assert 'longlane_router_config_reloads_total{result="refused"}' in told
    finally:
        assert running.end() == 0


def state(running):
    return {one["name"]: one for one in httpx.get(running.admin_url + "/state").json()["upstreams"]}


def test_a_fault_while_looking_ends_no_loop(threads, file, caplog):
    calls, thrice = [], asyncio.Event()

    async def broken(host):
        calls.append(host)
        if len(calls) == 3:
            thrice.set()
        raise RecursionError

    async def run():
        upstream = Upstream(name="v", url="http://v.internal", lane="short", discover="dns")
        discovery = Discovery(RouterConfig(upstreams=(upstream,), discovery_interval_s=0.01), broken)
        async with asyncio.timeout(5):
            task = asyncio.ensure_future(discovery.run(lambda upstreams: None))
            await thrice.wait()
            task.cancel()

    threads.run(run())
    assert "failed inside the gateway" in caplog.text


def test_a_fault_while_reading_settings_is_told_and_changes_nothing(gateway, upstream, file, caplog):
    def broken():
        raise RecursionError

    running = gateway(long=upstream())
    before = running.app.config
    assert "failed inside the gateway" in Reloader(running.app, broken, file).reload()
    assert "RecursionError" in caplog.text and running.app.config is before


def test_a_deeply_nested_answer_ends_no_health_check(gateway, upstream):
    long = upstream()

    async def nested(received, connection):
        await connection.answer(200, b"[" * 100_000)

    long._respond = nested
    running = gateway(long=long, health_interval_s=0.05)
    worker = running.app.workers["engine"]
    assert worker.health.reason == "its answer is nested too deeply"
    del long._respond
    eventually(lambda: worker.health.healthy)


def test_a_fault_inside_a_check_is_logged_and_the_next_one_comes(gateway, upstream, caplog, monkeypatch):
    running = gateway(long=upstream(), health_interval_s=0.05)
    worker = running.app.workers["engine"]
    real = running.app._health._probe

    async def broken(worker):
        raise ZeroDivisionError

    monkeypatch.setattr(running.app._health, "_probe", broken)
    eventually(lambda: worker.health.healthy is False)
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.setattr(running.app._health, "_probe", real)
    eventually(lambda: worker.health.healthy)
