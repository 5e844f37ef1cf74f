"""The OpenAI SDK for Node over the gateway and the server: what its helpers make of our answers."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.installs import OPENAI_NODE
from tests.e2e.recorded import MODEL, recorded_stack, write_script
from tests.e2e.require import require

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "agents" / "openai.cjs"
READ = (
    "Files first.\n</think>\n\nI look.\n\n<tool_call>\n<function=read_file>\n"
    "<parameter=path>\n notes.txt\n</parameter>\n<parameter=limit>\n20\n</parameter>\n</function>\n</tool_call>"
)
SCRIPT = [
    {"when": "say hello", "output": "They greet.\n</think>\n\nHello \u2028 日本 🐦"},
    {"when": "read it", "output": READ},
    {"when": "a heron", "output": "</think>\n\nIt says heron."},
    {"when": "as json", "output": 'Well.\n</think>\n\n{"name": "heron", "wings": 2}'},
    {"when": "fail midway", "output": "</think>\n\none two three", "finish": "error"},
    {"when": "count slowly", "output": "</think>\n\n" + "tick " * 3000, "token_ms": 20},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    script = write_script(tmp_path_factory.mktemp("node") / "script.jsonl", SCRIPT)
    with recorded_stack(script, "--max-model-len", "32768") as stack:
        yield stack


@pytest.fixture
def case(stack):
    require(OPENAI_NODE)

    def run(name: str):
        environment = os.environ | {"NODE_PATH": str(OPENAI_NODE.install() / "node_modules")}
        command = ["node", str(PROGRAM), name, f"{stack.url}/v1"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return run


def test_stream_equals_the_whole(case):
    got = case("stream")
    assert (got["text"], got["thought"], got["reasons"]) == ("Hello \u2028 日本 🐦", "They greet.", ["stop"])
    assert got["whole"] == {"text": got["text"], "usage": got["usage"]}


def test_stream_helper(case):
    text = "Hello \u2028 日本 🐦"
    assert case("helper") == {"text": text, "reason": "stop", "events": ["content", text]}


def test_tools_run_until_there_is_an_answer(case):
    for result in case("tools").values():
        assert result["seen"] == [{"path": " notes.txt", "limit": 20}]
        assert result["text"] == "It says heron."
        assert result["messages"] == ["user", "assistant", "tool", "assistant"]


def test_parse_helpers(case):
    bird = {"name": "heron", "wings": 2}
    assert case("parse") == {"whole": bird, "streamed": bird, "call": {"path": " notes.txt", "limit": 20}}


def test_cut_answer_is_an_error_of_the_parse_helper(case):
    assert case("cut")["class"] == "LengthFinishReasonError"


def test_responses(case):
    got = case("responses")
    assert got["parsed"] == {"name": "heron", "wings": 2}
    assert (got["first"], got["last"]) == ("response.created", "response.completed")
    assert got["text"] == got["next"] == "Hello \u2028 日本 🐦"


def test_errors_are_the_classes_that_the_sdk_knows(case):
    got = case("errors")
    assert {name: (one["class"], one.get("status"), one.get("code")) for name, one in got.items()} == {
        "model": ("NotFoundError", 404, "model_not_found"),
        "value": ("BadRequestError", 400, None),
        "long": ("BadRequestError", 400, "context_length_exceeded"),
        "longStream": ("BadRequestError", 400, "context_length_exceeded"),
        "longResponse": ("BadRequestError", 400, "context_length_exceeded"),
        "midway": ("APIError", None, "internal_error"),
        "whole": ("InternalServerError", 500, "internal_error"),
    }
    assert got["value"]["param"] == "temperature"
    assert "maximum context length is 32768 tokens" in got["long"]["message"]


def test_aborts_reach_the_engine(case, stack):
    got = case("abort")
    assert got["chunks"] == 3
    assert got["pending"]["class"] == "APIUserAbortError"
    assert got["late"]["class"] == "APIConnectionTimeoutError"
    stack.wait_idle()


def test_models(case):
    assert case("models") == [[MODEL, 32768]]
