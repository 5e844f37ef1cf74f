"""Bodies in and out."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from config import ServerConfig
from server.body import read_body
from server.errors import ApiError, BadRequestError, MediaTypeError, body_for
from server.json_size import check_json_size
from server.protocol import Body, parse, to_json

# parsing a larger body would hold up every stream
INLINE_BYTES = 262_144


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def error_response(path: str, error: ApiError, request_id: str) -> Response:
    status, body = body_for(path, error, request_id)
    return json_response(body, status, error.headers())


async def read_json(request: Request, kind: type[Body], config: ServerConfig) -> tuple[Body, list[str]]:
    """The request and the names of its unknown fields.

    raises  BadRequestError, MediaTypeError, and what `read_body` raises
    """
    _check_media_type(request.headers)
    chunks = await read_body(request, config)
    size = sum(map(len, chunks))
    if not size:
        raise BadRequestError("The body is empty; send a JSON object.", code="invalid_json")
    if size <= INLINE_BYTES:
        return parse(b"".join(chunks), kind)
    return await asyncio.to_thread(_parse_large, chunks, kind)


def _parse_large(chunks: list[bytes], kind: type[Body]) -> tuple[Body, list[str]]:
    raw = b"".join(chunks)
    chunks.clear()
    check_json_size(raw)
    return parse(raw, kind)


def _check_media_type(headers: Mapping[str, str]) -> None:
    """A web page of somebody else's can send anything but JSON unasked."""
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError("Send the body as JSON with the header 'Content-Type: application/json'.")
    encoding = headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise MediaTypeError(f"content-encoding {encoding!r} is not accepted; send the body as it is.")
