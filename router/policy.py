"""Which of a lane's workers gets a request."""

from collections.abc import Iterable

from router.worker import Worker


def order(workers: Iterable[Worker], now: float) -> list[Worker]:
    """Workers that may get a request, the least loaded one first; equal ones keep the order of the configuration."""
    return sorted((worker for worker in workers if worker.obstacle(now) is None), key=lambda worker: worker.load)
