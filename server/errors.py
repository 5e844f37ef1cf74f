"""What the server refuses or fails at, and the one place where it becomes an HTTP answer.

ApiError
├── BadRequestError             400; `param` names the field
│   ├── UnsupportedError        400 unsupported_parameter: understood, but not offered
│   └── PromptTooLongError      400 context_length_exceeded
├── AuthenticationError         401
├── PermissionDeniedError       403
├── NotFoundError               404
├── MethodNotAllowedError       405; names the right ones
├── SlowRequestError            408; the connection is closed, as the rest of the body may still come
├── BodyTooLargeError           413
├── MediaTypeError              415
├── OverloadedError             503 server_is_overloaded; carries Retry-After
└── InternalError               500; says nothing but the request id
"""

import math

from starlette.exceptions import HTTPException

import engine
from server.answers import ErrorBody, MessagesErrorBody

INVALID_REQUEST = "invalid_request_error"
MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class ApiError(Exception):
    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """A retry of the same bytes cannot help unless the class says otherwise."""
        return {"x-should-retry": "false"}


class BadRequestError(ApiError):
    status = 400
    type = INVALID_REQUEST


class UnsupportedError(BadRequestError):
    code = "unsupported_parameter"


class PromptTooLongError(BadRequestError):
    """`num_tokens` is a lower bound when `is_exact` is false: counting stopped once past the limit."""

    code = "context_length_exceeded"

    def __init__(self, max_model_len: int, num_tokens: int, *, is_exact: bool = True, param: str = "messages") -> None:
        count = f"{num_tokens}" if is_exact else f"at least {num_tokens}"
        # a prompt that fills the context to the last token
        room = ", which leaves none for an answer" if num_tokens == max_model_len else ""
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your {param} resulted in "
            f"{count} tokens{room}. Please reduce the length of the {param}.",
            param=param,
        )
        self.max_model_len = max_model_len
        self.num_tokens = num_tokens


class AuthenticationError(ApiError):
    status = 401
    type = INVALID_REQUEST
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return super().headers() | {"www-authenticate": "Bearer"}


class PermissionDeniedError(ApiError):
    status = 403
    type = INVALID_REQUEST
    code = "permission_denied"


class NotFoundError(ApiError):
    status = 404
    type = INVALID_REQUEST
    code = "not_found"


class MethodNotAllowedError(ApiError):
    """`allowed` lists the methods that the path takes."""

    status = 405
    type = INVALID_REQUEST
    code = "method_not_allowed"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This path does not take this method; it takes {allowed}.")
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return super().headers() | {"allow": self.allowed}


class SlowRequestError(ApiError):
    status = 408
    type = INVALID_REQUEST
    code = "request_timeout"

    def headers(self) -> dict[str, str]:
        return {"connection": "close"}


class BodyTooLargeError(ApiError):
    status = 413
    type = INVALID_REQUEST
    code = "request_too_large"


class MediaTypeError(ApiError):
    status = 415
    type = INVALID_REQUEST
    code = "unsupported_media_type"


class OverloadedError(ApiError):
    status = 503
    type = "service_unavailable_error"
    code = "server_is_overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = min(60, max(1, math.ceil(retry_after_s)))

    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after_s), "retry-after-ms": str(self.retry_after_s * 1000)}


class InternalError(ApiError):
    code = "internal_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"The server failed to answer; its log has the details under request id {request_id}.")

    def headers(self) -> dict[str, str]:
        return {}


def is_messages(path: str) -> bool:
    """Whether Anthropic's clients call it, who know errors of another shape."""
    return path.startswith("/v1/messages")


def status_for(path: str, status: int) -> int:
    return 529 if status == 503 and is_messages(path) else status


def body_for(path: str, error: ApiError, request_id: str) -> tuple[int, ErrorBody | MessagesErrorBody]:
    """Status and body in the shape that the path's clients know."""
    status = status_for(path, error.status)
    if not is_messages(path):
        return status, error.body()
    kind = MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = error.message
    if isinstance(error, PromptTooLongError):
        # an answer needs a token of the context too
        most = error.max_model_len - (error.num_tokens == error.max_model_len)
        message = f"prompt is too long: {error.num_tokens} tokens > {most} maximum"
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def from_exception(error: BaseException, request_id: str) -> ApiError:
    """The answer to anything that a request may raise."""
    match error:
        case ApiError():
            return error
        case engine.ContextLengthError():
            return PromptTooLongError(error.max_model_len, error.num_prompt_tokens + error.max_tokens)
        case engine.SamplingError():
            return BadRequestError(str(error), param=error.param)
        case engine.RequestError():
            return BadRequestError(str(error))
        case engine.UnavailableError():
            return OverloadedError(str(error), error.retry_after_s)
        case HTTPException(status_code=404):
            return NotFoundError("There is nothing at this path; the API stands under /v1.")
        case HTTPException(status_code=405):
            return MethodNotAllowedError(", ".join(sorted((error.headers or {}).get("Allow", "").split(", "))))
        case HTTPException(status_code=status) if 400 <= status < 500:
            return BadRequestError(error.detail)
        case _:
            return InternalError(request_id)
