"""The file of API keys: names and digests, never the keys themselves."""

import hashlib
import json
import os
import secrets
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from config.load import ConfigError, nearest
from config.section import Section

KEY_PREFIX = "ll-"


class Key(Section):
    """One caller. The digest is SHA-256 of the key, which carries 256 random bits, so it needs no salt."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    lanes: tuple[Literal["long", "short"], ...] = Field(default=("long", "short"), min_length=1)
    """Lanes it may use."""

    models: tuple[str, ...] = ()
    """Model names it may use, `*` standing for any text; all when empty."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    prompt_tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt tokens that no cache held."""

    tokens_per_day: int | None = Field(default=None, ge=1)
    """Uncached prompt tokens and output together, of a UTC day."""

    concurrent_requests: int | None = Field(default=None, ge=1)
    priority: int = Field(default=0, ge=-1000, le=1000)
    """Told to the engine; a higher one is scheduled first."""


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
    """The keys of a file that must hold some; raises ConfigError that names the file and the key."""
    keys = read_keys(path)
    if not keys:
        raise ConfigError(
            f"keys file {path}: holds no key; `python -m router.keys add --file {path} --name NAME` adds one"
        )
    return KeyRing(keys)


def read_keys(path: Path) -> list[Key]:
    """Reads ``[[keys]]`` tables; raises ConfigError."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"keys file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"keys file {path}: not TOML: {error}") from error
    if set(tables) - {"keys"} or not isinstance(tables.get("keys", []), list):
        raise ConfigError(f"keys file {path}: only [[keys]] tables belong here")
    keys = [_key(path, index, table) for index, table in enumerate(tables.get("keys", []), 1)]
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"keys file {path}: two keys have the same {field}: {twice}")
    return keys


def write_keys(path: Path, keys: Iterable[Key]) -> None:
    """Replaces the file in one step, readable by its owner only, so that no reader ever sees half of it."""
    text = "\n".join(_table(key) for key in keys)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _table(key: Key) -> str:
    # JSON strings, lists and numbers are TOML as well
    fields = key.model_dump(exclude_defaults=True)
    return "[[keys]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())


def _key(path: Path, index: int, table: dict) -> Key:
    try:
        return Key(**table)
    except (ValidationError, TypeError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": str(error)}
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"]
        if isinstance(error, ValidationError) and first["type"] == "extra_forbidden":
            message = f"is not a field; {nearest(where, list(Key.model_fields))}"
        raise ConfigError(f"keys file {path}: key {index}: {where}: {message}") from error
