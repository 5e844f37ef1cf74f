"""The engine as the server sees it: submit, stream, abort, health."""

import asyncio
import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal, Protocol

from config import EngineConfig
from engine.cache.host_slab import create_file
from engine.child import ChildProcess
from engine.errors import CapacityError, EngineDiedError, EngineError, QueueFullError, RequestError, SamplingError
from engine.messages import Abort, Answer, Failed, FromEngine, Ready, Stepped, Submit
from engine.request import EngineInfo, EngineStats, Request, TokenEvent
from engine.token_stream import Follower, TokenStream
from engine.validation import check_request

MAX_STARTS = 3
FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 30.0
# a process that lived this long did not die of its start
STEADY_S = 60.0

log = logging.getLogger("longlane.engine")

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

    def follow(self, request_id: str, follower: Follower) -> None:
        """Calls the follower, on the event loop, with each event of a submitted request: up to and including the one
        with a finish reason, or with the error under which it ended."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request within one step; unknown and finished ids are ignored. Its follower is not called any more."""
        ...

    async def gone(self) -> None:
        """Waits, once the engine was ready, for its end: returns when it was closed.

        raises  EngineDiedError when the engine died and cannot be started again
        """
        ...

    async def close(self) -> None: ...


class EngineClient:
    """The engine in a process of its own, replaced when it dies or hangs. At most one process lives at a time.

    Everything runs on the event loop that called `start`.
    """

    def __init__(self, config: EngineConfig, module: str = "engine.process") -> None:
        """module  that is the engine process"""
        self._config = config
        self._module = module
        self._state: EngineState = "loading"
        self._end = ""
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._streams: dict[str, TokenStream] = {}
        self._child: ChildProcess | None = None
        self._started: asyncio.Future[None] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None
        self._last_progress = 0.0
        self._load_s = 5.0
        self._began = 0.0
        self._delay_s = FIRST_DELAY_S
        self._next_start = 0.0
        self._host_file: int | None = None
        # by id, answers to come whose submits were cancelled
        self._unheard: Counter[str] = Counter()

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise self._unavailable()
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        if self._supervisor is not None:
            raise RuntimeError("start was already called")
        if self._config.host_cache_bytes and self._config.prefix_caching:
            # held here, so that what a process leaves in it is there for the next one
            self._host_file = create_file()
        self._started = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await self._started
        except BaseException:
            await self.close()
            raise

    async def submit(self, request: Request) -> None:
        child = self._child
        if self._state != "ready" or child is None:
            raise self._unavailable()
        check_request(request, self.info)
        if request.request_id in self._streams:
            raise RequestError(f"request_id {request.request_id!r} is in use: give each request its own")
        stream = self._open_stream(request.request_id)
        try:
            await child.send(Submit(request))
            await stream.admitted()
        except asyncio.CancelledError:
            if not stream.is_admitted:
                self._unheard[request.request_id] += 1
            await self._leave(request.request_id)
            raise
        except Exception:
            self._streams.pop(request.request_id, None)
            raise

    def follow(self, request_id: str, follower: Follower) -> None:
        stream = self._submitted(request_id)
        stream.follow(follower)
        if stream.is_finished:
            del self._streams[request_id]

    async def stream(self, request_id: str) -> AsyncIterator[TokenEvent]:
        """The same events for one who waits for them. A reader that leaves early ends the request.

        raises  EngineDiedError when the engine dies under the request
        """
        stream = self._submitted(request_id)
        stream.is_opened = True
        try:
            while True:
                event = await stream.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            # a reader that left early wants no more tokens
            await self._leave(request_id)

    async def abort(self, request_id: str) -> None:
        """A stream that was opened before can be read to its end."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.is_admitted and not stream.is_opened:
            # nobody will read it to its end, where it is forgotten otherwise
            del self._streams[request_id]
        if not stream.is_finished and self._child is not None:
            # a process that has just ended took its requests along
            with contextlib.suppress(EngineDiedError):
                await self._child.send(Abort(request_id))

    async def gone(self) -> None:
        assert self._supervisor is not None, "start comes first"
        await asyncio.wait({self._supervisor})
        if not self._supervisor.cancelled():
            raise self._unavailable()

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        if self._killing is not None:
            await self._killing
        if self._state != "closed":
            self._finish(EngineDiedError("the engine was closed"))
        if self._host_file is not None:
            os.close(self._host_file)
            self._host_file = None

    def _open_stream(self, request_id: str) -> TokenStream:
        # an idle engine makes no progress; its time runs from the moment it has something to do
        if not self._is_busy():
            self._last_progress = time.monotonic()
        stream = self._streams[request_id] = TokenStream()
        return stream

    def _submitted(self, request_id: str) -> TokenStream:
        stream = self._streams.get(request_id)
        if stream is None or stream.is_followed:
            raise RequestError(f"request_id {request_id!r} was not submitted, or its stream was already read")
        return stream

    async def _leave(self, request_id: str) -> None:
        await self.abort(request_id)
        self._streams.pop(request_id, None)

    async def _supervise(self) -> None:
        """Keeps one engine process alive until none can be started."""
        try:
            await self._replace_forever()
        except EngineError as error:
            log.error("the engine stays down: %s", error)
            self._finish(error)
        except Exception as error:
            log.exception("the engine's supervisor failed")
            self._finish(error)

    async def _replace_forever(self) -> None:
        """raises  CheckpointError, CapacityError at once; EngineDiedError after MAX_STARTS failed starts in a row"""
        failed_starts = 0
        while True:
            try:
                await self._run_child()
                failed_starts = 0
            except (EngineDiedError, CapacityError) as error:
                # what fitted once fits again, when whoever took the memory meanwhile gives it back
                if isinstance(error, CapacityError) and self._info is None:
                    raise
                failed_starts += 1
                log.error("the engine process died while starting: %s", error)
                if failed_starts == MAX_STARTS:
                    raise EngineDiedError(f"the engine died {MAX_STARTS} times while starting: {error}") from error
                self._plan_start()
            await asyncio.sleep(self._wait_s())

    def _plan_start(self) -> None:
        """The process ended: the next one is due after a delay that doubles as long as they die young."""
        lived_s = time.monotonic() - self._began
        self._delay_s = FIRST_DELAY_S if lived_s > STEADY_S else min(2 * self._delay_s, LONGEST_DELAY_S)
        self._next_start = time.monotonic() + self._delay_s

    def _wait_s(self) -> float:
        return max(0.0, self._next_start - time.monotonic())

    async def _run_child(self) -> None:
        """One engine process from its start to its end. raises EngineError when it never became ready"""
        self._began = time.monotonic()
        self._child = child = await ChildProcess.spawn(self._config, self._module, self._host_file)
        try:
            ready = await child.ready()
            self._load_s = time.monotonic() - self._began
            self._become_ready(ready)
            self._lose(await self._serve(child))
        finally:
            self._child = None
            # `close` may cancel us here, but not the killing
            self._killing = asyncio.create_task(child.kill())
            await asyncio.shield(self._killing)

    async def _serve(self, child: ChildProcess) -> str:
        """Passes messages on until the process ends or hangs; returns the reason."""
        reading = asyncio.create_task(self._read(child))
        watching = asyncio.create_task(self._watch(child))
        try:
            await asyncio.wait({reading, watching}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            hang = watching.result()
        finally:
            reading.cancel()
            watching.cancel()
        return hang or await child.last_words()

    async def _read(self, child: ChildProcess) -> str:
        while True:
            message = await child.receive()
            self._last_progress = time.monotonic()
            if isinstance(message, Failed):
                return message.text
            self._receive(message)

    async def _watch(self, child: ChildProcess) -> str | None:
        """Returns why the process must be replaced although it lives, or None when it ended."""
        limit_s = self._config.hang_timeout_s
        ending = asyncio.ensure_future(child.ended())
        try:
            while True:
                silent_s = time.monotonic() - self._last_progress if self._is_busy() else 0.0
                if silent_s >= limit_s:
                    return f"the engine made no step for {silent_s:.0f} s (hang_timeout_s is {limit_s:g})"
                done, _ = await asyncio.wait({ending}, timeout=limit_s - silent_s)
                if done:
                    return None
        finally:
            ending.cancel()

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Stepped(events=events, stats=stats):
                self._stats = stats
                for event in events:
                    # what comes before the answer is of an earlier request of the same id
                    if (stream := self._streams.get(event.request_id)) and stream.is_admitted:
                        stream.put(event)
                        if stream.is_finished and stream.is_followed:
                            del self._streams[event.request_id]
            case Answer(request_id=request_id):
                if self._unheard[request_id]:
                    # that of a submit which nobody waits for any more, not of one that came after it
                    self._unheard -= Counter((request_id,))
                elif stream := self._streams.get(request_id):
                    _answer(stream, message)

    def _is_busy(self) -> bool:
        return any(not stream.is_finished for stream in self._streams.values())

    def _become_ready(self, ready: Ready) -> None:
        self._info = replace(ready.info, max_queued_requests=self._config.max_queued_requests)
        self._state = "ready"
        self._stats = ready.stats
        if self._started is not None and not self._started.done():
            self._started.set_result(None)
        log.info("engine ready in %.1f s on %s: %s", self._load_s, ready.info.device, ready.info.checkpoint_dir)

    def _lose(self, reason: str) -> None:
        log.error("the engine process died and is being replaced: %s", reason)
        self._state = "restarting"
        self._end = reason
        self._stats = EngineStats()
        self._unheard.clear()
        self._plan_start()
        self._fail_streams(f"the engine died while it worked on this request: {_last_line(reason)}")

    def _finish(self, error: Exception) -> None:
        self._state = "closed"
        self._end = str(error) if isinstance(error, EngineError) else repr(error)
        self._fail_streams(self._end)
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)

    def _fail_streams(self, text: str) -> None:
        for stream in self._streams.values():
            stream.fail(EngineDiedError(text, self._retry_after_s()))
        self._streams = {name: stream for name, stream in self._streams.items() if not stream.is_followed}

    def _retry_after_s(self) -> int:
        return math.ceil(self._load_s + self._wait_s())

    def _unavailable(self) -> EngineDiedError:
        texts = {
            "loading": "the engine is loading its checkpoint",
            "restarting": f"the engine is restarting: {_last_line(self._end)}",
            "closed": f"the engine is closed: {_last_line(self._end)}",
        }
        return EngineDiedError(texts.get(self._state, "the engine is not ready"), self._retry_after_s())


def _answer(stream: TokenStream, answer: Answer) -> None:
    if answer.queue_full is not None:
        stream.fail(QueueFullError(answer.queue_full))
    elif answer.refused is not None:
        stream.fail(SamplingError(*answer.refused))
    else:
        stream.admit()


def _last_line(text: str) -> str:
    """Of a traceback, the line that says what happened."""
    return text.strip().rpartition("\n")[2]
