"""Settings of the engine's OpenAI-compatible server."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator

from config.loopback import is_loopback
from config.section import Section


class ServerConfig(Section):
    """Where the server listens, whom it trusts and what it accepts."""

    host: str = "127.0.0.1"
    port: int = Field(default=8001, ge=0, le=65535)

    engine: Literal["local", "scripted"] = "local"
    """`local` runs the engine in a process of its own; `scripted` answers from `script`, for testing clients."""

    script: Path | None = None
    """JSONL file of the scripted engine."""

    served_model_name: str | None = None
    """Name under which the model is served; the last part of the checkpoint's path when not set."""

    keys_file: Path | None = None
    """TOML file of hashed API keys. Without one the server listens on loopback only and accepts any key."""

    gateway_secret: SecretStr | None = None
    """Shared with the gateway: tenant and priority headers are trusted only beside it."""

    default_max_tokens: int = Field(default=32_768, ge=1)
    """Output limit of a request that names none, clamped to what fits."""

    max_body_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)
    """Largest request body; counted while it is read."""

    max_held_body_bytes: int = Field(default=256 * 1024 * 1024, ge=1024)
    """Request bodies held at once, over all connections, from their first byte to the end of their answer; more is
    answered with 503."""

    request_timeout_s: float = Field(default=30.0, gt=0)
    """A client that is this long in sending a request's head, silent in the middle of its body, or slower over all than
    16 KiB/s for this long, is left."""

    calls_end_thought: bool = True
    """Whether a whole tool call inside a thought ends it and is offered, where `</think>` was forgotten; otherwise it
    stays a part of the thought."""

    heartbeat_s: float = Field(default=10.0, gt=0, le=10)
    """Longest silence of an open stream."""

    send_timeout_s: float = Field(default=60.0, gt=0)
    """A stream whose client takes no byte for this long is aborted."""

    drain_s: float = Field(default=30.0, ge=0)
    """After SIGTERM, the time that requests in flight have to finish; what still runs then ends with an error."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engine == "scripted" and self.script is None:
            raise ValueError("engine 'scripted' needs script, a JSONL file")
        if self.max_held_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_held_body_bytes {self.max_held_body_bytes} is less than max_body_bytes {self.max_body_bytes}, "
                "so the largest body would never be taken"
            )
        if self.keys_file is None and not is_loopback(self.host):
            raise ValueError(f"host {self.host} is not loopback: set keys_file, or listen on 127.0.0.1")
        return self
