"""Work that ends when something beside it says so."""

import asyncio
from collections.abc import Coroutine
from typing import Any


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
