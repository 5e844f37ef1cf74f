"""Which lane a request takes, and why: plain data in, a Decision out."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from config import Lane
from router.errors import ForbiddenError, ModelNotFoundError, UnavailableError
from router.names import AUTO, matches, matches_any

LANES: tuple[Lane, ...] = ("long", "short")
Reason = Literal["path", "key", "model", "limit", "conversation", "length"]

# a conversation leaves the long lane only well below the length that took it there
STAY_LONG = 0.5
_DEFAULT_BYTES_PER_TOKEN = 3.8
_LEARNING_RATE = 0.1
_LEAST_LEARNABLE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """An upstream as the lane rule sees it.

    models  name -> max_model_len, None where the upstream does not tell; None while its models are not yet known
    """

    name: str
    lane: Lane
    models: Mapping[str, int | None] | None


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request asks of the lane rule. Lanes and models are those that its key may use; no models: all.

    model        as the client named it
    target       what that name stands for; None: itself
    auto_models  patterns of the models that `auto` may stand for
    """

    model: str | None
    prompt_tokens: int
    lane: Lane | None = None
    lanes: tuple[Lane, ...] = LANES
    models: tuple[str, ...] = ()
    last_lane: Lane | None = None
    target: str | None = None
    auto_models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The lane taken, the reason, and the names of upstreams: of the lane, then of the other one as `spares`.

    models  upstream -> the name by which it serves the model, where that is not the client's
    """

    lane: Lane
    reason: Reason
    prompt_tokens: int
    workers: tuple[str, ...]
    spares: tuple[str, ...] = ()
    is_fallback: bool = False
    models: Mapping[str, str] = field(default_factory=dict)


def choose(wish: Wish, candidates: Sequence[Candidate], long_prompt_tokens: int) -> Decision:
    """Path, else the only lane that the key may use or that serves the model, else the conversation's, else length.

    raises  ForbiddenError, ModelNotFoundError, UnavailableError
    """
    if wish.lane is not None and wish.lane not in wish.lanes:
        raise ForbiddenError(f"this key may not use the {wish.lane} lane; it may use: {', '.join(wish.lanes)}")
    if not candidates:
        raise UnavailableError("no upstream is known right now")
    asked = (wish.lane,) if wish.lane else wish.lanes
    reached = {lane: lane_members(lane, candidates) for lane in asked}
    serving = _serving(wish, [one for one in candidates if any(one in members for members in reached.values())])
    fitting = _fitting(wish, serving)
    by_lane = {lane: [one.name for one in reached[lane] if one.name in fitting] for lane in asked}
    open_lanes = [lane for lane in asked if by_lane[lane]]
    lane, reason = _pick(wish, open_lanes, len(fitting) < len(serving), long_prompt_tokens)
    others = [name for other in open_lanes if other != lane for name in by_lane[other]]
    return Decision(
        lane,
        reason,
        wish.prompt_tokens,
        tuple(by_lane[lane]),
        tuple(name for name in others if name not in by_lane[lane]),
        is_fallback=is_fallback(lane, candidates),
        models={name: model for name, (model, _) in fitting.items() if model not in (None, wish.model)},
    )


def lane_members(lane: Lane, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Upstreams of a lane; every upstream where none is configured for it."""
    everyone = list(candidates)
    return [one for one in everyone if one.lane == lane] or everyone


def is_fallback(lane: Lane, candidates: Iterable[Candidate]) -> bool:
    return all(candidate.lane != lane for candidate in candidates)


