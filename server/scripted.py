"""An engine that answers from a script, for testing clients and agents without a model.

It stands in at the engine's face only: text, HTTP, limits and errors are the real server's. It counts tokens with the
checkpoint's tokenizer, keeps places and a queue as the engine does, and remembers prompts so that repeated ones cost
their new part only. What a request asks of the answer's form is checked, not enforced: the script is played as it is.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from engine import (
    ContextLengthError,
    EngineDiedError,
    EngineError,
    EngineInfo,
    EngineStats,
    Follower,
    QueueFullError,
    Request,
    RequestError,
    TokenEvent,
    TokenLogprob,
)
from server.checkpoint import TextFiles, load_text_files
from server.script import ScriptLine, choose, last_message, read_script
from server.tokens import TextEncoder

BLOCK_SIZE = 64
MAX_MODEL_LEN = 262_144
REMEMBERED_PROMPTS = 64
RESTART_S = 1.0
MAX_OUTPUT_TOKENS = 10_000_000


class ScriptedRun:
    """One request: its line of the script, how far it is played, and the error that ended it."""

    def __init__(self, request: Request, line: ScriptLine, chunks: Sequence[tuple[int, ...]]) -> None:
        self.request = request
        self.line = line
        self.chunks = chunks
        self.is_complete = False
        self.playing: asyncio.Task[None] | None = None
        self.failure: EngineError | None = None
        self._awake = asyncio.Event()

    def fail(self, failure: EngineError) -> None:
        self.failure = failure
        self._awake.set()

    async def pause(self, milliseconds: float) -> None:
        """Returns at once when the run has failed."""
        if milliseconds and self.failure is None:
            # one timer and one event: `wait_for` would cost more than the server that is being measured
            timer = asyncio.get_running_loop().call_later(milliseconds / 1000, self._awake.set)
            await self._awake.wait()
            self._awake.clear()
            timer.cancel()


class ScriptedEngine:
    """Keeps the contract of `engine.Engine`."""

    def __init__(
        self,
        script: Path,
        checkpoint: Path,
        *,
        max_model_len: int | None = None,
        max_num_requests: int = 8,
        max_queued_requests: int = 64,
        load: Callable[[Path], TextFiles] = load_text_files,
    ) -> None:
        self._script_path = script
        self._checkpoint = checkpoint
        self._load = load
        self._asked_model_len = max_model_len
        self._max_num_requests = max_num_requests
        self._max_queued_requests = max_queued_requests
        self._state = "loading"
        self._closed = asyncio.Event()
        self._runs: dict[str, ScriptedRun] = {}
        self._places = asyncio.Semaphore(max_num_requests)
        self._num_running = 0
        self._num_aborted = 0
        self._num_output_tokens = 0
        self._num_prompt_tokens = 0
        self._prompts: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=REMEMBERED_PROMPTS)

    @property
    def state(self) -> str:
        return self._state

    @property
    def info(self) -> EngineInfo:
        if self._state == "loading":
            raise EngineDiedError("the engine is loading")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=len(self._runs) - self._num_running,
            num_running=self._num_running,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_aborted=self._num_aborted,
        )

    async def start(self) -> None:
        """raises ScriptError, TextFilesError"""
        self._script = read_script(self._script_path)
        self._files = await asyncio.to_thread(self._load, self._checkpoint)
        self._encoder = TextEncoder(self._files.vocabulary)
        self._info = self._describe(self._files)
        self._state = "ready"

    async def submit(self, request: Request) -> None:
        if self._state != "ready":
            raise EngineDiedError(f"the engine is {self._state}", retry_after_s=1)
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        if num_prompt_tokens + max_tokens > self._info.max_model_len:
            raise ContextLengthError(self._info.max_model_len, num_prompt_tokens, max_tokens)
        if len(self._runs) >= self._max_num_requests + self._max_queued_requests:
            raise QueueFullError(
                f"{self._max_queued_requests} requests wait already (max_queued_requests); try again later",
                retry_after_s=1,
            )
        message = last_message(self._files.vocabulary, request.prompt_token_ids)
        line = choose(self._script, message)
        if line is None:
            raise RequestError(f"no line of the script matches the last message: {message[:200]!r}")
        self._runs[request.request_id] = ScriptedRun(request, line, self._chunks(line))
        self._num_prompt_tokens += num_prompt_tokens

    def follow(self, request_id: str, follower: Follower) -> None:
        run = self._runs[request_id]
        run.playing = asyncio.create_task(self._perform(run, follower))
        # a task that is cancelled before its first step would clean up nothing itself
        run.playing.add_done_callback(lambda _: self._forget(run))

    async def abort(self, request_id: str) -> None:
        if run := self._runs.get(request_id):
            if run.playing is None:
                self._forget(run)
            else:
                run.playing.cancel()

    async def gone(self) -> None:
        """A script never dies for good."""
        await self._closed.wait()

    async def close(self) -> None:
        self._state = "closed"
        self._closed.set()
        self._fail_all("the engine was closed")

    async def _perform(self, run: ScriptedRun, follower: Follower) -> None:
        """Plays a run to its follower once there is a place for it."""
        try:
            async with self._place(), aclosing(self._play(run)) as events:
                async for event in events:
                    run.is_complete = event.finish_reason is not None
                    follower(event)
        except Exception as error:
            follower(error)

    def _forget(self, run: ScriptedRun) -> None:
        self._num_aborted += not run.is_complete
        del self._runs[run.request.request_id]

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        async with self._places:
            self._num_running += 1
            try:
                yield
            finally:
                self._num_running -= 1

    async def _play(self, run: ScriptedRun) -> AsyncIterator[TokenEvent]:
        """The events of one run, at the pace that its line asks for."""
        request, line = run.request, run.line
        cached = self._remember(request)
        uncached = len(request.prompt_token_ids) - cached
        await run.pause(line.prefill_ms + line.prefill_ms_per_1k_uncached * uncached / 1000)
        num_sent = 0
        for number, chunk in enumerate(run.chunks):
            await run.pause(line.token_ms if number else 0)
            if run.failure is not None:
                raise run.failure
            if line.die_after is not None and number >= line.die_after:
                self._die()
                raise EngineDiedError("the engine died, as the script says", retry_after_s=1)
            tokens, reason = self._allowed(request, chunk, num_sent)
            num_sent += len(tokens)
            self._num_output_tokens += len(tokens)
            yield TokenEvent(request.request_id, tokens, _logprobs(request, tokens), reason, cached)
            if reason is not None:
                return
            if not line.token_ms:
                # an unpaced script must not keep the event loop from everything else
                await asyncio.sleep(0)
        if line.finish == "error":
            raise EngineError("the engine failed, as the script says")
        yield TokenEvent(request.request_id, finish_reason=line.finish)

    def _allowed(self, request: Request, chunk: tuple[int, ...], num_sent: int) -> tuple[tuple[int, ...], str | None]:
        """The part of a chunk before a stop id and within the limit, and why it ends there."""
        room = request.sampling.max_tokens - num_sent
        for index, token in enumerate(chunk[:room]):
            if token in request.sampling.stop_token_ids:
                return chunk[:index], "stop"
        return chunk[:room], "length" if len(chunk) >= room else None

    def _chunks(self, line: ScriptLine) -> list[tuple[int, ...]]:
        if line.chunk == "char":
            return [tuple(self._encoder.encode_text(char, MAX_OUTPUT_TOKENS)) for char in line.output]
        ids = self._encoder.encode_text(line.output, MAX_OUTPUT_TOKENS, allows_control=True)
        size = 1 if line.chunk == "token" else line.chunk
        return [tuple(ids[start : start + size]) for start in range(0, len(ids), size)]

    def _remember(self, request: Request) -> int:
        """Prompt tokens in whole blocks that an earlier prompt of the same tenant began with."""
        prompt = request.prompt_token_ids
        known = [other for salt, other in self._prompts if salt == request.cache_salt]
        common = max((_common_prefix(prompt, other) for other in known), default=0)
        self._prompts.append((request.cache_salt, prompt))
        return min(common, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE

    def _die(self) -> None:
        self._state = "restarting"
        self._fail_all("the engine died under this request")
        asyncio.get_running_loop().call_later(RESTART_S, self._recover)

    def _recover(self) -> None:
        if self._state == "restarting":
            self._state = "ready"

    def _fail_all(self, reason: str) -> None:
        for run in self._runs.values():
            run.fail(EngineDiedError(reason, retry_after_s=1))

    def _describe(self, files: TextFiles) -> EngineInfo:
        max_model_len = self._asked_model_len or files.max_positions or MAX_MODEL_LEN
        vocabulary = files.vocabulary
        return EngineInfo(
            checkpoint_dir=str(self._checkpoint),
            max_model_len=max_model_len,
            vocab_size=max(vocabulary.plain.get_vocab_size() - 1, *vocabulary.added) + 1,
            device="script",
            num_drafts=0,
            max_num_requests=self._max_num_requests,
            max_queued_requests=self._max_queued_requests,
            kv_cache_tokens=max_model_len * self._max_num_requests,
        )


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(index for index in range(length) if first[index] != second[index])


def _logprobs(request: Request, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """A script is certain: its token has probability 1, any other 0."""
    top = request.sampling.logprobs
    if top is None:
        return ()
    return tuple(
        TokenLogprob(0.0, ((token, 0.0), *((token + rank, float("-inf")) for rank in range(1, top)))[:top])
        for token in tokens
    )
