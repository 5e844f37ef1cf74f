"""Which headers pass, in both directions: a list of what may, so that nothing unknown does."""

from collections.abc import Iterable, Mapping

from config import Upstream

TO_UPSTREAM = (
    "content-type",
    "accept",
    "user-agent",
    "traceparent",
    "tracestate",
    "anthropic-version",
    "anthropic-beta",
    "x-session-id",
    "x-stainless-retry-count",
)
TO_CLIENT = (
    "content-type",
    "content-encoding",
    "cache-control",
    "x-accel-buffering",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "openai-processing-ms",
)
_TO_CLIENT = {name.encode(): name for name in TO_CLIENT}
# trusted by the engine's server only beside the shared secret
TENANT = "x-longlane-tenant"
PRIORITY = "x-longlane-priority"
SECRET = "x-longlane-gateway-secret"
UNBUFFERED = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


def upstream_headers(
    client: Mapping[str, str], upstream: Upstream, request_id: str, tenant: str, priority: int, secret: str | None
) -> dict[str, str]:
    """The client's key is never among them; the upstream's own key is put in.

    tenant, priority, secret  sent to the engine's server only, and only where a secret is configured
    """
    headers = {name: client[name] for name in TO_UPSTREAM if name in client}
    # a compressed stream could not be cut into events
    headers |= {"accept-encoding": "identity", "x-request-id": request_id}
    if upstream.key is not None:
        headers["authorization"] = f"Bearer {upstream.key.get_secret_value()}"
    if secret is not None and upstream.lane == "long":
        headers |= {SECRET: secret, TENANT: tenant, PRIORITY: str(priority)}
    return headers


def client_headers(upstream: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """upstream  names and values as they came"""
    found = ((_TO_CLIENT.get(name.lower()), value) for name, value in upstream)
    return {name: value.decode("latin-1") for name, value in found if name is not None}
