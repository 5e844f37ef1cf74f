"""The document at /openapi.json, and the server held against it."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import jsonschema
import msgspec
import pytest

from server.operations import api_operations
from tests.server.live import NAME, running
from tests.server.test_chat import TOOLS, ask

SCHEMATHESIS = Path(sysconfig.get_path("scripts")) / "schemathesis"
PROMPTS = {
    "/v1/completions": {"prompt": ["hi", "ho"], "logprobs": 2},
    "/v1/responses": {"input": "call the tool", "tools": [{"type": "function", **TOOLS[0]["function"]}]},
    "/generate": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [1.0, 2]},
}


@pytest.fixture(scope="module")
def document(live) -> dict:
    answer = live.http.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


@pytest.fixture(scope="module")
def operations(live) -> dict:
    return {(one.method, one.path): one for one in api_operations(live.serving)}


def test_every_path_is_described(document, operations):
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {(method, path.replace(":path", "")) for method, path in operations}
    assert described == served | {("GET", "/openapi.json")}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            assert "200" in described["responses"], (method, path)
            assert ("requestBody" in described) == (method == "post" and not path.endswith("/cancel"))
    assert document["openapi"].startswith("3.1")
    assert "529" in document["paths"]["/v1/messages"]["post"]["responses"]
    assert "503" not in document["paths"]["/v1/messages"]["post"]["responses"]


def test_every_reference_leads_somewhere(document):
    schemas = document["components"]["schemas"]
    names = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {name.partition('"')[0] for name in names} <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_ranges_are_those_that_are_checked(document, live):
    temperature = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]["anyOf"][0]
    assert (temperature["minimum"], temperature["maximum"]) == (0.0, 2.0)
    assert live.post(ask("hi", temperature=temperature["maximum"])).status_code == 200
    assert live.post(ask("hi", temperature=temperature["maximum"] + 0.1)).status_code == 400


def body_for(path: str) -> dict:
    chat = ask("call the tool", tools=TOOLS, n=2, logprobs=True, top_logprobs=2) if "chat" in path else ask("hi")
    return {"model": NAME, **PROMPTS[path]} if path in PROMPTS else chat


def test_answers_are_of_the_type_that_is_described(live, operations):
    """Nothing in an answer is missing, of another type, or unknown to its type."""
    for (method, path), operation in operations.items():
        if operation.answer is str or path.endswith("/cancel"):
            continue
        url = path.replace("{name:path}", NAME)
        if "{" in url:
            made = live.post(body_for("/v1/responses"), "/v1/responses").json()["id"]
            url = url.replace("{response_id}", made)
        answer = live.post(body_for(path), path) if method == "POST" else live.http.request(method, url)
        assert answer.status_code == 200, (path, answer.text)
        read = msgspec.json.decode(answer.content, type=operation.answer)
        assert msgspec.to_builtins(read) == answer.json(), path


def test_every_kind_of_item_is_described(live, operations):
    for text in ("hi", "call the tool", "only think"):
        for path, fields in (
            ("/v1/messages", {"tools": [{"name": "edit", "input_schema": {}}], "thinking": {"type": "enabled"}}),
            ("/v1/responses", {"input": text, "tools": [{"type": "function", "name": "edit"}], "messages": None}),
        ):
            answer = live.post(ask(text, **fields), path)
            read = msgspec.json.decode(answer.content, type=operations["POST", path].answer)
            assert msgspec.to_builtins(read) == answer.json(), path


def _narrow(schemas: dict) -> None:
    """Requests for other models and of other roles would all end at their first check."""
    for name, schema in schemas.items():
        if name in ("GenerateRequest", "TokenizeRequest", "DetokenizeRequest"):
            schema["properties"]["model"] = {"enum": [NAME, None]}
        elif name.endswith("Request"):
            schema["properties"]["model"] = {"const": NAME}
            schema["required"].append("model")
    for name, kinds in (("ContentPart", ["text"]), ("Block", ["text", "tool_use", "tool_result", "thinking"])):
        schemas[name]["properties"]["type"] = {"enum": kinds}
    for name in ("ChatMessage", "Message"):
        schemas[name]["properties"]["role"] = {"enum": ["system", "user", "assistant", "tool"]}


@pytest.mark.real
@pytest.mark.timeout(300)
def test_schemathesis_finds_nothing(checkpoint, tmp_path):
    """No 5xx, no status, header or body that is not in the document, and nothing taken that the document forbids."""
    script = [{"output": "hm\n</think>\n\nHello, world"}]
    with running(checkpoint, script, tmp_path, max_model_len=4096, max_queued_requests=1000) as live:
        document = live.http.get("/openapi.json").json()
        _narrow(document["components"]["schemas"])
        path = tmp_path / "openapi.json"
        path.write_text(json.dumps(document))
        command = [SCHEMATHESIS, "run", path, "--url", live.url, "--seed", "1", "--max-examples", "40", "--no-color"]
        # what the server refuses beyond the document, as texts that are too long, is no fault; keys are not asked for
        excluded = "positive_data_acceptance,ignored_auth"
        options = ["--phases", "coverage,fuzzing,stateful", "-c", "all", "--exclude-checks", excluded]
        done = subprocess.run(
            [*command, *options, "--continue-on-failure", "--generation-database", "none"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stdout
    assert "Test cases" in done.stdout, done.stdout
    print(done.stdout, file=sys.stderr)
