"""The ASGI application: paths, access, and one place that turns failures into answers."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from importlib import metadata
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth import AccessControl
from server.body import HeldBody
from server.errors import ApiError, InternalError, from_exception
from server.http import error_response
from server.openapi import Operation, openapi_document
from server.operations import api_operations
from server.protocol import to_json
from server.serving import Serving

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"


def build_app(serving: Serving, access: AccessControl) -> Starlette:
    description = Description()
    own = Operation("GET", "/openapi.json", description.show, "This document", dict, is_open=True)
    operations = [*api_operations(serving), own]
    open_paths = frozenset(operation.path for operation in operations if operation.is_open)
    description.text = to_json(openapi_document(operations, _version()))
    app = Starlette(
        routes=_routes(operations),
        middleware=[Middleware(RequestBoundary, serving=serving, access=access, open_paths=open_paths)],
        exception_handlers={HTTPException: _routing_error},
        lifespan=_lifespan(serving),
    )
    app.state.metrics = serving.metrics
    return app


class Description:
    """The document that describes all paths, its own included."""

    text = b""

    async def show(self, request: Request) -> Response:
        return Response(self.text, media_type="application/json")


def _version() -> str:
    try:
        return metadata.version("longlane")
    except metadata.PackageNotFoundError:
        # run from its directory, without having been installed
        return "0"


def _routes(operations: Sequence[Operation]) -> list[Route]:
    """One route for each path, so that an answer to a wrong method names all right ones."""
    calls: dict[str, dict[str, Any]] = {}
    for operation in operations:
        calls.setdefault(operation.path, {})[operation.method] = operation.call
    return [Route(path, _dispatch(by_method), methods=list(by_method)) for path, by_method in calls.items()]


def _dispatch(by_method: Mapping[str, Callable[[Request], Awaitable[Any]]]) -> Callable[[Request], Awaitable[Any]]:
    async def call(request: Request) -> Any:
        return await by_method["GET" if request.method == "HEAD" else request.method](request)

    return call


def _lifespan(serving: Serving) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        starting = asyncio.create_task(serving.run())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await serving.close()

    return lifespan


async def _routing_error(request: Request, error: Exception) -> Response:
    request_id = request.state.request_id
    return error_response(request.url.path, from_exception(error, request_id), request_id)


class RequestBoundary:
    """Around every request: its id, who calls, a count, and an answer for whatever was raised.

    Plain ASGI, so that streams and disconnects pass through untouched.
    """

    def __init__(self, app: ASGIApp, serving: Serving, access: AccessControl, open_paths: frozenset[str]) -> None:
        self._app = app
        self._open_paths = open_paths
        self._serving = serving
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(send, _request_id(scope))
        held = HeldBody(self._serving.held)
        state = scope.setdefault("state", {})
        state["held"] = held
        # the layers between add nothing to the parts of a body
        state["send_body"] = send
        try:
            self._identify(scope, exchange.request_id)
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            logger.debug("request %s: the client left", exchange.request_id)
        except Exception as error:
            await self._fail(scope, receive, exchange, error)
        finally:
            held.release()
            self._serving.metrics.answered(_handler(scope), scope["method"], exchange.status)

    def _identify(self, scope: Scope, request_id: str) -> None:
        state = scope["state"]
        state["request_id"] = request_id
        if scope["path"] not in self._open_paths:
            state["caller"] = self._access.identify(Headers(scope=scope))

    async def _fail(self, scope: Scope, receive: Receive, exchange: "Exchange", error: Exception) -> None:
        answer = from_exception(error, exchange.request_id)
        _log(answer, error, exchange.request_id)
        if exchange.status:
            # the answer has begun: cutting the connection is all that is left to say
            raise error
        await error_response(scope["path"], answer, exchange.request_id)(scope, receive, exchange.send)


class Exchange:
    """One answer on its way out; `status` is 0 until its headers have gone."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            header = (REQUEST_ID_HEADER.encode(), self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await self._send(message)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    is_usable = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if is_usable else f"req_{secrets.token_hex(12)}"


def _handler(scope: Scope) -> str:
    """The route's pattern: a path as the client wrote it would make a series of its own."""
    route = scope.get("route")
    if route is not None:
        return route.path
    return "other"


def _log(answer: ApiError, error: Exception, request_id: str) -> None:
    if isinstance(answer, InternalError):
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        logger.info("request %s: %s %s", request_id, answer.status, answer.message)
