"""Requests and answers of chat completions, as OpenAI writes them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from server.errors import BadRequestError

# more than any client's request has
MAX_FIELDS = 1024
# known, and without effect on the answer; every other unknown field is ignored and counted too
HARMLESS = frozenset(
    {
        "metadata",
        "user",
        "store",
        "service_tier",
        "verbosity",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_control",
    }
)
# understood, but the answer would be another one than was asked for
REFUSED = {
    "audio": "answers are text only",
    "modalities": 'only ["text"] is supported',
    "web_search_options": "there is no web search",
    "prediction": "predicted outputs are not supported",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "best_of": "use n",
    "use_beam_search": "there is no beam search",
    "guided_json": "use response_format of chat completions",
    "guided_regex": "output is constrained by a JSON schema only, in response_format of chat completions",
    "guided_choice": "output is constrained by a JSON schema only, in response_format of chat completions",
    "guided_grammar": "output is constrained by a JSON schema only, in response_format of chat completions",
    "structured_outputs": "use response_format of chat completions",
    "prompt_logprobs": "log-probabilities of the prompt are not supported",
    "response_format": "only chat completions have it",
    "suffix": "text is only continued at its end",
    "echo": "the prompt is not repeated",
    "bad_words": "use logit_bias",
    "continue_final_message": "only chat completions have it",
}


# values of refused fields that ask for nothing
NEUTRAL = frozenset({b"false", b"[]", b"{}", b"0", b'"none"', b'["text"]', b'{"type":"text"}', b'{"type": "text"}'})


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: Any = None


class CustomCall(msgspec.Struct):
    name: str
    input: str | None = None


class ToolCall(msgspec.Struct):
    """Has the object of its type."""

    function: FunctionCall | None = None
    id: str | None = None
    type: str | None = None
    custom: CustomCall | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that every generating API shares. None means that the client left the choice to the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int | None = None
    logprobs: int | None = None


class GenerateRequest(SamplingFields, kw_only=True):
    """raw: the prompt is continued as it is, without the chat template."""

    prompt: str
    model: str | None = None
    max_tokens: int | None = None
    raw: bool | None = None
    enable_thinking: bool | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


# the escape of one half of a UTF-16 pair without the other; an even number of backslashes before it escapes none
HALF_PAIR = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
HALF_PAIR_REASON = r"a text holds half of a UTF-16 pair (\ud800 to \udfff), which is no character; leave it out"

SEARCH_BYTES = 65_536
PAIR_BYTES = len(rb"\ud83d\ude00")
FLOAT_FOR_INT = "got `float`"
STEP = re.compile(r"\w+")

Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body]) -> tuple[Body, list[str]]:
    """The request and the names of fields that it does not know.

    raises  BadRequestError, for wrong types with the field named
    """
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        body = _decode(raw, kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(error) from error
    except msgspec.DecodeError as error:
        reason = HALF_PAIR_REASON if _has_half_pair(raw) else str(error)
        raise BadRequestError(f"The body is not valid JSON: {reason}.", code="invalid_json") from error
    except UnicodeDecodeError as error:
        raise BadRequestError("The body is not valid UTF-8.", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequestError("The body is nested too deeply.", code="invalid_json") from error
    return body, _unknown(fields, kind)


def _has_half_pair(raw: bytes) -> bool:
    """In steps, between which others may run. A pair may lie across two of them."""
    steps = range(0, len(raw), SEARCH_BYTES)
    return any(HALF_PAIR.search(raw, max(0, start - PAIR_BYTES), start + SEARCH_BYTES) for start in steps)


def _decode(raw: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if FLOAT_FOR_INT not in str(error):
            raise
    value = msgspec.json.decode(raw)
    while True:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            if FLOAT_FOR_INT not in message or not _make_whole(value, STEP.findall(path)):
                raise


def _make_whole(value: Any, path: Sequence[str]) -> bool:
    """Floats without a fraction become integers, as some clients have no other numbers. True when any did.

    path  names of fields; a number stands for all items of its list, which would take a round each
    """
    places: list[tuple[Any, Any]] = [([value], 0)]
    for step in path:
        places = [(holder[key], inner) for holder, key in places for inner in _keys(holder[key], step)]
    whole = [(holder, key) for holder, key in places if isinstance(holder[key], float) and holder[key].is_integer()]
    for holder, key in whole:
        holder[key] = int(holder[key])
    return bool(whole)


def _keys(holder: Any, step: str) -> Iterable[Any]:
    if isinstance(holder, list):
        return range(len(holder))
    return (step,) if isinstance(holder, dict) and step in holder else ()


def _unknown(fields: dict[str, msgspec.Raw], kind: type[Body]) -> list[str]:
    if len(fields) > MAX_FIELDS:
        raise BadRequestError(f"The body has {len(fields)} fields; send no more than {MAX_FIELDS}.")
    known = set(kind.__struct_fields__)
    given = [name for name, value in fields.items() if name not in known and bytes(value) != b"null"]
    for name in given:
        if name in REFUSED and not _is_neutral(name, bytes(fields[name])):
            raise BadRequestError(
                f"{name} is not supported: {REFUSED[name]}.", param=name, code="unsupported_parameter"
            )
    return [name for name in given if name not in REFUSED]


def _is_neutral(name: str, value: bytes) -> bool:
    """Whether a refused field asks for nothing."""
    return value in NEUTRAL or (name == "best_of" and value == b"1")


def _wrong_field(error: msgspec.ValidationError) -> BadRequestError:
    message, _, path = str(error).partition(" - at `$")
    param = re.sub(r"\[\.\.\.\]", "", path.removesuffix("`")).lstrip(".") or None
    if missing := re.search(r"missing required field `(\w+)`", message):
        param = ".".join(filter(None, (param, missing[1])))
        return BadRequestError(f"{param} is missing.", param=param)
    where = f"{param}: " if param else "The body: "
    return BadRequestError(f"{where}{message[:1].lower()}{message[1:]}.", param=param)


_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    """Compact JSON without the characters that some clients take for line ends."""
    data = _encoder.encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for char in ("\u2028", "\u2029", "\x85"):
            data = data.replace(char.encode(), f"\\u{ord(char):04x}".encode())
    return data
