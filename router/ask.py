"""Reads from a request body what the gateway has to know; the body itself goes on untouched."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import RequestError

# pictures and sound: their base64 is no text
_BASE64 = re.compile(rb'(?:;base64,|"data"\s*:\s*")[A-Za-z0-9+/=]{64,}')
# \uXXXX takes six bytes for a character of two or three
_ESCAPE_SURPLUS = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as the lane rule sees it.

    text_bytes      size of what becomes prompt tokens
    conversation    the same for every request of one conversation; None when nothing tells
    is_repeatable   a second upstream may get it when the first one fails
    wants_usage     the client itself asked for usage in the stream
    previous        the response that it goes on from
    prefix          digest of the messages' raw leading bytes, through the first one of the user
    """

    model: str | None = None
    is_stream: bool = False
    text_bytes: int = 0
    conversation: str | None = None
    is_repeatable: bool = True
    wants_usage: bool = False
    prefix: bytes | None = None
    previous: str | None = None


class _Message(msgspec.Struct):
    role: Any = None
    content: msgspec.Raw = msgspec.Raw()


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None
    store: Any = None
    previous_response_id: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    stream_options: Any = None
    messages: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_BODY = msgspec.json.Decoder(_Body)
_MESSAGES = msgspec.json.Decoder(list[_Message])


def read_ask(body: bytes, session: str | None, key_name: str) -> Ask:
    """Raises RequestError for what is no JSON object or names no model properly.

    session   the client's session header
    key_name  conversations of different keys stay apart
    """
    fields = _decode(body)
    if fields.model is not None and not isinstance(fields.model, str):
        raise RequestError("model must be a string", "model")
    prefix = _prefix(fields, key_name)
    return Ask(
        model=fields.model,
        is_stream=fields.stream is True,
        text_bytes=text_bytes(body),
        conversation=_conversation(fields, session, key_name) or (prefix.hex() if prefix else None),
        is_repeatable=fields.store is not True and fields.previous_response_id is None,
        wants_usage=isinstance(fields.stream_options, dict) and fields.stream_options.get("include_usage") is True,
        prefix=prefix,
        previous=fields.previous_response_id if isinstance(fields.previous_response_id, str) else None,
    )


def text_bytes(body: bytes) -> int:
    """Bytes of a body without base64, escapes counted as the characters they stand for."""
    size = len(body) - _ESCAPE_SURPLUS * body.count(b"\\u")
    if b"base64" in body or b'"data"' in body:
        size -= sum(len(match[0]) for match in _BASE64.finditer(body))
    return max(size, 0)


def _decode(body: bytes) -> _Body:
    try:
        return _BODY.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError("the body must be a JSON object") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def _conversation(fields: _Body, session: str | None, key_name: str) -> str | None:
    """By the name that the client gives it; None where it gives none."""
    named = session or fields.prompt_cache_key or _user_id(fields.metadata)
    return hashlib.sha256(f"{key_name}\0{named}".encode()).hexdigest() if isinstance(named, str) else None


def _prefix(fields: _Body, key_name: str) -> bytes | None:
    # keys share no cache
    opening = _opening(fields)
    return hashlib.sha256(key_name.encode() + b"\0" + opening).digest() if opening else None


def _user_id(metadata: Any) -> Any:
    return metadata.get("user_id") if isinstance(metadata, dict) else None


def _opening(fields: _Body) -> bytes:
    """System text and first user message: what stays when a conversation grows."""
    head = bytes(fields.system) + bytes(fields.instructions)
    for turns in (fields.messages, fields.input):
        if turns:
            return head + _first_turns(bytes(turns))
    return head + bytes(fields.prompt)


def _first_turns(turns: bytes) -> bytes:
    try:
        messages = _MESSAGES.decode(turns)
    except (msgspec.DecodeError, RecursionError):
        # a plain text input, or a form that the upstream will judge
        return turns
    opening = b""
    for message in messages:
        opening += bytes(message.content)
        if message.role == "user":
            break
    return opening
