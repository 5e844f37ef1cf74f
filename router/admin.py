"""The admin port: metrics and state, apart from what clients reach."""

import hmac
import time
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from router.app import Gateway
from router.auth import check_local_host
from router.errors import AuthError, ForbiddenError, GatewayError, PathError, error_response
from router.reload import Reloader

PAGE = Path(__file__).parent / "ui" / "index.html"
PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


def admin_app(gateway: Gateway, reloader: Reloader) -> Starlette:
    """With `admin_token` a bearer token is needed, without one a local Host header. A web page may change nothing."""
    token = gateway.config.admin_token

    def guard(request: Request) -> None:
        if token is None:
            check_local_host(request.headers)
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.get_secret_value().encode()):
            raise AuthError("the admin port needs `Authorization: Bearer TOKEN` with admin_token")

    def guard_change(request: Request) -> None:
        guard(request)
        if "origin" in request.headers:
            raise ForbiddenError("the admin port takes no changes from web pages")

    def metrics(request: Request) -> Response:
        guard(request)
        return Response(generate_latest(gateway.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    def state(request: Request) -> Response:
        guard(request)
        return JSONResponse({"upstreams": [_state(worker) for worker in gateway.workers.values()]})

    def reload(request: Request) -> Response:
        guard_change(request)
        refusal = reloader.reload()
        return JSONResponse({"status": "applied"} if refusal is None else {"status": "refused", "reason": refusal})

    def drain(request: Request) -> Response:
        guard_change(request)
        worker = gateway.workers.get(name := request.path_params["name"])
        if worker is None:
            raise PathError(f"there is no upstream {name}; there are: {', '.join(gateway.workers)}")
        worker.is_draining = request.method == "POST"
        return JSONResponse(_state(worker))

    def ui(request: Request) -> Response:
        # the page itself tells nothing; what it shows comes from /state
        return FileResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})

    def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def ready(request: Request) -> Response:
        is_ready = gateway.is_ready()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    routes = [Route(f"/{view.__name__}", _async(view)) for view in (metrics, state, ui, health, ready)]
    routes += [
        Route("/reload", _async(reload), methods=["POST"]),
        Route("/upstreams/{name}/drain", _async(drain), methods=["POST", "DELETE"]),
    ]
    return Starlette(routes=routes, exception_handlers={GatewayError: _refuse})


def _async(view: Any) -> Any:
    # a plain function would run in a thread, beside the gateway's own loop
    async def endpoint(request: Request) -> Response:
        return view(request)

    return endpoint


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    status, headers, body = error_response(error, "admin", "")
    return Response(body, status, headers)


def _state(worker: Any) -> dict[str, Any]:
    return {
        "name": worker.name,
        "url": worker.upstream.url,
        "lane": worker.upstream.lane,
        "healthy": worker.health.healthy,
        "reason": worker.health.reason,
        "in_flight": worker.in_flight,
        "obstacle": worker.obstacle(time.monotonic()),
        "breaker": worker.breaker.state(time.monotonic()),
        "draining": worker.is_draining or worker.upstream.draining,
        "weight": worker.upstream.weight,
        "models": list(worker.cards or ()),
    }
