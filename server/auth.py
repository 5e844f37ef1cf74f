"""Who calls: API keys, the gateway's tenant header, and what a listener without keys accepts."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from config import KeyRing, ServerConfig
from config.loopback import is_loopback
from server.errors import AuthenticationError, BadRequestError, PermissionDeniedError

TENANT_HEADER = "x-longlane-tenant"
PRIORITY_HEADER = "x-longlane-priority"
SECRET_HEADER = "x-longlane-gateway-secret"
MAX_PRIORITY = 1_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request comes from.

    tenant      keeps cached prefixes apart
    models      names that the key may use; all when empty
    is_gateway  its streams end with a count for the gateway's books
    """

    tenant: str = ""
    priority: int = 0
    models: tuple[str, ...] = ()
    is_gateway: bool = False

    def check_model(self, name: str) -> None:
        if self.models and name not in self.models:
            raise PermissionDeniedError(f"This key may not use {name}; it may use {', '.join(self.models)}.")


class AccessControl:
    def __init__(self, config: ServerConfig, keys: KeyRing | None) -> None:
        self._keys = keys
        self._secret = config.gateway_secret.get_secret_value() if config.gateway_secret else None

    def identify(self, headers: Mapping[str, str]) -> Caller:
        """raises AuthenticationError, BadRequestError, PermissionDeniedError"""
        if self._keys is None:
            _check_local(headers.get("host", ""))
        caller = self._by_key(headers)
        return self._as_tenant(caller, headers) if self._is_gateway(headers) else caller

    def _by_key(self, headers: Mapping[str, str]) -> Caller:
        if self._keys is None:
            return Caller()
        scheme, _, token = headers.get("authorization", "").partition(" ")
        secret = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        key = self._keys.find(secret) if secret else None
        if key is None:
            what = "is not known here" if secret else "is missing"
            raise AuthenticationError(
                f"The API key {what}: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            )
        return Caller(tenant=key.name, models=key.models)

    def _is_gateway(self, headers: Mapping[str, str]) -> bool:
        given = headers.get(SECRET_HEADER)
        return (
            self._secret is not None
            and given is not None
            and hmac.compare_digest(given.encode(), self._secret.encode())
        )

    def _as_tenant(self, caller: Caller, headers: Mapping[str, str]) -> Caller:
        priority = headers.get(PRIORITY_HEADER, "0")
        if not priority.removeprefix("-").isdecimal() or abs(int(priority)) > MAX_PRIORITY:
            raise BadRequestError(f"{PRIORITY_HEADER}: {priority!r} is no number of at most {MAX_PRIORITY}.")
        return Caller(headers.get(TENANT_HEADER, caller.tenant), int(priority), caller.models, is_gateway=True)


def _check_local(host: str) -> None:
    """A web page that resolves its own name to this machine sends its own name here."""
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not is_loopback(name.lower().removeprefix("[").removesuffix("]")):
        raise PermissionDeniedError(
            f"Without API keys only local names are served, not {host!r}: use 127.0.0.1 or localhost, or set keys_file."
        )
