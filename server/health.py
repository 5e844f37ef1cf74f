"""GET /health (the process answers) and /ready (the engine takes requests)."""

from starlette.requests import Request
from starlette.responses import Response

from server.answers import Readiness
from server.http import json_response
from server.serving import Serving


class Health:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def health(self, request: Request) -> Response:
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        state = self._serving.state
        stats = self._serving.engine.stats
        body: Readiness = {
            "status": state,
            "model": self._serving.name,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }
        return json_response(body, status=200 if state == "ready" else 503)