def model_names(candidates: Iterable[Candidate], allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = {name for one in candidates for name in one.models or ()}
    return tuple(sorted(name for name in names if not allowed or matches_any(allowed, name)))


# upstream -> the model that it would run, and its limit
Serving = dict[str, tuple[str | None, float]]


def _serving(wish: Wish, reached: list[Candidate]) -> Serving:
    if wish.model is None:
        return {one.name: (None, _largest(one.models or {})) for one in reached}
    target = wish.target or wish.model
    is_allowed = not wish.models or matches_any(wish.models, wish.model) or matches_any(wish.models, target)
    known = [one for one in reached if one.models is not None and (is_allowed or target == AUTO)]
    serving = {one.name: found for one in known if (found := _served_by(one, wish, target)) is not None}
    # an upstream that was never reached may serve it: better a 503 than a false 404
    unknown = {one.name: (target, math.inf) for one in reached if one.models is None and is_allowed}
    if not serving and not unknown:
        raise ModelNotFoundError(wish.model, model_names(reached, wish.models))
    return serving or unknown


def _served_by(candidate: Candidate, wish: Wish, target: str) -> tuple[str, float] | None:
    """The model that stands for the target at this upstream, and its limit."""
    models = candidate.models or {}
    pattern = next((name for name in (target, *models) if name in models and matches(name, target)), None)
    if pattern is not None:
        return target, _number(models[pattern])
    if target != AUTO:
        return None
    # the key may name `auto` itself, or models that it stands for
    allowed = [name for name in models if "*" not in name and matches_any(wish.auto_models, name)]
    if wish.models and not matches_any(wish.models, AUTO):
        allowed = [name for name in allowed if matches_any(wish.models, name)]
    return max(((name, _number(models[name])) for name in allowed), key=lambda pair: pair[1], default=None)


def _fitting(wish: Wish, serving: Serving) -> Serving:
    fitting = {name: (model, limit) for name, (model, limit) in serving.items() if limit >= wish.prompt_tokens}
    if fitting:
        return fitting
    # nothing fits by the estimate: the roomiest one judges by its own count
    largest = max(limit for _, limit in serving.values())
    return {name: (model, limit) for name, (model, limit) in serving.items() if limit == largest}


def _largest(models: Mapping[str, int | None]) -> float:
    return max(map(_number, models.values()), default=math.inf)


def _number(limit: int | None) -> float:
    return math.inf if limit is None else limit


def _pick(wish: Wish, open_lanes: Sequence[Lane], has_misfits: bool, long_prompt_tokens: int) -> tuple[Lane, Reason]:
    if wish.lane is not None:
        return wish.lane, "path"
    if len(wish.lanes) == 1:
        return wish.lanes[0], "key"
    if len(open_lanes) == 1:
        return open_lanes[0], "limit" if has_misfits else "model"
    by_length: Lane = "long" if wish.prompt_tokens >= long_prompt_tokens else "short"
    if wish.last_lane == "long" and by_length == "short" and wish.prompt_tokens >= STAY_LONG * long_prompt_tokens:
        return "long", "conversation"
    return by_length, "length"


Kept = TypeVar("Kept")


class Memory(Generic[Kept]):
    """What is known of each conversation or response; the longest unchanged ones are forgotten past `capacity`."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def recall(self, name: str | None) -> Kept | None:
        return self._kept.get(name) if name else None

    def remember(self, name: str | None, what: Kept) -> None:
        if name is None:
            return
        self._kept[name] = what
        self._kept.move_to_end(name)
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)


LaneMemory = Memory[Lane]
# `stored_as` -> name of the upstream, whose process alone has the conversation behind a response
ResponseMemory = Memory[str]


def stored_as(tenant: str, response_id: str | None) -> str | None:
    """Keys do not learn of each other's responses."""
    return f"{tenant}\0{response_id}" if response_id else None


@dataclass(slots=True)
class TokenRatio:
    """Bytes of text per prompt token, learned per model from the usage that upstreams report."""

    bytes_per_token: dict[str, float] = field(default_factory=dict)

    def estimate(self, text_bytes: int, model: str | None) -> int:
        return math.ceil(text_bytes / self.bytes_per_token.get(model or "", _DEFAULT_BYTES_PER_TOKEN))

    def learn(self, text_bytes: int, model: str | None, prompt_tokens: int | None) -> None:
        """Takes only models that were served, so the table stays as small as the list of models."""
        if model is None or not prompt_tokens or text_bytes < _LEAST_LEARNABLE_BYTES:
            return
        known = self.bytes_per_token.get(model, _DEFAULT_BYTES_PER_TOKEN)
        self.bytes_per_token[model] = known + _LEARNING_RATE * (text_bytes / prompt_tokens - known)
