"""Logs for people and for machines, in which no client can forge a line."""

import json
import logging
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from cutlayer.errors import ConfigError

MOST_CHARACTERS = 200  # of a text that a client gave
MOST_OF_A_MESSAGE = 2000
MOST_ITEMS = 100  # of a list
NEEDS_QUOTES = frozenset(' ="')


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text without line ends, terminal escapes and other characters that are not seen, and not too long."""
    seen = "".join(_seen(c) for c in text[: most + 1])
    return seen if len(seen) <= most else seen[: most - 1] + "…"


def event(log: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a message with its fields: as words for people, as keys for machines."""
    if log.isEnabledFor(level):
        words = [message, *(f"{key}={_word(_plain(value))}" for key, value in fields.items())]
        log.log(level, " ".join(words), extra={"event": message, "fields": fields}, stacklevel=2)


def structured(target: TextIO | Path | str) -> logging.Handler:
    """A handler that writes a JSON object a line to a stream, or to the end of a file."""
    handler = _file(Path(target)) if isinstance(target, Path | str) else logging.StreamHandler(target)
    handler.setFormatter(_Json())
    return handler


def _file(path: Path) -> logging.Handler:
    try:
        return logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the log cannot be written to {path}: {error.strerror}; name a file in a folder that exists "
            "and that you may write to"
        ) from None


class _Json(logging.Formatter):
    """A record as a JSON object in one line."""

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": printable(getattr(record, "event", None) or record.getMessage(), MOST_OF_A_MESSAGE),
        }
        fields = {key: _plain(value) for key, value in getattr(record, "fields", {}).items() if key not in own}
        if record.exc_info:
            fields["traceback"] = [printable(line) for line in self.formatException(record.exc_info).splitlines()]
        return json.dumps(own | fields, ensure_ascii=False)  # all that is in it was made printable


def _seen(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


def _plain(value: Any) -> Any:
    """What JSON can hold; of anything else, such as a tensor, only its type."""
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
    """A plain value in a line of words; quoted where it would read as more than one."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False) if not value or NEEDS_QUOTES & set(value) else value
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
