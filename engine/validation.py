"""Checks a request against what the engine serves, before anything is queued."""

import math
from collections.abc import Sequence
from itertools import pairwise

from engine.constraint import check_constraint
from engine.errors import ContextLengthError, RequestError, SamplingError
from engine.request import Constraint, EngineInfo, Request, SamplingParams

MAX_LOGPROBS = 20
# each is looked through for every token, and for every request before it is queued
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024

# field -> lowest and highest value; both are allowed
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 10.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    # less takes logits out of the range of fp32
    "repetition_penalty": (0.01, 10.0),
}
LOGIT_BIAS_RANGE = (-100.0, 100.0)


def check_request(request: Request, info: EngineInfo) -> None:
    """raises  ContextLengthError, SamplingError; RequestError for token ids that the vocabulary does not have"""
    prompt, sampling = request.prompt_token_ids, request.sampling
    _check_prompt(prompt, info.vocab_size)
    check_sampling(sampling, info.vocab_size)
    _check_marks(request.marks, len(prompt))
    if len(prompt) + sampling.max_tokens > info.max_model_len:
        raise ContextLengthError(info.max_model_len, len(prompt), sampling.max_tokens)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """raises  SamplingError that names the parameter and the values it may have"""
    for name, allowed in SAMPLING_RANGES.items():
        _check_range(name, getattr(params, name), allowed)
    _check_counts(params)
    _check_logit_bias(params, vocab_size)
    _check_count("stop_token_ids", len(params.stop_token_ids), MAX_STOP_TOKEN_IDS)
    for token_id in params.stop_token_ids:
        if not 0 <= token_id < vocab_size:
            raise SamplingError("stop_token_ids", f"must lie between 0 and {vocab_size - 1}, got {token_id}")
    if params.constraint is not None:
        _check_constraint(params.constraint, params.stop_token_ids, vocab_size)


def _check_constraint(constraint: Constraint, stop_token_ids: Sequence[int], vocab_size: int) -> None:
    check_constraint(constraint)
    if constraint.grammar is not None and not stop_token_ids:
        raise SamplingError(constraint.param, "needs a stop id, since its output has to end")
    if (limit := constraint.thought) is not None:
        if limit.max_tokens < 0:
            raise SamplingError(constraint.param, f"must be 0 or more, got {limit.max_tokens}")
        if not all(0 <= token_id < vocab_size for token_id in limit.end_token_ids):
            raise SamplingError(constraint.param, f"ends with ids that do not lie between 0 and {vocab_size - 1}")


def _check_range(name: str, value: float, allowed: tuple[float, float]) -> None:
    low, high = allowed
    if not (math.isfinite(value) and low <= value <= high):
        raise SamplingError(name, f"must lie between {low:g} and {high:g}, got {value}")


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise SamplingError(name, f"may have at most {most} entries, got {count}")


def _check_counts(params: SamplingParams) -> None:
    if params.max_tokens < 1:
        raise SamplingError("max_tokens", f"must be at least 1, got {params.max_tokens}")
    if params.top_k < 0:
        raise SamplingError("top_k", f"must be 0 (off) or more, got {params.top_k}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise SamplingError("min_tokens", f"must lie between 0 and {params.max_tokens}, got {params.min_tokens}")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise SamplingError("logprobs", f"must lie between 0 and {MAX_LOGPROBS}, got {params.logprobs}")
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise SamplingError("seed", f"must be a 64-bit integer, got {params.seed}")


def _check_logit_bias(params: SamplingParams, vocab_size: int) -> None:
    _check_count("logit_bias", len(params.logit_bias), MAX_LOGIT_BIASES)
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            raise SamplingError("logit_bias", f"token ids must lie between 0 and {vocab_size - 1}, got {token_id}")
        _check_range("logit_bias", bias, LOGIT_BIAS_RANGE)


def _check_marks(marks: Sequence[int], num_prompt_tokens: int) -> None:
    if not all(before < after for before, after in pairwise((0, *marks, num_prompt_tokens + 1))):
        raise RequestError(f"marks must ascend from 1 to {num_prompt_tokens} at most")


def _check_prompt(token_ids: Sequence[int], vocab_size: int) -> None:
    if not token_ids:
        raise RequestError("prompt_token_ids is empty: give at least one token")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"prompt_token_ids must lie between 0 and {vocab_size - 1}, got {bad}")
