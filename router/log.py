"""One line per event on standard error; requests are told without their content."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "message": record.getMessage()} | _fields(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = (f"{name}={_word(value)}" for name, value in _fields(record).items() if value is not None)
        words = " ".join((f"gateway: {_line(record.getMessage())}", *fields))
        return f"{words}\n{self.formatException(record.exc_info)}" if record.exc_info else words


def start_logging(level: str, form: Literal["json", "text"]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("longlane").setLevel(level.upper())


def _line(text: str) -> str:
    """Without the control characters by which a client could write lines of its own."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def _word(value: Any) -> str:
    """One word where nothing in it could pass for the next field."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' ="') else json.dumps(text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})
