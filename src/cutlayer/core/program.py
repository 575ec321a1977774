"""The client's side of the laws: which functions it runs, and what it lets out.

Every client holds its own copy of the method. It runs only functions that this copy declares with `@at_client`, by
name, and sends up only what such a function made as that kind, and labels only if the method says that they leave.
Nothing a server asks for can change either.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

from cutlayer.core.engine import Fn
from cutlayer.core.kinds import LABELS, Kind, check_kind
from cutlayer.core.values import Gives, Raw
from cutlayer.errors import LawError

F = TypeVar("F", bound=Fn)

OWN = {"x": "inputs", "y": "labels"}  # a client's own data, by the names of the parameters that take them


def at_client(*, gives: Gives = None, passes: Raw | None = None) -> Callable[[F], F]:
    """Mark a pure method that a client may be asked to run, with what it may send of the result.

    `gives` is the kind of a result that is one value, or the kinds of those fields of it that may leave; nothing by
    default. With `vjp` a kind covers the output and never the pullback; of gradients (`grad`) only named fields leave.
    A parameter that is named x takes a client's own inputs and one that is named y its labels; no other parameter does,
    and these take nothing else. So a server can neither have them taken for something that may leave, nor have a
    client's layers answer to inputs of its choice. `passes` tells that the result is a part of them, as they are.
    """
    for kind in gives.values() if isinstance(gives, Mapping) else () if gives is None else (gives,):
        check_kind(kind)

    def mark(fn: F) -> F:
        fn.__dict__.update(at_client=True, gives=gives, passes=passes)
        return fn

    return mark


class Program:
    """The functions that a method declares for its clients, by address."""

    def __init__(self, method: object) -> None:
        self.name = type(method).__name__
        self._parameters: dict[str, tuple[str, ...]] = {}  # of functions, by address
        owners = list(_owners(method, ""))
        self.functions = {prefix + name: getattr(o, name) for prefix, o in owners for name in _marked(o)}
        # Labels are not made by a function: a method or piece says whether they may leave.
        self.labels: Gives = LABELS if any(getattr(o, "labels_leave", False) for _, o in owners) else None
        # A bound method compares by the identity of its object: another copy's function is not this client's.
        self._addresses = {fn: address for address, fn in self.functions.items()}

    def address(self, fn: Fn) -> str:
        """The name under which a client finds fn, or a refusal with the reason."""
        address = self._addresses.get(fn)
        if address is not None:
            return address
        name = getattr(fn, "__qualname__", repr(fn))
        if "<lambda>" in name or "<locals>" in name:
            raise LawError(
                f"{name} has no name that a client could find: write it as a method marked @at_client "
                f"on {self.name} or on one of its pieces"
            )
        if not getattr(fn, "at_client", False):
            raise LawError(f"{name} is not marked @at_client, so no client runs it; mark it and say what it gives")
        raise LawError(f"{name} is not declared by {self.name}, so its clients refuse to run it")

    def gives(self, fn: Fn) -> Gives:
        self.address(fn)
        gives: Gives = fn.gives  # type: ignore[attr-defined]
        return gives

    def passes(self, fn: Fn) -> Raw | None:
        """What the result of fn still is of a client's own data."""
        passes: Raw | None = getattr(fn, "passes", None)
        return passes

    def check_raw(self, fn: Fn, place: int, raw: Raw | None) -> None:
        """A client's own data go to a parameter of their name, and nothing else goes there."""
        address = self.address(fn)
        if address not in self._parameters:
            self._parameters[address] = tuple(inspect.signature(fn).parameters)
        names = self._parameters[address]
        name = names[place] if place < len(names) else ""
        if raw != (name if name in OWN else None):
            takes = f"takes a client's own {OWN[name]}" if name in OWN else "takes none of a client's own data"
            given = OWN[raw] if raw is not None else "something else"
            raise LawError(f"argument {place + 1} of {self.address(fn)} {takes}, but it was given {given}")

    def release(self, kind: Kind, gives: Gives, client: int) -> None:
        """The client's own check of what leaves it."""
        if gives != kind:
            made = gives.name if isinstance(gives, Kind) else "nothing that may leave whole"
            raise LawError(
                f"client {client} refuses to send {kind.name}: the value was not made by a function of {self.name} "
                f"that gives {kind.name} (it gives {made})"
            )


def _owners(owner: object, prefix: str) -> Iterator[tuple[str, object]]:
    """A method and, by field name, its pieces; a tuple of them by number."""
    yield prefix, owner
    for field in fields(owner) if is_dataclass(owner) else ():
        value = getattr(owner, field.name)
        several = {f"{field.name}.{i}": v for i, v in enumerate(value)} if type(value) is tuple else {field.name: value}
        for name, piece in several.items():
            if is_dataclass(piece):
                yield from _owners(piece, f"{prefix}{name}.")


def _marked(owner: object) -> list[str]:
    return [name for name, fn in vars(type(owner)).items() if getattr(fn, "at_client", False)]
