"""Token counts that an upstream reports, read from their own place only: elsewhere an answer may repeat its client."""

from typing import Annotated

import msgspec

COMMENT = b": usage "
_Count = Annotated[int, msgspec.Meta(ge=0)] | None


class _Details(msgspec.Struct):
    cached_tokens: _Count = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count = None
    output_tokens: _Count = None
    input_tokens_details: _Details | None = None
    cached_tokens: _Count = None
    cache_read_input_tokens: _Count = None
    cache_creation_input_tokens: _Count = None


class _Within(msgspec.Struct):
    usage: _Usage | None = None


class _Named(msgspec.Struct):
    id: str | None = None
    response: "_Named | None" = None


class _Body(_Usage):
    """`/generate` tells its counts beside the text."""

    usage: _Usage | None = None
    response: _Within | None = None
    message: _Within | None = None


_BODY = msgspec.json.Decoder(_Body)
_USAGE = msgspec.json.Decoder(_Usage)
_NAMED = msgspec.json.Decoder(_Named)


def body_counts(body: bytes) -> dict[str, int]:
    """`prompt`, `cached` and `output` of a whole answer or one event's data, as far as it tells them."""
    found = _decode(_BODY, body)
    if found is None:
        return {}
    within = found.response or found.message
    return _counts(found.usage or (within and within.usage) or found)


def line_counts(line: bytes) -> dict[str, int]:
    """Those of one line of an event stream."""
    if line.startswith(b"data:"):
        return body_counts(line[5:])
    return _counts(_decode(_USAGE, line[len(COMMENT) :])) if line.startswith(COMMENT) else {}


def response_id(body: bytes) -> str | None:
    """The name of a response, told by the whole one or by one event's data."""
    found = _decode(_NAMED, body)
    if found is None:
        return None
    return found.response.id if found.response else found.id


def _decode(decoder: msgspec.json.Decoder, text: bytes):
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # no JSON, or no counts where counts belong: the estimate stays
        return None


def _counts(usage: _Usage | None) -> dict[str, int]:
    if usage is None:
        return {}
    found = {
        "prompt": _prompt(usage),
        "cached": _cached(usage),
        "output": usage.completion_tokens if usage.output_tokens is None else usage.output_tokens,
    }
    return {name: count for name, count in found.items() if count is not None}


def _prompt(usage: _Usage) -> int | None:
    if usage.input_tokens is None:
        return usage.prompt_tokens
    # the Messages API counts what its cache held apart from `input_tokens`; no other API has these two
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def _cached(usage: _Usage) -> int | None:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    told = (details and details.cached_tokens, usage.cached_tokens, usage.cache_read_input_tokens)
    return next((count for count in told if count is not None), None)
