"""What servers know of the values that clients keep: each client's own statement, believed only if it can be true.

Every round has a token, drawn anew when it is tried again. A client remembers in which round it was told to keep a
value, and states version and token when it joins; a server believes it if it told that client so in a round that was
committed. A value of a round that failed, or that a restored server has forgotten, is as good as gone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cutlayer.core.tree import Tree
from cutlayer.remote.protocol.messages import KeptVersion
from cutlayer.remote.server.shape_runner import ShapeRunner, Spec

LATEST = 4  # versions of a value that a client may come back with: it may have been lost before it kept the last one

Told = tuple[int, int]  # version, token


class KnownVersions:
    """By name and client: what it holds as far as is known, and what it may hold if it comes back."""

    def __init__(self) -> None:
        self._held: dict[str, dict[int, Told]] = {}
        self._told: dict[str, dict[int, tuple[Told, ...]]] = {}
        self._shapes: dict[str, Tree] = {}  # of the values, which have no content here

    @property
    def is_empty(self) -> bool:
        """Whether no client was ever told to keep anything."""
        return not self._told

    def joined(self, client: int, kept: Iterable[KeptVersion]) -> None:
        """A client states what it holds; everything else is forgotten."""
        for held in self._held.values():
            held.pop(client, None)
        for k in kept:
            if (k.version, k.token) in self._told.get(k.name, {}).get(client, ()):
                self._held.setdefault(k.name, {})[client] = (k.version, k.token)

    def versions(self, name: str, ids: Iterable[int]) -> dict[int, int]:
        held = self._held.get(name, {})
        return {j: held[j][0] for j in ids if j in held}

    def held(self, client: int) -> dict[str, Told]:
        """What a client holds as far as is known."""
        return {name: held[client] for name, held in self._held.items() if client in held}

    def held_by(self, ids: Iterable[int]) -> dict[str, dict[int, Told]]:
        """What these clients hold, by name."""
        return {name: {j: held[j] for j in ids if j in held} for name, held in self._held.items()}

    def hold(self, held: Mapping[str, Mapping[int, Told]]) -> None:
        """What clients hold, as the server knows that they have told it."""
        self._held = {name: dict(by_client) for name, by_client in held.items()}

    def told(self, name: str, client: int, version: int, token: int, spec: Spec) -> None:
        """A client was told to keep such a value."""
        self._held.setdefault(name, {})[client] = (version, token)
        before = self._told.setdefault(name, {}).get(client, ())
        # Of one round only the last version counts: a client states what it has once a request is done.
        self._told[name][client] = (*(t for t in before if t[1] != token), (version, token))[-LATEST:]
        self._shapes.setdefault(name, spec.bare)

    def spec(self, name: str, shapes: ShapeRunner) -> Spec:
        """The form of what is kept under a name."""
        return shapes.put(self._shapes[name])

    def fork(self) -> "KnownVersions":
        """A copy for a round that may fail."""
        other = KnownVersions()
        other._held = {name: dict(held) for name, held in self._held.items()}
        other._told = {name: dict(told) for name, told in self._told.items()}
        other._shapes = dict(self._shapes)
        return other

    def content(self) -> dict[str, Any]:
        """For a checkpoint: who holds what is stated anew by those who come back."""
        return {"told": {name: dict(told) for name, told in self._told.items()}, "shapes": dict(self._shapes)}

    def restore(self, content: dict[str, Any]) -> None:
        self._held = {}
        self._told = {name: dict(told) for name, told in content.get("told", {}).items()}
        self._shapes = dict(content.get("shapes", {}))
