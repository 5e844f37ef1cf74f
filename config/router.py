"""Settings of the gateway."""

import tomllib
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from config.load import ConfigError, nearest
from config.loopback import is_loopback
from config.section import Section

Lane = Literal["long", "short"]
Balance = Literal["affinity", "least_loaded", "round_robin"]


class Upstream(Section):
    """One OpenAI-compatible server behind the gateway."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    url: str
    """Base URL without `/v1`."""

    lane: Lane
    key: SecretStr | None = None
    """Bearer key that the gateway presents to this upstream."""

    models: tuple[str, ...] = ()
    """Model names it serves, `*` standing for any text; read from its `/v1/models` when empty."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the requests that it gets beside the other upstreams of its lane."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Tokens up to which it gets requests, where that is less than its own limit."""

    discover: Literal["list", "dns"] = "list"
    """`dns`: the host of `url` is a name with any number of addresses, each an upstream of its own."""

    draining: bool = False
    """It finishes what it has and gets nothing new."""

    heartbeats: bool = False
    """The upstream sends none of its own, so the gateway puts comments between its events."""

    @field_validator("url")
    @classmethod
    def _is_base_url(cls, url: str) -> str:
        return web_url(url).removesuffix("/v1")

    @model_validator(mode="after")
    def _dns_is_plain(self) -> Self:
        if self.discover == "dns" and not self.url.startswith("http://"):
            raise ValueError("discover = 'dns' needs http://, since a certificate holds for the name only")
        return self


class Alias(Section):
    """A name that clients use for a model of another name."""

    name: str = Field(min_length=1, max_length=256)
    """`*` stands for any text."""

    model: str = Field(min_length=1)
    """A name that upstreams serve, or `auto`."""


class RouterConfig(Section):
    """Where the gateway listens, its upstreams and how it chooses between them."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    admin_host: str = "127.0.0.1"
    admin_port: int = Field(default=8002, ge=0, le=65535)
    """`/metrics` stands here, apart from the port that clients reach."""

    admin_token: SecretStr | None = None
    """Bearer token of the admin port; needed where `admin_host` is not loopback."""

    long_url: str = "http://127.0.0.1:8001"
    """The engine's server; used when `upstreams` is empty, and beside `upstreams_file` only where it is set."""

    long_key: SecretStr | None = None
    """Bearer key for `long_url`, also where one of `upstreams` without a key of its own stands there."""

    vllm_url: str | None = None
    """An external vLLM for the short lane; without one the short lane falls back to the long lane's engine."""

    vllm_key: SecretStr | None = None
    upstreams: tuple[Upstream, ...] = ()
    """Any number of upstreams, in place of `long_url` and `vllm_url`."""

    upstreams_file: Path | None = None
    """TOML file with more `[[upstreams]]`, read again when it changes."""

    discovery_interval_s: float = Field(default=5.0, gt=0)
    """Time between two looks at `upstreams_file` and at the addresses of DNS names."""

    balance: Balance = "affinity"
    """How a lane's upstreams share its requests; `affinity` sends a conversation to where its prefix is cached."""

    affinity_slack: int = Field(default=8, ge=0)
    """Requests that such an upstream may have beyond the least loaded one before others get the next."""

    aliases: tuple[Alias, ...] = ()
    """Names that stand for models of other names; the upstream is asked for the model by its own name."""

    auto_models: tuple[str, ...] = ()
    """Models that the name `auto` may stand for, `*` for every one; without any there is no model `auto`."""

    keys_file: Path | None = None
    """TOML file of hashed API keys. Without one the gateway listens on loopback only and accepts any key."""

    cors_origins: tuple[str, ...] = ()
    """Origins whose web pages may call, like `https://app.example`, or `*`; none when empty."""

    redis_url: SecretStr | None = None
    """Redis that keeps the limits of keys where several gateways share them, like `redis://:PASSWORD@HOST:6379/0`."""

    limits_without_redis: Literal["local", "closed"] = "local"
    """While Redis is away, each gateway limits by its own counts, or refuses what needs a limit."""

    gateway_secret: SecretStr | None = None
    """Sent to the engine's server, which without it takes the callers of all keys for one tenant."""

    long_prompt_tokens: int = Field(default=8_192, ge=1)
    """Estimated prompt tokens from which a request takes the long lane."""

    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Largest request body; counted while it is read."""

    max_held_body_bytes: int = Field(default=512 * 1024 * 1024, ge=1024)
    """Bodies of all requests together, from their first byte to the end of their answer; more is refused with 503."""

    request_timeout_s: float = Field(default=30.0, gt=0)
    """A client that is this long in sending a request's head, or silent in the middle of its body, is left; so is one
    that after this time has sent less than 16 KiB of the body for each further second."""

    connect_timeout_s: float = Field(default=5.0, gt=0)
    """Longest wait for a connection to an upstream."""

    first_byte_timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for an upstream's response headers, beside the time that its prompt takes."""

    slowest_prefill_tokens_per_s: float = Field(default=250.0, gt=0)
    """A prompt's estimated tokens, divided by this, are added to the wait for its response headers."""

    answer_timeout_s: float = Field(default=3600.0, gt=0)
    """The same for a request that is not streamed: its headers come when the answer is complete."""

    pool_timeout_s: float = Field(default=5.0, gt=0)
    """Longest wait for one of `max_connections`."""

    pool_idle_s: float = Field(default=4.0, gt=0)
    """A connection to an upstream that was unused for this long is closed; keep it below the upstream's own limit."""

    max_connections: int = Field(default=4096, ge=1)
    """Connections to all upstreams together."""

    send_timeout_s: float = Field(default=60.0, gt=0)
    """A stream whose client takes no byte for this long is aborted."""

    idle_timeout_s: float = Field(default=120.0, gt=0)
    """Longest silence of an upstream in the middle of a response."""

    health_interval_s: float = Field(default=2.0, gt=0)
    """Time between two health checks of an upstream."""

    heartbeat_s: float = Field(default=10.0, gt=0, le=10)
    """Longest silence of a stream whose upstream is marked `heartbeats`."""

    drain_s: float = Field(default=30.0, ge=0)
    """After SIGTERM, the time that requests in flight have to finish."""

    workers: int = 1
    """Always 1: one gateway is one process."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"
    """One JSON object per line, or words for a terminal."""

    otlp_endpoint: str | None = None
    """OpenTelemetry collector that gets a span for each request and attempt, by OTLP over HTTP, like
    `http://collector:4318`; needs `pip install '.[otel]'` in Longlane's directory."""

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_collector_url(cls, url: str | None) -> str | None:
        return None if url is None else web_url(url).removesuffix("/v1/traces")

    @field_validator("long_url", "vllm_url")
    @classmethod
    def _is_upstream_url(cls, url: str | None) -> str | None:
        return None if url is None else web_url(url)

    @field_validator("redis_url")
    @classmethod
    def _is_redis_url(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None and not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must start with redis://, rediss:// or unix://")
        try:
            _ = url and urlsplit(url.get_secret_value()).port
        except ValueError:
            # its own words may hold a part of the password
            raise ValueError("is no address: the port is no number; in a password / is written %2F") from None
        return url

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.workers != 1:
            raise ValueError("workers must be 1: run more gateways behind one address instead")
        if self.keys_file is None and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is not loopback: set keys_file, or listen on 127.0.0.1")
        if self.admin_token is None and not is_loopback(self.admin_host):
            raise ValueError(f"admin_host {self.admin_host} is not loopback: set admin_token, or listen on 127.0.0.1")
        if self.max_held_body_bytes < self.max_body_bytes:
            raise ValueError("max_held_body_bytes must be at least max_body_bytes: one body has to fit")
        names = [upstream.name for upstream in self.upstreams]
        if len(set(names)) != len(names):
            raise ValueError(f"upstream names must differ: {', '.join(sorted(names))}")
        return self

    def resolved_upstreams(self) -> tuple[Upstream, ...]:
        """`upstreams`, else the pair that `long_url` and `vllm_url` stand for; a file needs no `long_url` beside it."""
        if self.upstreams:
            return tuple(map(self.with_key, self.upstreams))
        pair = []
        if self.upstreams_file is None or "long_url" in self.model_fields_set:
            pair.append(Upstream(name="engine", url=self.long_url, lane="long", key=self.long_key))
        if self.vllm_url is not None:
            pair.append(Upstream(name="vllm", url=self.vllm_url, lane="short", key=self.vllm_key, heartbeats=True))
        return tuple(pair)

    def with_key(self, upstream: Upstream) -> Upstream:
        """The upstream, with `long_key` where it is the server at `long_url` and has no key of its own."""
        if upstream.key is not None or _place(upstream.url) != _place(self.long_url):
            return upstream
        return upstream.model_copy(update={"key": self.long_key})


def web_url(url: str) -> str:
    """The address without a slash at its end. raises ValueError for one that no connection can be made to"""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} must start with http:// or https://")
    try:
        # a port that is no number shows when it is asked for
        host, _ = urlsplit(url).hostname, urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"{url!r} is no address: {error}") from error
    if not host:
        raise ValueError(f"{url!r} names no host")
    return url.rstrip("/")


def _place(url: str) -> tuple[str, int | None]:
    """Host and port, all names of this machine being one."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "localhost" if is_loopback(host) else host, parts.port


def read_upstreams(path: Path) -> tuple[Upstream, ...]:
    """Reads ``[[upstreams]]`` tables; raises ConfigError that names the file and the upstream."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"file {path}: not TOML: {error}") from error
    if set(tables) - {"upstreams"} or not isinstance(tables.get("upstreams", []), list):
        raise ConfigError(f"file {path}: only [[upstreams]] tables belong here")
    return tuple(_upstream(path, index, table) for index, table in enumerate(tables.get("upstreams", []), 1))


def _upstream(path: Path, index: int, table: dict) -> Upstream:
    try:
        return Upstream(**table)
    except ValidationError as error:
        first = error.errors()[0]
        where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = f"is not a setting; {nearest(where, list(Upstream.model_fields))}"
        raise ConfigError(f"file {path}: upstream {index}: {where}: {message}") from error
