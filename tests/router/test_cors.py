import pytest

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": []}
PAGE = "https://app.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
}


@pytest.mark.parametrize("origins", [(PAGE,), ("*",), ("https://other.example", PAGE)])
def test_page_of_an_allowed_origin_may_call(gateway, upstream, client, origins):
    url = gateway(long=upstream(), cors_origins=origins).url + CHAT
    asked = client.options(url, headers=PREFLIGHT)
    assert (asked.status_code, asked.content) == (204, b"")
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    answer = client.post(url, json=BODY, headers={"origin": PAGE})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
    # a page has to be able to read what went wrong
    refused = client.post(url, json=BODY | {"model": "gpt"}, headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (404, PAGE)
    assert "access-control-allow-origin" not in client.post(url, json=BODY).headers


@pytest.mark.parametrize("origins", [(), ("https://app.example.evil",), ("https://app",)])
def test_page_of_another_origin_is_told_nothing(gateway, upstream, client, origins):
    url = gateway(long=upstream(), cors_origins=origins).url + CHAT
    asked = client.options(url, headers=PREFLIGHT)
    assert asked.status_code == 405
    assert not any(name.startswith("access-control") for name in asked.headers)
    answer = client.post(url, json=BODY, headers={"origin": PAGE})
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_odd_header_names_are_not_repeated(gateway, upstream, client):
    url = gateway(long=upstream(), cors_origins=("*",)).url + CHAT
    asked = client.options(url, headers=PREFLIGHT | {"access-control-request-headers": "x; drop"})
    assert asked.headers["access-control-allow-headers"] == "authorization, content-type"
