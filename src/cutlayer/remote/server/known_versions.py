"""What the servers know about the values that clients keep between rounds.

Each attempt at a round has a random token. A client remembers the token of the round in which it was told to keep a
value, and states version and token when it joins. A server believes the statement if it told this client so in a
committed round. A client whose value belongs to a failed round, or to a round that a restored server does not know,
downloads the value again.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from cutlayer.core import tree
from cutlayer.core.crossing import mark_of
from cutlayer.core.tree import Tree
from cutlayer.remote.protocol.messages import KeptVersion
from cutlayer.remote.server.shape_runner import ShapeRunner, Spec

LATEST = 4  # versions remembered for each client and value: a client may disconnect before it keeps the last one

Told = tuple[int, int]  # version, token
ToldForm = tuple[int, int, int]  # version, token, number of the value's form


class KnownVersions:
    """The versions that clients hold as far as is known, and the versions that they were told to keep."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, Told]] = {}
        self._told: dict[str, dict[int, tuple[ToldForm, ...]]] = {}
        self._shapes: dict[str, list[Tree]] = {}  # of the values, whose content is not here

    @property
    def is_empty(self) -> bool:
        """Whether no client was ever told to keep anything."""
        return not self._told

    def believed(self, client: int, kept: Iterable[KeptVersion]) -> dict[str, Told]:
        """Return the part of a client's statement that can be true."""
        stated = {k.name: (k.version, k.token) for k in kept}
        return {name: told for name, told in stated.items() if told in map(_without_form, self._of(name, client))}

    def joined(self, client: int, kept: Iterable[KeptVersion]) -> None:
        """Replace what is known about a client by its own statement."""
        self._held[client] = self.believed(client, kept)

    def versions(self, name: str, ids: Iterable[int]) -> dict[int, int]:
        """Return the version of a value that each of these clients holds, if it holds one."""
        return {j: held[name][0] for j in ids if name in (held := self.held(j))}

    def held(self, client: int) -> dict[str, Told]:
        """Return what a client holds, by name."""
        return dict(self._held.get(client, {}))

    def hold(self, held: Mapping[int, Mapping[str, Told]]) -> None:
        """Set what the clients hold, as the training server knows it."""
        self._held = {client: dict(own) for client, own in held.items()}

    def told(self, name: str, client: int, version: int, token: int, spec: Spec) -> None:
        """Note that a client was told to keep such a value."""
        self._held.setdefault(client, {})[name] = (version, token)
        # Of one round only the last version counts: a client states what it has after a request is done.
        before = (t for t in self._of(name, client) if t[1] != token)
        now = (version, token, self._form(name, spec.bare))
        self._told.setdefault(name, {})[client] = (*before, now)[-LATEST:]

    def spec(self, name: str, client: int, shapes: ShapeRunner) -> Spec:
        """Return the form of the value that a client keeps under a name."""
        held = self._held[client][name]
        form = next(told[2] for told in self._of(name, client) if _without_form(told) == held)
        return shapes.put(self._shapes[name][form], mark_of(name))

    def _of(self, name: str, client: int) -> tuple[ToldForm, ...]:
        return self._told.get(name, {}).get(client, ())

    def _form(self, name: str, bare: Tree) -> int:
        """Return the number of a form: clients may hold other layers than each other, and than in other rounds."""
        known = self._shapes.setdefault(name, [])
        looks = tree.signature(bare)
        if all(tree.signature(own) != looks for own in known):
            known.append(bare)
        return next(k for k, own in enumerate(known) if tree.signature(own) == looks)

    def content(self) -> dict[str, Any]:
        """Return the content of a checkpoint; clients that come back state again what they hold."""
        return {
            "told": {name: dict(told) for name, told in self._told.items()},
            "shapes": {name: list(forms) for name, forms in self._shapes.items()},
        }

    def restore(self, content: dict[str, Any]) -> None:
        self._held = {}
        self._told = {name: dict(told) for name, told in content.get("told", {}).items()}
        self._shapes = {name: list(forms) for name, forms in content.get("shapes", {}).items()}


def _without_form(told: ToldForm) -> Told:
    return told[:2]
