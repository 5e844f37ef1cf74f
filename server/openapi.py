"""The API's own description, made of the types that requests are read into and answers are written from."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from server.answers import ErrorBody, MessagesErrorBody, Readiness
from server.errors import (
    ApiError,
    AuthenticationError,
    BadRequestError,
    BodyTooLargeError,
    InternalError,
    MediaTypeError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    SlowRequestError,
    is_messages,
    status_for,
)
from server.protocol import HARMLESS, REFUSED, SamplingFields
from server.sampling import RANGES

VERSION = "3.1.0"
REFERENCE = "#/components/schemas/{name}"
FAILS_ALWAYS: tuple[type[ApiError], ...] = (InternalError,)
FAILS_GUARDED = (BadRequestError, AuthenticationError, PermissionDeniedError, NotFoundError, OverloadedError)
FAILS_WITH_BODY = (BodyTooLargeError, MediaTypeError, SlowRequestError)
REQUEST_ID = {"x-request-id": {"schema": {"type": "string"}, "required": True}}
RETRY_AFTER = {"retry-after": {"schema": {"type": "integer", "minimum": 1, "maximum": 60}}}
SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# a listener without keys takes any
SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}, {}]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method on one path.

    answer       type of a whole answer; str for plain text
    request      type of the body
    is_streamed  the answer may also be events
    is_open      it asks for no key
    """

    method: str
    path: str
    call: Callable[[Request], Awaitable[ASGIApp]]
    about: str
    answer: Any
    request: type[msgspec.Struct] | None = None
    is_streamed: bool = False
    is_open: bool = False

    @property
    def failures(self) -> tuple[type[ApiError], ...]:
        guarded = () if self.is_open else FAILS_GUARDED
        return FAILS_ALWAYS + guarded + (FAILS_WITH_BODY if self.request is not None else ())


def openapi_document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas = Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = paths.setdefault(operation.path.replace(":path}", "}"), {})
        described[operation.method.lower()] = _describe(operation, schemas)
    return {
        "openapi": VERSION,
        "info": {
            "title": "Longlane engine server",
            "version": version,
            "description": "OpenAI's and Anthropic's APIs over one engine. In every request null equals absent, and "
            f"these fields have no effect: {', '.join(sorted(HARMLESS))}.",
        },
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": SECURITY_SCHEMES},
    }


class Schemas:
    """Schemas of all types, each defined once."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        bodies = [operation.request for operation in operations if operation.request is not None]
        types = [*bodies, *(operation.answer for operation in operations), ErrorBody, MessagesErrorBody, Readiness]
        found, self.components = msgspec.json.schema_components(types, ref_template=REFERENCE)
        self._found = list(zip(types, found, strict=True))
        for body in bodies:
            if issubclass(body, SamplingFields):
                _add_ranges(self.components[body.__name__]["properties"])

    def of(self, kind: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._found if known is kind)


def _add_ranges(properties: Mapping[str, Any]) -> None:
    for name in RANGES.keys() & properties.keys():
        for way in properties[name]["anyOf"]:
            if way["type"] in ("integer", "number"):
                way["minimum"], way["maximum"] = RANGES[name]


def _describe(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.about, "responses": _answers(operation, schemas)}
    if not operation.is_open:
        described["security"] = SECURITY
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0].partition(":")[0]
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "description": _refused(operation.request),
            "content": {"application/json": {"schema": schemas.of(operation.request)}},
        }
    return described


def _refused(request: type[msgspec.Struct]) -> str:
    names = sorted(REFUSED.keys() - set(request.__struct_fields__))
    return f"Refused with 400 unsupported_parameter, since the answer would be another one: {', '.join(names)}."


def _answers(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    kind = "text/plain" if operation.answer is str else "application/json"
    content: dict[str, Any] = {kind: {"schema": schemas.of(operation.answer)}}
    if operation.is_streamed:
        # this version of OpenAPI has no words for single events
        content["text/event-stream"] = {}
    answers = {"200": {"description": "The answer.", "headers": REQUEST_ID, "content": content}}
    for failure in operation.failures:
        answers[str(status_for(operation.path, failure.status))] = _failure(operation.path, failure, schemas)
    if operation.answer is Readiness:
        answers["503"] = {**answers["200"], "description": "There is no engine to answer yet, or again."}
    return answers


def _failure(path: str, failure: type[ApiError], schemas: Schemas) -> dict[str, Any]:
    about = (failure.__doc__ or failure.code or failure.type).partition("\n")[0]
    body = MessagesErrorBody if is_messages(path) else ErrorBody
    headers = REQUEST_ID | (RETRY_AFTER if issubclass(failure, OverloadedError) else {})
    return {"description": about, "headers": headers, "content": {"application/json": {"schema": schemas.of(body)}}}
