import pytest

from router.errors import PathError
from router.route import Route, api_of, parse


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", Route(None, "chat", "/v1/chat/completions")),
        ("/long-context/v1/responses", Route("long", "responses", "/v1/responses")),
        ("/chat/v1/messages", Route("short", "messages", "/v1/messages")),
        ("/v1/messages/count_tokens", Route(None, "messages", "/v1/messages/count_tokens")),
        ("/v1/embeddings", Route(None, "embeddings", "/v1/embeddings")),
        ("/v1/rerank", Route(None, "other", "/v1/rerank")),
        ("/long-context/generate", Route("long", "generate", "/generate")),
        ("/tokenize", Route(None, "other", "/tokenize")),
        ("/v1/models/org:name-1.0", Route(None, "models", "/v1/models/org:name-1.0")),
    ],
)
def test_paths(path, route):
    assert parse(path) == route


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/chat/completions",
        "/metrics",
        "/v1/../metrics",
        "/v1/chat/../../sleep",
        "/v1//chat",
        "/v1/./x",
        "/v1/x?y",
        "/v1/a b",
        "/v1/load_lora_adapter",
        "/long-context/v1/unload_lora_adapter",
        "/long-context/chat/v1/models",
        "/v1/chat/completions\n",
        "/sleep",
    ],
)
def test_closed_paths(path):
    with pytest.raises(PathError):
        parse(path)


def test_shape_of_errors_follows_the_path_even_with_a_lane():
    assert api_of("/long-context/v1/messages") == "messages"
    assert api_of("/nowhere") == "other"
