"""``python -m server`` as people start it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from server.script import ScriptError, read_script
from tests.server.conftest import ROOT
from tests.server.test_chat import ask


@pytest.fixture
def start(checkpoint, tmp_path):
    processes = []

    def start(*flags: str, script=({"output": "</think>" + "tick " * 40, "token_ms": 25},)):
        path = tmp_path / "script.jsonl"
        path.write_text("\n".join(map(json.dumps, script)))
        command = [sys.executable, "-W", "error", "-m", "server", "--engine", "scripted", "--script", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [*command, "--model", str(checkpoint), *flags],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_one_line_says_what_is_served_and_a_signal_drains(start):
    process = start("--port", "0", "--max-model-len", "2048", "--served-model-name", "mine")
    line = process.stdout.readline()
    assert "serving mine on script at http://127.0.0.1:" in line, process.stderr.read()
    assert "context 2048 tokens" in line
    assert "any key is accepted" in line
    url = line.split()[5].removesuffix("/v1")
    received: list[str] = []

    def read() -> None:
        body = {**ask("go"), "model": "mine", "stream": True}
        with (
            httpx.Client(timeout=30) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            received.extend(answer.iter_text())

    reader = threading.Thread(target=read)
    reader.start()
    while "tick" not in "".join(received):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    reader.join(20)
    assert "".join(received).endswith("data: [DONE]\n\n")
    assert process.wait(10) == 0
    assert "Traceback" not in process.stderr.read()


def test_what_nobody_reads_ends_no_service(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = start("--port", str(port), "--served-model-name", "scripted-model")
    process.stdout.close()
    deadline = time.monotonic() + 30
    # it listens before there is a model to tell of
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=httpx.HTTPTransport(retries=10)) as client:
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.post("/v1/chat/completions", json=ask("go")).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in process.stderr.read()


def test_the_model_that_comes_with_the_project_is_found_by_its_name(start):
    process = start("--port", "0", "--model", "longlane-tiny")
    line = process.stdout.readline()
    assert "serving longlane-tiny on script" in line, process.stderr.read()


def test_a_taken_port_is_named_with_the_way_out(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in errors
    assert "--port" in errors
    assert "LONGLANE_SERVER_PORT" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--prot", "1"), "did you mean --port"),
        (("--host", "0.0.0.0"), "keys_file"),
        (("--port", "0", "--model", "/nowhere"), "tokenizer_config.json"),
        (("--port", "0", "--script", "/nowhere.jsonl"), "script /nowhere.jsonl"),
    ],
)
def test_wrong_settings_end_in_words(start, flags, expected):
    process = start(*flags)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert expected in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"output": "x", "wehn": "y"}', "line 2: .*wehn"),
        ('{"when": "x"}', "line 2: .*output"),
        ("{", "line 2"),
        ('{"output": "x", "chunk": 0}', "line 2: chunk"),
    ],
)
def test_a_wrong_script_names_its_line(tmp_path, line, expected):
    path = tmp_path / "script.jsonl"
    path.write_text('{"output": "fine"}\n' + line)
    with pytest.raises(ScriptError, match=expected):
        read_script(path)
    path.write_text("\n")
    with pytest.raises(ScriptError, match="holds no line"):
        read_script(path)
