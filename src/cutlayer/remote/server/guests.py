"""Ends the sessions of clients that are taken off the list while the server runs."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cutlayer.errors import ConfigError, LinkError
from cutlayer.remote.identity.register import Register
from cutlayer.remote.identity.repeating import repeating
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.server.sessions import Sessions

log = logging.getLogger("cutlayer")

LOOK_SECONDS = 2.0  # between two looks at the list


@dataclass(kw_only=True)
class Guests:
    """The clients that are present, and the list that they must be in."""

    path: Path | None  # None: the server is open to everybody
    sessions: Sessions
    board: Board
    _read: bytes | None = field(default=None, init=False)  # the text of the list that was read last
    _register: Register | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look every few seconds inside the block."""
        with repeating(LOOK_SECONDS, self.look):
            yield

    def look(self) -> None:
        """Read the list again if it has changed, and end the sessions of those who are not in it."""
        if self.path is None:
            return
        with self._lock:
            self._reread(self.path)
            for client, session in self.sessions.present().items():
                if reason := self._objection(client, session.name):
                    self.board.refused(client, reason)
                    self.sessions.leave(client, session.number, reason)

    def names(self) -> dict[int, str]:
        """Return the names of those in the list, as it was read last, by number."""
        return {} if self._register is None else {j: name for name, j in self._register.clients.items()}

    def _reread(self, path: Path) -> None:
        try:
            text = path.read_bytes()
        except OSError:
            text = b""
        if text == self._read:
            return
        self._read = text
        try:
            self._register = Register.read(path)
        except ConfigError as error:  # perhaps it is being copied: those who are here stay until it can be read
            log.warning("%s; nobody new can join until then", error)

    def _objection(self, client: int, name: str) -> str:
        if self._register is None:
            return ""
        try:
            number = self._register.number(name)
        except LinkError as error:
            return str(error)
        return "" if number == client else f"client {name!r} has the number {number} in the list by now, not {client}"
