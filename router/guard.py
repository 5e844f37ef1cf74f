"""Work that ends when something beside it says so."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger("longlane.router")


async def guarded(work: Coroutine[Any, Any, None], *guards: Coroutine[Any, Any, None]) -> None:
    """Runs until `work` or a guard ends, with the exception of the one that ended; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in (work, *guards)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = next(task for task in tasks if task.done())
        ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def beside(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Starts work that nobody waits for; should it ever fail, the log says so at once."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_tell_failure)
    return task


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("%s has ended by a fault of its own", task.get_coro().__qualname__, exc_info=error)
