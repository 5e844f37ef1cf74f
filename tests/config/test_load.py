from typing import Literal

import pytest

from config import ConfigError, EngineConfig, RouterConfig, ServerConfig, load, split_flags, usage
from config.section import Section

ALL = {"engine": EngineConfig, "server": ServerConfig, "router": RouterConfig}


class Switches(Section):
    is_loud: bool = False
    """Says more."""

    names: tuple[str, ...] = ()
    level: Literal["low", "high"] = "low"
    limit: int | None = None


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "longlane.toml"
        path.write_text(text)
        return path

    return write


def router(argv=(), environ=None):
    return load({"router": RouterConfig}, argv, environ or {})["router"]


def refusal(sections, argv=(), environ=None):
    with pytest.raises(ConfigError) as caught:
        load(sections, argv, environ or {})
    return str(caught.value)


def test_later_sources_win(file):
    path = file("[router]\nport = 1\nadmin_port = 1\nlong_prompt_tokens = 1\n")
    environ = {"LONGLANE_CONFIG": str(path), "LONGLANE_ROUTER_PORT": "2", "LONGLANE_ROUTER_ADMIN_PORT": "2"}
    config = router(["--port", "3"], environ)
    assert (config.port, config.admin_port, config.long_prompt_tokens, config.drain_s) == (3, 2, 1, 30.0)


