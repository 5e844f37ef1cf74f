"""Which of a lane's workers gets a request: plain data in, an order out."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from config import Balance
from router.worker import Worker


@dataclass(frozen=True, slots=True)
class Rule:
    """prefix  what tells where a conversation's prefix is cached; None: nothing does
    slack   requests, divided by the weight, that its worker may have beyond the least loaded one
    turn    number of the request, for taking turns
    """

    by: Balance = "least_loaded"
    prefix: bytes | None = None
    slack: float = 0.0
    turn: int = 0


def order(workers: Iterable[Worker], now: float, rule: Rule) -> list[Worker]:
    """Workers that may get the request, the best one first; equal ones keep the order of the configuration."""
    able = [worker for worker in workers if worker.obstacle(now) is None]
    if not able:
        return []
    if rule.by == "round_robin":
        first = rule.turn % len(able)
        return able[first:] + able[:first]
    if rule.by == "least_loaded" or rule.prefix is None:
        return sorted(able, key=lambda worker: worker.load)
    return _by_affinity(able, rule.prefix, rule.slack)


def rendezvous(prefix: bytes, name: str, weight: float) -> float:
    """The worker with the highest score owns the prefix: when one comes or goes, only its own prefixes move.

    score = -weight / ln(u), u uniform in (0, 1) from a hash of both
    """
    word = hashlib.blake2b(prefix + b"\0" + name.encode(), digest_size=8).digest()
    return -weight / math.log((int.from_bytes(word) + 0.5) / 2**64)


def _by_affinity(able: list[Worker], prefix: bytes, slack: float) -> list[Worker]:
    most = min(worker.load for worker in able) + slack

    def rank(worker: Worker) -> tuple[float, float]:
        # an overloaded owner comes after all that have room, by its load
        overload = worker.load if worker.load > most else -1.0
        return overload, -rendezvous(prefix, worker.name, worker.upstream.weight)

    return sorted(able, key=rank)
