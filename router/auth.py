"""Who is calling: a key from `Authorization: Bearer` or `x-api-key`, or anyone from this machine."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from config import ConfigError, Key, KeyRing, load_keys
from config.keys import read_keys
from config.loopback import is_loopback
from router.errors import AuthError, ForbiddenError
from router.files import fingerprint

ANYONE = "anyone"
_LOOK_EVERY_S = 1.0
_log = logging.getLogger("longlane.router")


class Auth:
    """Looks keys up by digest. The file is read again when it changes; a bad one keeps the keys of the old one."""

    def __init__(self, keys_file: Path | None) -> None:
        self._file = keys_file
        self._keys = load_keys(keys_file) if keys_file else None
        self._seen = fingerprint(keys_file)
        self._looked_at = time.monotonic()

    def identify(self, headers: Mapping[str, str]) -> Key | None:
        """The caller's key; None where no keys are configured and anyone on this machine may call.

        raises  AuthError, ForbiddenError
        """
        if self._keys is None:
            check_local_host(headers)
            return None
        secret = _secret(headers)
        if secret is None:
            raise AuthError("no API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        key = self._current().find(secret)
        if key is None:
            raise AuthError("this API key is not known")
        return key

    def _current(self) -> KeyRing:
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            if (seen := fingerprint(self._file)) != self._seen:
                self._seen = seen
                self._reload()
        return self._keys

    def _reload(self) -> None:
        try:
            # a file whose last key was revoked is a good one: nobody may call
            self._keys = KeyRing(read_keys(self._file))
        except ConfigError as error:
            _log.error("the old keys stay in force: %s", error)
        else:
            _log.info("keys read again: %d", len(self._keys))


def check_local_host(headers: Mapping[str, str]) -> None:
    """A page of a foreign site that resolves to this machine still sends the foreign name."""
    host = headers.get("host", "")
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if not is_loopback(name.strip("[]")):
        raise ForbiddenError(f"Host {host!r} is not this machine: without keys only local callers are served")


def _secret(headers: Mapping[str, str]) -> str | None:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key") or None
