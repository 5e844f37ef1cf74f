"""Everything that the gateway answers in its own name, as one tree, and its one mapping to HTTP.

GatewayError
├── AuthError                   401  no key, or not one of ours
├── ForbiddenError              403  the key, or the Host header, does not allow it
├── RequestError                400  the request can never pass as it is
│   ├── PathError               404  nothing is served there
│   ├── ModelNotFoundError      404  no upstream serves the model
│   ├── WebsocketError          400
│   ├── MethodError             405
│   ├── SlowRequestError        408  the body stopped coming
│   ├── BodyTooLargeError       413
│   └── MediaTypeError          415
├── QuotaError                  429  the key has used what it may use
├── UnavailableError            503  try again later; `retry_after_s` says when
└── UpstreamError               502  the upstream failed under the request
    └── UpstreamTimeoutError    504  it was silent for too long
ClientGoneError                 nobody is left to answer
"""

import json
import math
import time
from collections.abc import Mapping
from typing import Any

RETRY_AFTER_S = 5
LONGEST_RETRY_AFTER_S = 60


class GatewayError(Exception):
    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    anthropic_type = "api_error"
    param: str | None = None


class AuthError(GatewayError):
    status, type, code, anthropic_type = 401, "invalid_request_error", "invalid_api_key", "authentication_error"


class ForbiddenError(GatewayError):
    status, type, code, anthropic_type = 403, "invalid_request_error", "permission_denied", "permission_error"


class RequestError(GatewayError):
    status, type, code, anthropic_type = 400, "invalid_request_error", None, "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PathError(RequestError):
    status, code, anthropic_type = 404, "not_found", "not_found_error"


class ModelNotFoundError(RequestError):
    status, code, anthropic_type = 404, "model_not_found", "not_found_error"

    def __init__(self, model: str, known: tuple[str, ...]) -> None:
        served = f"models served here: {', '.join(known)}" if known else "no model is served here"
        super().__init__(f"model {model!r} does not exist; {served}", "model")


class WebsocketError(RequestError):
    code = "websocket_not_supported"


class MethodError(RequestError):
    status, code = 405, "method_not_allowed"


class SlowRequestError(RequestError):
    status, code = 408, "request_timeout"


class BodyTooLargeError(RequestError):
    status, code, anthropic_type = 413, "request_too_large", "request_too_large"


class MediaTypeError(RequestError):
    status, code = 415, "unsupported_media_type"


class QuotaError(GatewayError):
    """wait_s: until the request may pass; is_retry_useful is False where that is far away."""

    status, type, code, anthropic_type = 429, "rate_limit_exceeded", "rate_limit_exceeded", "rate_limit_error"

    def __init__(self, message: str, wait_s: float, is_retry_useful: bool = True) -> None:
        super().__init__(message)
        self.retry_after_s = min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
        self.is_retry_useful = is_retry_useful


class UnavailableError(GatewayError):
    status, type, code = 503, "service_unavailable_error", "server_is_overloaded"
    anthropic_type = "overloaded_error"

    def __init__(self, message: str, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamError(GatewayError):
    status, code = 502, "upstream_error"


class UpstreamTimeoutError(UpstreamError):
    status, code = 504, "upstream_timeout"


class ClientGoneError(Exception):
    """The client closed its connection."""


def error_response(error: GatewayError, api: str, request_id: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body in the shape of the API that was called."""
    headers = {"content-type": "application/json"} | _extra_headers(error)
    if api == "messages":
        # that API has a status of its own for overload
        status = 529 if error.status == 503 else error.status
        return status, headers, _json(_anthropic(error, request_id))
    return error.status, headers, _json(_openai(error))


def error_event(error: GatewayError, api: str, request_id: str, last: Mapping[str, Any]) -> bytes:
    """The event that tells of a failure after the headers are gone.

    last  the newest event's data; a Responses stream continues its ids and sequence numbers
    """
    if api == "messages":
        return b"event: error\ndata: " + _json(_anthropic(error, request_id)) + b"\n\n"
    if api == "responses":
        return b"event: response.failed\ndata: " + _json(_response_failed(error, last)) + b"\n\n"
    return b"data: " + _json(_openai(error)) + b"\n\n"


def _extra_headers(error: GatewayError) -> dict[str, str]:
    if isinstance(error, UnavailableError | QuotaError):
        wait = {"retry-after": str(error.retry_after_s), "retry-after-ms": str(error.retry_after_s * 1000)}
        is_final = isinstance(error, QuotaError) and not error.is_retry_useful
        return wait | ({"x-should-retry": "false"} if is_final else {})
    if isinstance(error, SlowRequestError):
        # the rest of its body would be taken for the next request
        return {"connection": "close"}
    if isinstance(error, AuthError):
        return {"www-authenticate": "Bearer", "x-should-retry": "false"}
    return {"x-should-retry": "false"} if isinstance(error, RequestError | ForbiddenError) else {}


def _openai(error: GatewayError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.code}}


def _anthropic(error: GatewayError, request_id: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": error.anthropic_type, "message": str(error)},
        "request_id": request_id,
    }


def _response_failed(error: GatewayError, last: Mapping[str, Any]) -> dict[str, Any]:
    response = last.get("response")
    base = dict(response) if isinstance(response, dict) else {"object": "response", "created_at": int(time.time())}
    failure = {"code": "server_error", "message": str(error)}
    number = last.get("sequence_number")
    return {
        "type": "response.failed",
        "sequence_number": number + 1 if isinstance(number, int) else 0,
        "response": base | {"status": "failed", "error": failure},
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
