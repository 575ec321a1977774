"""A device's own record of what has left it: one JSON object per line."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.tree import Tree
from cutlayer.errors import ConfigError, LawError
from cutlayer.remote.tensors.forms import content

log = logging.getLogger("cutlayer")


class Audit:
    """Appends to a file what leaves, when, under which kind, with its bytes and its digest."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lines = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror or error}; choose another --audit") from None

    def leaving(self, round: int, to: str, kinds: Sequence[str], values: Sequence[Tree]) -> None:
        """Record values before they leave."""
        left = [
            {"kind": kind, "bytes": tree.num_bytes(value), "sha256": digest(value)}
            for kind, value in zip(kinds, values, strict=True)
        ]
        self._write({"round": round + 1, "to": to, "values": left})

    def refusing(self, round: int, where: str, reason: str) -> None:
        """Record the text of a refusal, which a server gets in place of values."""
        self._write({"round": round + 1, "refused": f"{where}: {reason}"})

    def _write(self, line: Mapping[str, Any]) -> None:
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            self._lines.write(json.dumps({"time": time, **line}) + "\n")
            self._lines.flush()
        except OSError as error:  # what is not on record must not leave
            log.error("%s cannot be written: %s", self.file, error.strerror or error)
            # The server is told this, so the place of the file is not part of it.
            raise LawError("this device cannot record what leaves it; its own log says why") from None


def digest(value: Tree) -> str:
    """Return the SHA-256 of a value: the bytes of its tensors, then its numbers as text."""
    found = hashlib.sha256()
    for leaf in tree.leaves(value):
        found.update(content(leaf).numpy().data if isinstance(leaf, Tensor) else repr(leaf).encode())
    return found.hexdigest()
