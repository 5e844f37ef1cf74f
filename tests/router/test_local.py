"""`python -m router.local` with the scripted engine: the whole path without a model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from config import EngineConfig, RouterConfig, ServerConfig, load, load_keys
from config.keys import Key, digest, generate, write_keys
from router.discovery import known_upstreams
from router.local import SECTIONS, StackError, _children
from tests.router.live import eventually

TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>

</think>

{% endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
SCRIPT = [
    {"when": "slow", "output": "word " * 400, "token_ms": 10},
    {"output": "Good day to you."},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The text files of a checkpoint whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 4096}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "script.jsonl").write_text("\n".join(json.dumps(line) for line in SCRIPT))
    return folder


def free_ports(count):
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Stack:
    def __init__(self, *flags):
        self.port, self.server_port, self.admin_port = free_ports(3)
        self.ports = ("--router-port", self.port, "--server-port", self.server_port, "--admin-port", self.admin_port)
        self.popen = subprocess.Popen(
            command(*self.ports, *flags),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | {"LONGLANE_ROUTER_HEALTH_INTERVAL_S": "0.1"},
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.popen.stdout))
        self._reader.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self):
        return "".join(self.lines)

    def is_up(self):
        assert self.popen.poll() is None, self.text
        return "Press Ctrl-C" in self.text

    def children(self):
        found = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in found}
        return {word[2].decode(): pid for pid, word in words.items() if len(word) > 2}

    def end(self, number=signal.SIGINT):
        self.popen.send_signal(number)
        code = self.popen.wait(timeout=20)
        self._reader.join(10)
        self.popen.stdout.close()
        return code


def command(*flags):
    return [sys.executable, "-m", "router.local", *map(str, flags)]


def scripted(checkpoint):
    return ("--engine", "scripted", "--script", checkpoint / "script.jsonl", "--model", checkpoint)


@pytest.fixture(scope="module")
def stack(checkpoint):
    running = Stack(*scripted(checkpoint))
    try:
        eventually(running.is_up, 40)
        yield running
    finally:
        if running.popen.poll() is None:
            running.end()


@pytest.fixture
def sdk(stack):
    with openai.OpenAI(base_url=stack.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(content="hi", model="bytes0"):
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 500}


@pytest.fixture
def model(sdk):
    return next(iter(sdk.models.list())).id


def test_start_tells_what_a_user_needs(stack, model):
    for words in (f"curl {stack.url}/v1", f'base_url="{stack.url}/v1"', model, "any key", "short lane"):
        assert words in stack.text


def test_printed_examples_run(stack):
    curl = re.search(r"^curl (?:.*\\\n)*.*$", stack.text, re.MULTILINE)[0]
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "Good day to you."
    snippet = stack.text[stack.text.index("from openai") : stack.text.index("Press Ctrl-C")]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "Good day to you.", done.stderr


@pytest.mark.parametrize("path", ["/v1", "/long-context/v1", "/chat/v1"])
def test_both_lanes_answer_streamed_and_not(stack, model, path):
    with openai.OpenAI(base_url=stack.url + path, api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(**ask(model=model))
        assert whole.choices[0].message.content == "Good day to you."
        stream = client.chat.completions.create(**ask(model=model), stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in stream) == "Good day to you."


def test_bytes_through_the_gateway_are_those_of_the_server(stack, model):
    def stream(port):
        body = ask(model=model) | {"stream": True, "seed": 1}
        content = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body).content
        # id and time of an answer differ from request to request
        return re.sub(rb'"(?:id|created)": ?("[^"]*"|\d+)', b"", content)

    assert stream(stack.port) == stream(stack.server_port)


def test_client_that_leaves_stops_its_generation(stack, model):
    def num_running():
        return httpx.get(f"http://127.0.0.1:{stack.server_port}/ready").json()["running"]

    eventually(lambda: num_running() == 0)
    body = ask("slow", model) | {"stream": True}
    with httpx.stream("POST", stack.url + "/v1/chat/completions", json=body) as response:
        # a forgotten iterator would close the response
        events = response.iter_raw()
        next(events)
        eventually(lambda: num_running() == 1)
    assert eventually(lambda: num_running() == 0) < 1


def test_second_start_names_the_port_before_it_starts_anything(stack):
    for flags, port, flag in (
        (stack.ports, stack.server_port, "--server-port"),
        ((*stack.ports[:2], "--server-port", free_ports(1)[0]), stack.port, "--router-port"),
    ):
        done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=30)
        assert done.returncode == 1
        assert f"port {port}" in done.stderr and flag in done.stderr
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_killed_server_comes_back(stack, sdk, model):
    os.kill(stack.children()["server"], signal.SIGKILL)
    eventually(lambda: "starting it again" in stack.text)

    def answers():
        try:
            return sdk.chat.completions.create(**ask(model=model)).choices[0].message.content == "Good day to you."
        except openai.APIStatusError:
            return False

    eventually(answers, 30)


def test_ctrl_c_ends_both_without_a_traceback(stack):
    children = stack.children()
    assert set(children) == {"server", "router"}
    assert stack.end() == 0
    assert "Traceback" not in stack.text
    assert stack.lines[-1] == "longlane: stopped\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())


def test_child_that_cannot_start_is_told(checkpoint):
    running = Stack("--engine", "scripted", "--script", "/nowhere.jsonl", "--model", checkpoint)
    assert running.popen.wait(timeout=40) == 1
    running._reader.join(10)
    running.popen.stdout.close()
    assert "the engine server ended with exit code" in running.text
    assert "/nowhere.jsonl" in running.text
    assert "Traceback" not in running.text


def test_keys_guard_both_ports(checkpoint, tmp_path):
    secret = generate()
    write_keys(tmp_path / "keys.toml", [Key(name="alice", sha256=digest(secret))])
    running = Stack(*scripted(checkpoint), "--router-keys-file", tmp_path / "keys.toml")
    try:
        eventually(running.is_up, 40)
        headers = {"authorization": f"Bearer {secret}"}
        model = httpx.get(running.url + "/v1/models", headers=headers).json()["data"][0]["id"]
        url = "/v1/chat/completions"
        body = ask(model=model)
        assert httpx.post(running.url + url, json=body, headers=headers).status_code == 200
        assert httpx.post(running.url + url, json=body, headers={"x-api-key": "wrong"}).status_code == 401
        direct = f"http://127.0.0.1:{running.server_port}{url}"
        assert httpx.post(direct, json=body).status_code == 401
        assert httpx.post(direct, json=body, headers=headers).status_code == 401
    finally:
        assert running.end(signal.SIGTERM) == 0


def test_a_second_ctrl_c_waits_for_no_stream(checkpoint):
    running = Stack(*scripted(checkpoint))
    eventually(running.is_up, 40)
    model = httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"]
    body = ask("slow", model) | {"stream": True}
    with httpx.stream("POST", running.url + "/v1/chat/completions", json=body) as response:
        events = response.iter_raw()
        next(events)
        running.popen.send_signal(signal.SIGINT)
        eventually(lambda: "Ctrl-C once more" in running.text)
        started = time.monotonic()
        assert running.end() == 0
        assert time.monotonic() - started < 2


def children(folder, *flags):
    return _children(load(SECTIONS, flags, {}), flags, folder)


SERVER_SECRET, ROUTER_SECRET = "LONGLANE_SERVER_GATEWAY_SECRET", "LONGLANE_ROUTER_GATEWAY_SECRET"


@pytest.mark.parametrize("flags", [(), ("--server-gateway-secret=s",), ("--router-gateway-secret=s",)])
def test_both_programs_share_one_secret(tmp_path, flags):
    server, gateway = (child.environment for child in children(tmp_path, *flags))
    assert server[SERVER_SECRET] == gateway[ROUTER_SECRET]
    assert len(server[SERVER_SECRET]) >= 32 if not flags else server[SERVER_SECRET] == "s"


def test_different_secrets_are_told(tmp_path):
    with pytest.raises(StackError, match="different values of gateway_secret"):
        children(tmp_path, "--server-gateway-secret=a", "--router-gateway-secret=b")


def test_the_local_engine_stands_beside_a_file_of_upstreams(tmp_path):
    file = tmp_path / "upstreams.toml"
    file.write_text('[[upstreams]]\nname = "v"\nurl = "http://v:8100"\nlane = "short"\n')
    gateway = children(tmp_path, f"--upstreams-file={file}")[1]
    config = load({"router": RouterConfig}, gateway.arguments[1:], gateway.environment)["router"]
    assert [one.name for one in known_upstreams(config)] == ["engine", "v"]


TABLE = '[[{}upstreams]]\nname = "here"\nlane = "long"\nurl = "http://localhost:8001"\n'


@pytest.mark.parametrize("given", [None, "the upstream's own"])
@pytest.mark.parametrize("where", ["pair", "table", "file"])
def test_gateway_shows_the_local_server_the_key_that_it_knows(tmp_path, where, given):
    write_keys(tmp_path / "keys.toml", [Key(name="alice", sha256=digest("a"))])
    flags = [f"--router-keys-file={tmp_path / 'keys.toml'}"]
    if where == "pair":
        flags += [f"--long-key={given}"] if given else []
    else:
        file = tmp_path / "longlane.toml"
        file.write_text(TABLE.format("router." if where == "table" else "") + (f'key = "{given}"' if given else ""))
        flags.append(f"--config={file}" if where == "table" else f"--upstreams-file={file}")
    made = tmp_path / "made"
    made.mkdir()
    server, gateway = children(made, *flags)
    settings = load({"engine": EngineConfig, "server": ServerConfig}, server.arguments[1:], server.environment)[
        "server"
    ]
    config = load({"router": RouterConfig}, gateway.arguments[1:], gateway.environment)["router"]
    shown = [one.key.get_secret_value() for one in known_upstreams(config) if one.name in ("here", "engine")]
    assert all(load_keys(settings.keys_file).find(key) is not None for key in shown) and shown
    assert given is None or given in shown


def test_upstreams_that_leave_the_local_engine_out_are_told(tmp_path):
    file = tmp_path / "longlane.toml"
    table = '[[router.upstreams]]\nname = "v"\nlane = "short"\nurl = "http://v:{}"\n'
    file.write_text(table.format(8100))
    with pytest.raises(StackError, match=r"no upstream is at http://127.0.0.1:8001.*\[\[router.upstreams\]\]"):
        children(tmp_path, f"--config={file}")
    file.write_text(table.format(8001))
    assert len(children(tmp_path, f"--config={file}")) == 2
