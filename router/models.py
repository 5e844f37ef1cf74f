"""The list of models: what the upstreams serve, with the real limit for a key and a path."""

from collections.abc import Iterable, Mapping
from typing import Any

from config import Alias, Lane
from router.lane import LANES, lane_members
from router.names import AUTO, matches_any, resolve
from router.worker import Worker

Cards = dict[str, dict[str, Any]]


def list_models(
    workers: Iterable[Worker],
    lane: Lane | None,
    lanes: tuple[Lane, ...],
    models: tuple[str, ...],
    aliases: tuple[Alias, ...] = (),
    auto_models: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Cards as the upstreams gave them, one per model, the one with the largest limit where several serve it.

    lane            of the path; None where it leaves the choice open
    lanes, models   that the key may use; no models: all
    aliases         listed under their names, those without `*`
    """
    served = _served(workers, lane, lanes)
    cards = dict(served)
    auto = [card for name, card in served.items() if matches_any(auto_models, name) and _may(models, name, AUTO)]
    if auto:
        cards[AUTO] = max(auto, key=_limit) | {"id": AUTO}
    for alias in aliases:
        target = resolve(alias.name, aliases, served)
        if "*" not in alias.name and target in cards:
            cards[alias.name] = cards[target] | {"id": alias.name}
    named = {alias.name: alias.model for alias in aliases}
    return [cards[name] for name in sorted(cards) if name == AUTO or _may(models, name, named.get(name, name))]


def allowed_lanes(lanes: Iterable[str]) -> tuple[Lane, ...]:
    return tuple(lane for lane in LANES if lane in tuple(lanes))


def _served(workers: Iterable[Worker], lane: Lane | None, lanes: tuple[Lane, ...]) -> Cards:
    everyone = {worker.name: worker for worker in workers}
    candidates = [worker.candidate() for worker in everyone.values()]
    reached = [one for each in lanes if lane in (None, each) for one in lane_members(each, candidates)]
    cards: Cards = {}
    for name in dict.fromkeys(one.name for one in reached):
        for card in everyone[name].listed():
            cards[card["id"]] = max(cards.get(card["id"], card), card, key=_limit)
    return cards


def _may(models: tuple[str, ...], *names: str) -> bool:
    return not models or any(matches_any(models, name) for name in names)


def _limit(card: Mapping[str, Any]) -> int:
    return card.get("max_model_len", 0)
