"""The engine's life beside the HTTP server: start, readiness, end."""

import asyncio
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config import ServerConfig
from engine import Engine, EngineError, QueueFullError, Request, UnavailableError
from server.body import HeldBytes
from server.checkpoint import TextFiles, TextFilesError, load_text_files
from server.errors import OverloadedError
from server.generation import Generation
from server.metrics import ServerMetrics
from server.model import ServedModel, served_model
from server.script import ScriptError

logger = logging.getLogger(__name__)

# rendering and tokenising; the interpreter is free for most of it
TEXT_THREADS = 2
LOADING_RETRY_S = 5


class Serving:
    """Holds the engine and, once it is ready, the served model.

    load        reads the text files of a checkpoint
    on_ready    called once with the model
    on_failure  called when there is no engine and never will be: it cannot start, or not again
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        name: str,
        metrics: ServerMetrics,
        *,
        load: Callable[[Path], TextFiles] = load_text_files,
        on_ready: Callable[[ServedModel], None] = lambda model: None,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.config = config
        self.name = name
        self.engine = engine
        self.metrics = metrics
        self.held = HeldBytes(config.max_held_body_bytes)
        self._load = load
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._model: ServedModel | None = None
        self._worker = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    @property
    def state(self) -> str:
        return "loading" if self._model is None and self.engine.state == "ready" else self.engine.state

    @property
    def model(self) -> ServedModel:
        """raises OverloadedError while there is no engine to answer"""
        if self._model is None or self.engine.state != "ready":
            raise OverloadedError(f"The engine is {self.state}; try again shortly.", LOADING_RETRY_S)
        return self._model

    async def run(self) -> None:
        """Starts the engine, reads the checkpoint's text files, and stays until the engine is gone for good."""
        try:
            await self.engine.start()
            self._model = await self._load_model()
            self._on_ready(self._model)
            await self.engine.gone()
        except Exception as error:
            if not isinstance(error, (EngineError, TextFilesError, ScriptError)):
                logger.exception("the engine failed in a way nobody foresaw")
            self._on_failure(error)

    async def generate(self, requests: Sequence[Request]) -> Generation:
        """Admitted requests. raises what the engine refuses them with"""
        generation = Generation(self.engine, requests, self.metrics)
        self._generations.add(generation)
        try:
            await generation.submit()
        except QueueFullError as error:
            # the engine knows what waits, not how long it will
            raise QueueFullError(str(error), math.ceil(self.metrics.pace.wait_s(len(requests)))) from error
        return generation

    def end_all(self) -> None:
        """Ends what is in flight with an error that says why, while its connections still stand."""
        for generation in list(self._generations):
            generation.fail(UnavailableError("the server is shutting down, before this answer was complete"))

    async def close(self) -> None:
        await self.engine.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _load_model(self) -> ServedModel:
        info = self.engine.info
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(self._worker, self._load, Path(info.checkpoint_dir))
        return await loop.run_in_executor(
            self._worker, served_model, self.name, files, info, self._worker, self.config.default_max_tokens
        )
