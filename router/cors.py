"""Which web pages of other origins may call, where the operator allows any."""

import re
from collections.abc import Mapping

_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")
_TOLD = "x-request-id, retry-after, retry-after-ms, x-should-retry, " + ", ".join(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)


def origin_headers(request: Mapping[str, str], origins: tuple[str, ...]) -> dict[str, str]:
    """What every answer to a page of an allowed origin carries; nothing for others."""
    origin = request.get("origin")
    if origin is None or not ({"*", origin} & set(origins)):
        return {}
    return {"access-control-allow-origin": origin, "access-control-expose-headers": _TOLD, "vary": "origin"}


def preflight_headers(request: Mapping[str, str]) -> dict[str, str]:
    """The answer to a browser that asks first. Any header may come: only listed ones go on to an upstream."""
    asked = request.get("access-control-request-headers", "")
    names = asked if _HEADER_NAMES.fullmatch(asked) else "authorization, content-type"
    methods = {"access-control-allow-methods": "GET, POST", "access-control-max-age": "600"}
    return methods | {"access-control-allow-headers": names}


def is_preflight(method: str, request: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and "access-control-request-method" in request
