"""The engine as the server sees it: submit, stream, abort, health."""

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from engine.request import EngineInfo, EngineStats, Request, TokenEvent

EngineState = Literal["loading", "ready", "restarting", "closed"]


class Engine(Protocol):
    """What the server needs of an engine. `EngineClient` is the real one; a scripted one takes its place in tests."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDiedError before the engine was ready for the first time."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    async def start(self) -> None:
        """Returns when the engine is ready; raises CheckpointError or CapacityError when it never will be."""
        ...

    async def submit(self, request: Request) -> None:
        """Returns once the request is admitted or queued.

        raises  ContextLengthError, SamplingError, QueueFullError, EngineDiedError
        """
        ...

    def stream(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """Events of a submitted request up to and including the one with a finish reason.

        raises  EngineDiedError when the engine dies under the request
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request within one step; unknown and finished ids are ignored."""
        ...

    async def close(self) -> None: ...


class EngineClient:
    """Placeholder while the real client is being written in this file."""
