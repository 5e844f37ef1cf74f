"""Spans of requests and of their attempts at upstreams; none where nobody set an endpoint for them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from config import Upstream


class Trace:
    """Of one request. This one records nothing; `router.otel` has the one that does."""

    @contextmanager
    def attempt(self, upstream: Upstream, method: str) -> Iterator[None]:
        """Stands around one request to an upstream; what is noted meanwhile belongs to it."""
        yield

    def passed_on(self, headers: dict[str, str]) -> dict[str, str]:
        """An upstream's headers with this attempt as what stands above it; untraced, what the client said stays."""
        return headers

    def note_status(self, status: int) -> None:
        """Of the upstream's answer."""

    def note_failure(self, error: Exception) -> None:
        """Of the attempt, where no exception leaves it."""

    def end(self, attributes: Mapping[str, Any], status: int | None) -> None:
        """The request is over; attributes that are None are left out."""


UNTRACED = Trace()


class Tracing:
    """Begins traces; this one never does."""

    def begin(self, method: str, name: str, headers: Mapping[str, str]) -> Trace:
        """name  of what was asked, from a list of few"""
        return UNTRACED

    async def aclose(self) -> None:
        """Sends what is not yet sent."""
