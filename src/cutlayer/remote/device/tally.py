"""Small files of named numbers: what a device counts against its servers, whatever becomes of its process or power."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from cutlayer.core.checks import is_number
from cutlayer.errors import ConfigError, LawError
from cutlayer.runs.checkpoint import sync_folder, write_to_disk

log = logging.getLogger("cutlayer")


def read(file: Path) -> dict[str, float]:
    """Return the numbers of a file, none if it was never written; refuse one that was emptied, cut short or changed."""
    try:
        numbers = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check who owns it and its mode") from None
    except ValueError:  # not JSON, or not UTF-8; a file that was cut short lacks its closing brace
        numbers = None
    if not isinstance(numbers, dict) or not all(is_number(n) and n >= 0 for n in numbers.values()):
        raise ConfigError(
            f"{file} is damaged and no longer tells what this device has given; put back a copy, or delete it to count "
            "from zero"
        )
    return numbers


def write(file: Path, numbers: Mapping[str, float]) -> None:
    """Replace a file, and wait until it is on the disk: what is not counted must not be given."""
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial.touch(mode=0o600)
        write_to_disk(partial, json.dumps(numbers).encode())
        partial.replace(file)
        sync_folder(file.parent)
    except OSError as error:
        log.error("%s cannot be written: %s", file, error.strerror or error)
        # The server is told this, so the place of the file is not part of it.
        raise LawError("this device cannot count what it gives; its own log says why") from None
