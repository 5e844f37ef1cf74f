"""Every path of the API: who answers it, what it takes and what it gives."""

from server.answers import (
    AnsweredMessage,
    ChatCompletion,
    DeletedResponse,
    GeneratedText,
    Liveness,
    ModelCard,
    ModelList,
    Readiness,
    ResponseObject,
    SpelledText,
    TextCompletion,
    TokenCount,
    Tokens,
)
from server.catalog import Catalog
from server.chat import ChatCompletions
from server.completions import Completions
from server.generate import Generate
from server.health import Health
from server.messages import Messages
from server.messages_protocol import MessagesRequest
from server.metrics import metrics_page
from server.openapi import Operation
from server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from server.responses import Responses
from server.responses_protocol import ResponsesRequest
from server.serving import Serving
from server.tokenize import Tokenize

KEPT_RESPONSE = "/v1/responses/{response_id}"


def api_operations(serving: Serving) -> list[Operation]:
    messages = Messages(serving)
    responses = Responses(serving)
    tokenize = Tokenize(serving)
    catalog = Catalog(serving)
    health = Health(serving)
    return [
        Operation(
            "POST",
            "/v1/chat/completions",
            ChatCompletions(serving).create,
            "OpenAI's chat completions",
            ChatCompletion,
            ChatRequest,
            is_streamed=True,
        ),
        Operation(
            "POST",
            "/v1/completions",
            Completions(serving).create,
            "Bare prompts continued",
            TextCompletion,
            CompletionRequest,
            is_streamed=True,
        ),
        Operation(
            "POST",
            "/v1/responses",
            responses.create,
            "OpenAI's responses",
            ResponseObject,
            ResponsesRequest,
            is_streamed=True,
        ),
        Operation("GET", KEPT_RESPONSE, responses.show, "A response that is kept", ResponseObject),
        Operation("DELETE", KEPT_RESPONSE, responses.delete, "Forgets a response", DeletedResponse),
        Operation(
            "POST",
            f"{KEPT_RESPONSE}/cancel",
            responses.cancel,
            "Refused with 400, since no response is made in the background",
            ResponseObject,
        ),
        Operation(
            "POST",
            "/v1/messages",
            messages.create,
            "Anthropic's messages",
            AnsweredMessage,
            MessagesRequest,
            is_streamed=True,
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            messages.count_tokens,
            "The length of a prompt of messages",
            TokenCount,
            MessagesRequest,
        ),
        Operation(
            "POST",
            "/generate",
            Generate(serving).create,
            "A prompt in, text and timing out",
            GeneratedText,
            GenerateRequest,
        ),
        Operation("POST", "/tokenize", tokenize.tokenize, "Text or messages as token ids", Tokens, TokenizeRequest),
        Operation("POST", "/detokenize", tokenize.detokenize, "Token ids as text", SpelledText, DetokenizeRequest),
        Operation("GET", "/v1/models", catalog.list_models, "The models that this key may use", ModelList),
        Operation("GET", "/v1/models/{name:path}", catalog.show_model, "A model and its limits", ModelCard),
        Operation("GET", "/health", health.health, "The process answers", Liveness, is_open=True),
        Operation("GET", "/ready", health.ready, "The engine takes requests", Readiness, is_open=True),
        Operation("GET", "/metrics", metrics_page, "Prometheus series", str, is_open=True),
    ]
