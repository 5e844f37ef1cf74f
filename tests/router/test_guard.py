import asyncio

from router.guard import beside


async def fails():
    raise RuntimeError("why")


def test_failure_of_work_beside_is_told_at_once(caplog):
    async def run():
        task = beside(fails())
        await asyncio.wait([task])
        cancelled = beside(asyncio.sleep(10))
        cancelled.cancel()
        await asyncio.wait([cancelled])

    asyncio.run(run())
    assert "fails has ended by a fault of its own" in caplog.text and "RuntimeError: why" in caplog.text
    assert len(caplog.records) == 1
