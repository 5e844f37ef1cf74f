"""Keys, local names and the gateway's headers."""

import json

import httpx
import pytest

from config import Key, KeyRing, ServerConfig
from config.keys import digest
from server.auth import AccessControl
from server.errors import ApiError
from tests.server.live import running
from tests.server.test_chat import ask

SECRET = "ll-secret"
JSON = {"content-type": "application/json", "host": "localhost:8001"}


@pytest.fixture(scope="module")
def guarded(checkpoint, tmp_path_factory):
    keys = KeyRing(
        [Key(name="alice", sha256=digest(SECRET)), Key(name="bob", sha256=digest("ll-b"), models=("other",))]
    )
    with running(checkpoint, [{"output": "</think>x"}], tmp_path_factory.mktemp("keys"), keys=keys) as live:
        yield live


@pytest.mark.parametrize(
    "headers",
    [{"authorization": f"Bearer {SECRET}"}, {"x-api-key": SECRET}, {"authorization": f"bearer  {SECRET}"}],
)
def test_a_known_key_is_let_in(guarded, headers):
    assert guarded.post(ask("hi"), headers=headers).status_code == 200
    assert guarded.http.get("/v1/models", headers={**headers, "host": "example.org"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"x-api-key": "wrong"},
        {"authorization": SECRET},
        {"authorization": "Basic x"},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/nothing"])
def test_anybody_else_gets_401(guarded, headers, path):
    answer = guarded.post(ask("hi"), path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["x-should-retry"] == "false"


def test_health_needs_no_key(guarded):
    for path in ("/health", "/ready", "/metrics"):
        assert guarded.http.get(path).status_code == 200


def test_a_key_sees_only_its_models(guarded):
    headers = {"x-api-key": "ll-b"}
    assert guarded.http.get("/v1/models", headers=headers).json()["data"] == []
    answer = guarded.post(ask("hi"), headers=headers)
    assert answer.status_code == 403
    assert "other" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8001", "localhost.evil.example", "127.0.0.1.nip.io", ""]
)
def test_without_keys_only_local_names_are_served(live, host):
    assert live.http.get("/v1/models", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8001", "127.0.0.2:1", "[::1]:8001", "[::1]"])
def test_local_names(live, host):
    assert live.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_without_keys_any_key_is_accepted(live):
    assert live.post(ask("hi"), headers={"authorization": "Bearer whatever"}).status_code == 200


def caller(headers: dict, secret: str | None = "shared"):
    return AccessControl(ServerConfig(gateway_secret=secret), None).identify({**JSON, **headers})


def test_a_tenant_is_believed_beside_the_secret_only():
    tenant = {"x-longlane-tenant": "acme", "x-longlane-priority": "-3"}
    trusted = caller({**tenant, "x-longlane-gateway-secret": "shared"})
    assert (trusted.tenant, trusted.priority) == ("acme", -3)
    for headers, secret in (
        (tenant, "shared"),
        ({**tenant, "x-longlane-gateway-secret": "wrong"}, "shared"),
        ({**tenant, "x-longlane-gateway-secret": ""}, None),
        ({**tenant, "x-longlane-gateway-secret": "ünïcode"}, "shared"),
    ):
        assert (caller(headers, secret).tenant, caller(headers, secret).priority) == ("", 0)
    with pytest.raises(ApiError, match="priority"):
        caller({"x-longlane-gateway-secret": "shared", "x-longlane-priority": "high"})


def test_tenants_do_not_share_what_is_cached(checkpoint, tmp_path):
    with running(checkpoint, [{"output": "</think>x"}], tmp_path, gateway_secret="shared") as live:

        def cached(tenant: str) -> int:
            headers = {"x-longlane-gateway-secret": "shared", "x-longlane-tenant": tenant}
            answer: httpx.Response = live.post(ask("the same words " * 100), headers=headers)
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached("a"), cached("b")] == [0, 0]
        assert cached("a") > 0


def test_the_gateway_s_streams_end_with_their_usage(checkpoint, tmp_path):
    with running(checkpoint, [{"output": "</think>x"}], tmp_path, gateway_secret="shared") as live:
        body = ask("hi", stream=True)
        plain = live.post(body)
        accounted = live.post(body, headers={"x-longlane-gateway-secret": "shared"})
    assert plain.text.endswith("data: [DONE]\n\n")
    comment, marker = accounted.text.rstrip().split("\n\n")[-2:]
    assert marker == "data: [DONE]"
    assert json.loads(comment.removeprefix(": usage "))["completion_tokens"] == 2