def test_flag_names_the_file_over_the_environment(file, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("[router]\nport = 9\n")
    environ = {"LONGLANE_CONFIG": str(file("[router]\nport = 1\n"))}
    assert router([f"--config={other}"], environ).port == 9


def test_short_and_full_flags():
    assert router(["--port=5"]).port == router(["--router-port", "5"]).port == 5
    settings = load(ALL, ["--max-model-len", "8192", "--server-port", "1", "--router-port", "2"], {})
    assert (settings["engine"].max_model_len, settings["server"].port, settings["router"].port) == (8192, 1, 2)


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        router().port = 5


def test_switches_lists_and_empty_words():
    sections = {"s": Switches}
    assert load(sections, ["--is-loud", "--names", "a, b,"], {})["s"] == Switches(is_loud=True, names=("a", "b"))
    assert load(sections, ["--is-loud=no"], {"LONGLANE_S_IS_LOUD": "1"})["s"].is_loud is False
    assert load(sections, [], {"LONGLANE_S_LIMIT": ""})["s"].limit is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prot", "1"], ["--prot is not a flag", "did you mean --port?"]),
        (["port"], ["'port' is not a flag", "--name value"]),
        (["--port"], ["--port needs a value"]),
        (["--port", "--host", "x"], ["--port needs a value", "--host follows"]),
        (["--port", "many"], ["flags: [router] port", "valid integer"]),
        (["--port", "70000"], ["flags: [router] port", "65535"]),
        (["--host", "0.0.0.0"], ["host 0.0.0.0 is not loopback", "keys_file"]),
        (["--admin-host", "0.0.0.0"], ["admin_host 0.0.0.0", "admin_token"]),
        (["--upstreams", "http://x"], ["--upstreams", "[[router.upstreams]]"]),
        (["--long-url", "ftp://x"], ["long_url", "http://"]),
        (["--vllm-url", "x:8100"], ["vllm_url", "http://"]),
        (["--vllm-url", "http://:8100"], ["vllm_url", "names no host"]),
        (["--long-url", "http://x:99999"], ["long_url", "is no address"]),
        (["--redis-url", "redis://x:port"], ["redis_url", "is no address"]),
        (["--otlp-endpoint", "http://x:port"], ["otlp_endpoint", "is no address"]),
        (["--workers", "2"], ["workers must be 1"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml", "No such file"]),
        (["--log-level", "loud"], ["flags: [router] log_level", "'debug'"]),
    ],
)
def test_wrong_flags_say_what_to_write(argv, words):
    told = refusal({"router": RouterConfig}, argv)
    assert all(word in told for word in words), told


@pytest.mark.parametrize("size", ["much", "5 parsec", "-5"])
def test_sizes_say_how_they_are_written(size):
    told = refusal({"engine": EngineConfig}, ["--host-cache-bytes", size])
    assert "host_cache_bytes" in told and "like 8GiB" in told, told


def test_flag_of_several_parts_names_them():
    assert "--server-port or --router-port" in refusal(ALL, ["--port", "1"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[router]\nprot = 1", ["longlane.toml", "[router] prot", "did you mean port?"]),
        ("[ruoter]\nport = 1", ["longlane.toml", "[ruoter]", "did you mean router?"]),
        ("router = 1", ["longlane.toml", "write [router]"]),
        ("[router\n", ["longlane.toml", "not TOML"]),
        ("[router]\nport = 'x'", ["longlane.toml", "[router] port", "integer"]),
        ("[router]\nport = 1.5", ["longlane.toml", "[router] port", "integer"]),
        ("[[router.upstreams]]\nname='a'\nurl='http://x'\nlane='long'\nkye='k'", ["upstreams.0.kye", "mean key?"]),
        ("[[router.upstreams]]\nname='a'\nurl='x'\nlane='long'", ["upstreams.0.url", "http://"]),
        ("[[router.upstreams]]\nname='a'\nurl='http://x'\nlane='fast'", ["upstreams.0.lane", "'long' or 'short'"]),
        ("[[router.upstreams]]\nname='a'\nlane='long'", ["upstreams.0.url", "required"]),
        ("[router]\nupstreams = ['http://x']", ["upstreams.0", "longlane.toml"]),
    ],
)
def test_wrong_files_say_where_and_what(file, text, words):
    told = refusal({"router": RouterConfig}, ["--config", str(file(text))])
    assert all(word in told for word in words), told


def test_every_wrong_setting_is_told_at_once(file):
    told = refusal({"router": RouterConfig}, ["--config", str(file("[router]\nport = -1\ndrain_s = -1\n"))])
    assert "[router] port" in told and "[router] drain_s" in told


def test_wrong_variables_say_which(file):
    told = refusal({"router": RouterConfig}, environ={"LONGLANE_ROUTER_PROT": "1"})
    assert "LONGLANE_ROUTER_PROT" in told and "LONGLANE_ROUTER_PORT" in told
    assert "environment: [router] port" in refusal({"router": RouterConfig}, environ={"LONGLANE_ROUTER_PORT": "x"})


def test_a_secret_is_never_told():
    told = refusal({"router": RouterConfig}, environ={"LONGLANE_ROUTER_LONG_KEY": "sk-1", "LONGLANE_ROUTER_PORT": "x"})
    assert "sk-1" not in told
    told = refusal({"router": RouterConfig}, ["--redis-url", "redis://:sk-1/x@host:6379"])
    assert "sk-1" not in told and "redis_url" in told and "%2F" in told
    assert "sk-1" not in repr(router(environ={"LONGLANE_ROUTER_LONG_KEY": "sk-1"}))


def test_sections_of_other_programs_are_left_alone(file):
    path = file("[engine]\nmodel = 'x'\n[server]\nnonsense = 1\n[router]\nport = 4\n")
    environ = {"LONGLANE_ENGINE_MODEL": "y", "LONGLANE_SERVER_NONSENSE": "1", "LONGLANE_OTHER": "1"}
    assert router(["--config", str(path)], environ).port == 4


def test_flags_are_handed_on_to_their_programs():
    argv = ["--config", "f", "--max-model-len", "8192", "--server-port=1", "--vllm-url", "http://x"]
    assert split_flags(ALL, argv) == {
        "engine": ["--config=f", "--engine-max-model-len=8192"],
        "server": ["--config=f", "--server-port=1"],
        "router": ["--config=f", "--router-vllm-url=http://x"],
    }


def test_help_tells_every_flag_and_its_meaning():
    told = usage("router.local", ALL)
    for cls in ALL.values():
        for field, info in cls.model_fields.items():
            assert field.replace("_", "-") in told or field in told
            assert not info.description or info.description.split()[0] in told
    assert "One of: auto, cpu, cuda." in told
    assert "[8000]" in told
    assert max(len(line) for line in told.splitlines()) <= 120


def test_upstreams_stand_for_the_pair_of_addresses():
    names = [(one.name, one.lane, one.url) for one in router(["--vllm-url", "http://v:8100/v1/"]).resolved_upstreams()]
    assert names == [("engine", "long", "http://127.0.0.1:8001"), ("vllm", "short", "http://v:8100")]
    assert [one.name for one in router().resolved_upstreams()] == ["engine"]


def test_upstream_names_differ(file):
    table = "[[router.upstreams]]\nname='a'\nurl='http://x'\nlane='long'\n"
    assert "must differ" in refusal({"router": RouterConfig}, ["--config", str(file(table * 2))])


def test_cache_has_to_hold_one_request():
    told = refusal({"engine": EngineConfig}, ["--max-model-len", "4096", "--kv-cache-tokens", "1024"])
    assert "kv_cache_tokens 1024 is less than max_model_len 4096" in told


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--prefix-caching=false", "--host-cache-bytes=1GiB"], "prefix_caching keeps, which is off"),
        (["--disk-cache-dir=/tmp/x"], "needs prefix_caching, and host_cache_bytes"),
        (["--host-cache-bytes=1GiB", "--disk-cache-dir=/tmp/x", "--disk-cache-bytes=0"], "disk_cache_bytes"),
    ],
)
def test_tiers_stand_behind_a_cache_and_hold_something(flags, told):
    assert told in refusal({"engine": EngineConfig}, flags)


def test_scripted_engine_needs_its_script():
    assert "needs script" in refusal({"server": ServerConfig}, ["--engine", "scripted"])
