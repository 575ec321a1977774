"""The values that a client keeps between rounds, in a folder if it has one, so that they outlive the process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cutlayer.core import tree
from cutlayer.core.memory import check_kept
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient
from cutlayer.errors import CheckpointError
from cutlayer.remote.protocol.messages import KeptVersion
from cutlayer.runs.checkpoint import Store
from cutlayer.runs.lock import lock, unlock

log = logging.getLogger("cutlayer")


class StoredValue(NamedTuple):
    """A value with its version, and the token of the round in which it was kept."""

    version: int
    token: int
    value: Tree


@contextmanager
def reserved(folder: Path | None) -> Iterator[None]:
    """Make and lock the folder of what a device keeps, until the end of the block or the process."""
    handle = None
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("%s cannot be made (%s): what this device keeps is lost when it stops", folder, error.strerror)
        else:
            handle = lock(folder, "another process has joined as this device; stop it, or give each a --state")
    try:
        yield
    finally:
        if handle is not None:
            unlock(handle)


@dataclass
class ClientStore:
    """One client's values by name."""

    client: int
    folder: Path | None = None
    token: int = 0  # of the round that is under way
    entries: dict[str, StoredValue] = field(default_factory=dict)
    changed: bool = False

    def at(self, ids: tuple[int, ...]) -> "ClientStore":
        return self

    def versions(self, name: str) -> dict[int, int]:
        return {self.client: self.entries[name].version} if name in self.entries else {}

    def recall(self, name: str) -> PerClient:
        if name not in self.entries:
            raise KeyError(f"nothing is kept under {name!r}")
        return PerClient("clients", [Block((self.client,), self.entries[name].value, stacked=False)])

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        check_kept(value)
        # Copies, as a folder would give back.
        self.entries[name] = StoredValue(version, self.token, tree.owned(value.at(self.client)))
        self.changed = True
        return self.recall(name)

    def statement(self) -> tuple[KeptVersion, ...]:
        """Return what the client tells a server about its values when it joins."""
        return tuple(KeptVersion(name, e.version, e.token) for name, e in self.entries.items())

    def save(self, round: int) -> None:
        """Write the values if they have changed; if that fails, the client only has to download them again later."""
        if self.folder is None or not self.changed:
            return
        try:
            Store(self.folder).save(round, {name: tuple(entry) for name, entry in self.entries.items()}, {})
            self.changed = False
        except CheckpointError as error:
            log.warning("%s", error)

    def load(self, device: Any = "cpu") -> None:
        """Load the values that the folder holds, if they can be read."""
        if self.folder is None or not Store(self.folder).rounds():
            return
        try:
            content = tree.map(lambda a: a.to(device), Store(self.folder).load()[0])
            self.entries = {name: StoredValue(*entry) for name, entry in content.items()}
        except CheckpointError as error:
            log.warning("%s; the server will send what is missing", error)
