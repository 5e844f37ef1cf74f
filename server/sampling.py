"""Sampling values of a request: checked, and filled in with the checkpoint's own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine import LOGIT_BIAS_RANGE, MAX_LOGIT_BIASES, SAMPLING_RANGES, SamplingParams
from server.checkpoint import SamplingDefaults
from server.errors import BadRequestError, PromptTooLongError
from server.model import ServedModel
from server.prompt import Prompt
from server.protocol import SamplingFields

MAX_CHOICES = 16
MAX_STOPS = 64
MAX_STOP_TOKENS = 1_024
MAX_TOP_LOGPROBS = 20
# name -> lowest and highest value
RANGES = SAMPLING_RANGES | {
    # the API's own, narrower than the engine's
    "temperature": (0.0, 2.0),
    "top_k": (-1, 1_000_000),
    "seed": (-(2**63), 2**64 - 1),
    "n": (1, MAX_CHOICES),
    "min_tokens": (0, 1_000_000),
}
SEED_MASK = 2**63 - 1


def check_ranges(request: SamplingFields) -> None:
    for name, (low, high) in RANGES.items():
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise BadRequestError(f"{name}: {value} is not between {low} and {high}.", param=name)
    if len(request.stop_token_ids or ()) > MAX_STOP_TOKENS:
        raise BadRequestError(
            f"stop_token_ids: {len(request.stop_token_ids)} ids; at most {MAX_STOP_TOKENS} are allowed.",
            param="stop_token_ids",
        )
    if request.top_p == 0:
        raise BadRequestError(
            "top_p: 0 leaves no token to choose; for greedy output write temperature 0.", param="top_p"
        )


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop: {len(stops)} strings; at most {MAX_STOPS} are allowed.", param="stop")
    if "" in stops:
        raise BadRequestError(
            "stop: an empty string would stop before the first character; leave it out.", param="stop"
        )
    return stops


def logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    low, high = LOGIT_BIAS_RANGE
    if len(bias or ()) > MAX_LOGIT_BIASES:
        raise BadRequestError(
            f"logit_bias: {len(bias)} entries; at most {MAX_LOGIT_BIASES} are allowed.", param="logit_bias"
        )
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit() or len(key) > 9 or int(key) >= vocab_size:
            raise BadRequestError(f"logit_bias: {key!r} is no token id below {vocab_size}.", param="logit_bias")
        if not low <= value <= high:
            raise BadRequestError(f"logit_bias: {value} is not between {low:g} and {high:g}.", param="logit_bias")
        found[int(key)] = value
    return found


def num_logprobs(wants: bool | None, top: int | None) -> int | None:
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise BadRequestError(f"top_logprobs: {top} is not between 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")
    if top and not wants:
        raise BadRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return (top or 0) if wants else None


@dataclass(frozen=True, slots=True)
class OutputLimit:
    """How many tokens a request asks for, and the words for it in errors.

    name    the limit's field; prompt  the field that a too long prompt stands in
    """

    asked: int | None
    default: int
    name: str = "max_tokens"
    prompt: str = "messages"


def output_limit(limit: OutputLimit, num_prompt_tokens: int, max_model_len: int) -> int:
    """What is asked for, as far as it fits. raises PromptTooLongError when nothing fits"""
    if limit.asked is not None and limit.asked < 1:
        raise BadRequestError(f"{limit.name}: {limit.asked} is less than 1.", param=limit.name)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise PromptTooLongError(max_model_len, num_prompt_tokens, param=limit.prompt)
    return min(limit.default if limit.asked is None else limit.asked, room)


def sampling_for(
    request: SamplingFields, model: ServedModel, limit: OutputLimit, logprobs: int | None = None
) -> Callable[[Prompt], SamplingParams]:
    """The values for a prompt, whose length decides what fits after it. The returned function raises BadRequestError"""

    def params(prompt: Prompt) -> SamplingParams:
        return sampling_params(
            request,
            model.files.sampling,
            max_tokens=output_limit(limit, len(prompt.token_ids), model.max_model_len),
            vocab_size=model.info.vocab_size,
            stop_token_ids=model.files.stop_token_ids,
            logprobs=logprobs,
        )

    return params


def sampling_params(
    request: SamplingFields,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    vocab_size: int,
    stop_token_ids: Sequence[int],
    logprobs: int | None,
) -> SamplingParams:
    """raises BadRequestError"""

    def chosen(name: str, neutral: Any = 0.0) -> Any:
        value = getattr(request, name)
        return getattr(defaults, name, neutral) if value is None else value

    ends = () if request.ignore_eos else tuple(stop_token_ids)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=chosen("temperature"),
        # -1 is another way to say off
        top_k=max(0, chosen("top_k")),
        top_p=chosen("top_p"),
        min_p=chosen("min_p"),
        presence_penalty=chosen("presence_penalty"),
        frequency_penalty=chosen("frequency_penalty"),
        repetition_penalty=chosen("repetition_penalty"),
        logit_bias=logit_bias(request.logit_bias, vocab_size),
        seed=None if request.seed is None else request.seed & SEED_MASK,
        stop_token_ids=(*ends, *(request.stop_token_ids or ())),
        min_tokens=min(chosen("min_tokens", 0), max_tokens),
        logprobs=logprobs,
    )
