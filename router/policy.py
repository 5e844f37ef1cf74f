"""Which of a lane's workers gets a request."""

from collections.abc import Iterable

from router.worker import Worker


def order(workers: Iterable[Worker]) -> list[Worker]:
    """Healthy workers, the least loaded one first; equal ones keep the order of the configuration."""
    return sorted((worker for worker in workers if worker.healthy), key=lambda worker: worker.in_flight)
