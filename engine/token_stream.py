"""The events of one request between the engine and its reader."""

import asyncio
from collections.abc import Callable
from itertools import chain

from engine.errors import EngineError
from engine.request import TokenEvent

Follower = Callable[[TokenEvent | Exception], None]


class TokenStream:
    """Events go to a follower, or wait here until they are read; those that pile up are joined into one."""

    def __init__(self) -> None:
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_finished = False
        self.is_opened = False
        self._unread: list[TokenEvent] = []
        self._error: EngineError | None = None
        self._changed = asyncio.Event()
        self._follower: Follower | None = None

    @property
    def is_admitted(self) -> bool:
        return self._admitted.done() and not self._admitted.cancelled()

    async def admitted(self) -> None:
        """Waits until the engine took the request. raises  the error that the stream failed with"""
        await self._admitted

    def admit(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    @property
    def is_followed(self) -> bool:
        return self._follower is not None

    def follow(self, follower: Follower) -> None:
        """Hands over what waits here, and from now on each event, and the error, at once."""
        self._follower = follower
        events, self._unread = self._unread, []
        if events:
            follower(join(events))
        if self._error is not None:
            follower(self._error)

    def put(self, event: TokenEvent) -> None:
        self.is_finished = event.finish_reason is not None
        if self._follower is not None:
            self._follower(event)
        else:
            self._unread.append(event)
            self._changed.set()

    def fail(self, error: EngineError) -> None:
        """Ends an unfinished stream with an error; what was generated before it is still read first."""
        if self.is_finished:
            return
        self.is_finished = True
        self._error = error
        self._changed.set()
        if not self._admitted.done():
            self._admitted.set_exception(error)
        if self._follower is not None:
            self._follower(error)

    async def get(self) -> TokenEvent:
        """raises  the error that the stream failed with"""
        await self._changed.wait()
        if not self._unread:
            assert self._error is not None
            raise self._error
        events, self._unread = self._unread, []
        if self._error is None:
            self._changed.clear()
        return join(events)


def join(events: list[TokenEvent]) -> TokenEvent:
    """One event that says what several in a row said."""
    if len(events) == 1:
        return events[0]
    return TokenEvent(
        request_id=events[0].request_id,
        token_ids=tuple(chain.from_iterable(event.token_ids for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        finish_reason=events[-1].finish_reason,
        num_cached_tokens=events[0].num_cached_tokens,
    )
