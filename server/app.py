"""The ASGI application: paths, access, and one place that turns failures into answers."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, MutableMapping
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
from server.catalog import Catalog
from server.chat import ChatCompletions
from server.completions import Completions
from server.errors import ApiError, InternalError, from_exception
from server.generate import Generate
from server.health import Health
from server.http import error_response
from server.messages import Messages
from server.metrics import metrics_page
from server.responses import Responses
from server.serving import Serving
from server.tokenize import Tokenize

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
REQUEST_ID_HEADER = "x-request-id"


def build_app(serving: Serving, access: AccessControl) -> Starlette:
    messages = Messages(serving)
    tokenize = Tokenize(serving)
    catalog = Catalog(serving)
    health = Health(serving)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(serving).create, methods=["POST"]),
            Route("/v1/completions", Completions(serving).create, methods=["POST"]),
            Route("/v1/responses", Responses(serving).create, methods=["POST"]),
            Route("/v1/messages", messages.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", messages.count_tokens, methods=["POST"]),
            Route("/tokenize", tokenize.tokenize, methods=["POST"]),
            Route("/detokenize", tokenize.detokenize, methods=["POST"]),
            Route("/generate", Generate(serving).create, methods=["POST"]),
            Route("/v1/models", catalog.list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", catalog.show_model, methods=["GET"]),
            Route("/health", health.health, methods=["GET"]),
            Route("/ready", health.ready, methods=["GET"]),
            Route("/metrics", metrics_page, methods=["GET"]),
        ],
        middleware=[Middleware(RequestBoundary, serving=serving, access=access)],
        exception_handlers={HTTPException: _routing_error},
        lifespan=_lifespan(serving),
    )
    app.state.metrics = serving.metrics
    return app


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

    def __init__(self, app: ASGIApp, serving: Serving, access: AccessControl) -> None:
        self._app = app
        self._serving = serving
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(send, _request_id(scope))
        try:
            self._identify(scope, exchange.request_id)
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            logger.debug("request %s: the client left", exchange.request_id)
        except Exception as error:
            await self._fail(scope, receive, exchange, error)
        finally:
            self._serving.metrics.answered(_handler(scope), scope["method"], exchange.status)

    def _identify(self, scope: Scope, request_id: str) -> None:
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        if scope["path"] not in OPEN_PATHS:
            state["caller"] = self._access.identify(scope["method"], Headers(scope=scope))

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
    return scope["path"] if scope["path"] in OPEN_PATHS else "other"


def _log(answer: ApiError, error: Exception, request_id: str) -> None:
    if isinstance(answer, InternalError):
        logger.error("request %s failed", request_id, exc_info=error)
    else:
        logger.info("request %s: %s %s", request_id, answer.status, answer.message)
