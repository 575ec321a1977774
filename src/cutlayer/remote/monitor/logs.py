"""Logs for people and for machines; no client can forge a line in them."""

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from cutlayer.core.text import printable
from cutlayer.errors import ConfigError

MOST_OF_A_MESSAGE = 2000
MOST_ITEMS = 100  # of a list
NEEDS_QUOTES = frozenset(' ="')


def event(log: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a message with its fields: as words for people, as keys of a JSON object for machines."""
    if log.isEnabledFor(level):
        words = [message, *(f"{key}={_word(_plain(value))}" for key, value in fields.items())]
        log.log(level, " ".join(words), extra={"event": message, "fields": fields}, stacklevel=2)


def structured(target: TextIO | Path) -> logging.Handler:
    """Return a handler that writes one JSON object per line to a stream, or appends it to a file."""
    try:
        handler = (
            logging.FileHandler(target, encoding="utf-8") if isinstance(target, Path) else logging.StreamHandler(target)
        )
    except OSError as error:
        raise ConfigError(
            f"the log cannot be written to {target}: {error.strerror}; name a file in a folder that exists "
            "and that you may write to"
        ) from None
    handler.setFormatter(_Json())
    return handler


class _Json(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": printable(getattr(record, "event", None) or record.getMessage(), MOST_OF_A_MESSAGE),
        }
        fields = {key: _plain(value) for key, value in getattr(record, "fields", {}).items() if key not in own}
        if record.exc_info:
            fields["traceback"] = [printable(line) for line in self.formatException(record.exc_info).splitlines()]
        return json.dumps(own | fields, ensure_ascii=False)  # its texts are printable


def _plain(value: Any) -> Any:
    """Return what JSON can hold; of any other value, such as a tensor, only its type."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | Path | BaseException):
        return printable(str(value))
    if isinstance(value, Mapping):
        return {printable(str(key)): _plain(inner) for key, inner in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value[:MOST_ITEMS]]
    return f"<{type(value).__name__}>"


def _word(value: Any) -> str:
    """Format a plain value for a line of words; quote a text that would read as more than one word."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if not value or NEEDS_QUOTES & set(value) else value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
