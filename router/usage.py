"""The edits that the gateway makes: the model's own name in a request, and usage that only its accounts asked for."""

import json
import re
from typing import Any

_ASKED = b'"stream_options":{"include_usage":true}'
_COMMENT = b": usage {"
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_EVENTS = re.compile(rb".+?(?:\r\n\r\n|\n\n|\r\r|\n\r\n|\Z)", re.DOTALL)


def ask_for_usage(body: bytes) -> bytes:
    return _with_member(body, _ASKED)


def ask_for_model(body: bytes, model: str) -> bytes:
    """The same request for a model of another name."""
    return _with_member(body, b'"model":' + json.dumps(model).encode())


def _with_member(body: bytes, member: bytes) -> bytes:
    """The JSON object with one more member at its end; of two equal names the last one counts."""
    head = body.rstrip()[:-1]
    return head + (b"" if head.strip() == b"{" else b",") + member + b"}"


def without_usage_comment(events: bytes) -> bytes:
    """Whole events without the comment that the engine's server appends for a gateway that knows the secret."""
    if _COMMENT not in events:
        return events
    return b"".join(event for event in _EVENTS.findall(events) if not event.startswith(_COMMENT))


def without_usage_event(events: bytes) -> bytes:
    """Whole events without the one that carries usage and no choice; everything else unchanged."""
    if not _NO_CHOICES.search(events):
        return events
    return b"".join(event for event in _EVENTS.findall(events) if not _is_usage(event))


def _is_usage(event: bytes) -> bool:
    for line in event.splitlines():
        if line.startswith(b"data:") and _NO_CHOICES.search(line):
            data = _object(line[5:])
            return data.get("choices") == [] and isinstance(data.get("usage"), dict)
    return False


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        # the client judges what it gets
        return {}
    return value if isinstance(value, dict) else {}
