"""The list of models: what the upstreams serve, with the real limit for a key and a path."""

from collections.abc import Iterable
from typing import Any

from config import Lane
from router.lane import LANES, lane_members
from router.worker import Worker


def list_models(
    workers: Iterable[Worker], lane: Lane | None, lanes: tuple[Lane, ...], models: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Cards as the upstreams gave them, one per model, the one with the largest limit where several serve it.

    lane            of the path; None where it leaves the choice open
    lanes, models   that the key may use; no models: all
    """
    everyone = {worker.name: worker for worker in workers}
    candidates = [worker.candidate() for worker in everyone.values()]
    reached = [one for each in lanes if lane in (None, each) for one in lane_members(each, candidates)]
    cards: dict[str, dict[str, Any]] = {}
    for candidate in dict.fromkeys(one.name for one in reached):
        for card in _cards(everyone[candidate]):
            if not models or card["id"] in models:
                cards[card["id"]] = max(cards.get(card["id"], card), card, key=_limit)
    return [cards[name] for name in sorted(cards)]


def allowed_lanes(lanes: Iterable[str]) -> tuple[Lane, ...]:
    return tuple(lane for lane in LANES if lane in tuple(lanes))


def _cards(worker: Worker) -> list[dict[str, Any]]:
    known = worker.cards or {}
    names = worker.upstream.models or tuple(known)
    return [known.get(name) or {"id": name, "object": "model", "owned_by": worker.name} for name in names]


def _limit(card: dict[str, Any]) -> int:
    limit = card.get("max_model_len")
    return limit if isinstance(limit, int) else 0
