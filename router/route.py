"""What a path means: its lane, its API and the path that the upstream gets."""

import re
from dataclasses import dataclass

from config import Lane
from router.errors import PathError

LANE_PREFIXES: dict[str, Lane] = {"/long-context": "long", "/chat": "short"}
OUTSIDE_V1 = ("/generate", "/tokenize", "/detokenize")
APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/models": "models",
    "/generate": "generate",
}
# an upstream's own administration is not for its users
CLOSED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_V1 = re.compile(r"/v1(/[A-Za-z0-9_~:-][A-Za-z0-9._~:-]*)+")


@dataclass(frozen=True, slots=True)
class Route:
    """lane is None where the path leaves the choice open."""

    lane: Lane | None
    api: str
    path: str


def parse(path: str) -> Route:
    """Raises PathError for what no upstream may be asked."""
    lane, rest = _split_lane(path)
    if rest in CLOSED or not (rest in OUTSIDE_V1 or _V1.fullmatch(rest)):
        raise PathError(f"{path} is not served here: POST /v1/chat/completions and its like, or GET /v1/models")
    return Route(lane, api_of(rest), rest)


def api_of(path: str) -> str:
    """The API whose shape errors take; `messages` also for what lies below it."""
    _, rest = _split_lane(path)
    if rest.startswith("/v1/messages/"):
        return "messages"
    return "models" if rest.startswith("/v1/models/") else APIS.get(rest, "other")


def _split_lane(path: str) -> tuple[Lane | None, str]:
    for prefix, lane in LANE_PREFIXES.items():
        rest = path.removeprefix(prefix)
        if rest != path and (rest.startswith("/v1/") or rest in OUTSIDE_V1):
            return lane, rest
    return None, path
