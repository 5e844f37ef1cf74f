"""GET /v1/models and /v1/models/{id}."""

from starlette.requests import Request
from starlette.responses import Response

from server.auth import Caller
from server.http import json_response
from server.model import ServedModel
from server.serving import Serving


class Catalog:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list_models(self, request: Request) -> Response:
        model = self._serving.model
        return json_response({"object": "list", "data": [model.card()] if _may_use(request, model) else []})

    async def show_model(self, request: Request) -> Response:
        model = self._serving.model
        name = request.path_params["name"]
        model.check_name(name)
        caller: Caller = request.state.caller
        caller.check_model(name)
        return json_response(model.card())


def _may_use(request: Request, model: ServedModel) -> bool:
    caller: Caller = request.state.caller
    return not caller.models or model.name in caller.models
