"""The engine's public face: tokens in, tokens out. Importing it does not import torch."""

from engine.checkpoint_dir import resolve_checkpoint
from engine.client import Engine, EngineClient
from engine.constraint import check_constraint
from engine.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    EngineDiedError,
    EngineError,
    QueueFullError,
    RequestError,
    SamplingError,
    UnavailableError,
)
from engine.request import (
    Constraint,
    EngineInfo,
    EngineStats,
    FinishReason,
    Request,
    SamplingParams,
    ThoughtLimit,
    TokenEvent,
    TokenLogprob,
)
from engine.token_stream import Follower, join
from engine.validation import LOGIT_BIAS_RANGE, MAX_LOGIT_BIASES, SAMPLING_RANGES

__all__ = [
    "LOGIT_BIAS_RANGE",
    "MAX_LOGIT_BIASES",
    "SAMPLING_RANGES",
    "CapacityError",
    "CheckpointError",
    "Constraint",
    "ContextLengthError",
    "Engine",
    "EngineClient",
    "EngineDiedError",
    "EngineError",
    "EngineInfo",
    "EngineStats",
    "FinishReason",
    "Follower",
    "QueueFullError",
    "Request",
    "RequestError",
    "SamplingError",
    "SamplingParams",
    "ThoughtLimit",
    "TokenEvent",
    "TokenLogprob",
    "UnavailableError",
    "check_constraint",
    "join",
    "resolve_checkpoint",
]
