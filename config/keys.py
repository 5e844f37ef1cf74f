"""The file of API keys: names and digests, never the keys themselves."""

import hashlib
import secrets
import tomllib
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationError

from config.load import ConfigError
from config.section import Section

KEY_PREFIX = "ll-"


class Key(Section):
    """One caller. The digest is SHA-256 of the key, which carries 256 random bits, so it needs no salt."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    lanes: tuple[str, ...] = ("long", "short")
    models: tuple[str, ...] = ()
    """Model names it may use; all when empty."""


class KeyRing:
    """Keys by digest; a lookup compares digests, so its time tells nothing about a key."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._keys = {key.sha256: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str) -> Key | None:
        return self._keys.get(digest(secret))


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def generate() -> str:
    """A new key of 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def load_keys(path: Path) -> KeyRing:
    """Reads ``[[keys]]`` tables; raises ConfigError that names the file and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"keys file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {path}: not TOML: {error}") from error
    if set(tables) - {"keys"} or not isinstance(tables.get("keys", []), list):
        raise ConfigError(f"keys file {path}: only [[keys]] tables belong here")
    keys = [_key(path, index, table) for index, table in enumerate(tables.get("keys", []), 1)]
    names = [key.name for key in keys]
    if len(set(names)) != len(names):
        raise ConfigError(f"keys file {path}: two keys have the same name")
    if not keys:
        raise ConfigError(
            f"keys file {path}: holds no key; `python -m router.keys add --file {path} --name NAME` adds one"
        )
    return KeyRing(keys)


def _key(path: Path, index: int, table: dict) -> Key:
    try:
        return Key(**table)
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        field = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"keys file {path}: key {index}: {field}: {first['msg']}") from error
