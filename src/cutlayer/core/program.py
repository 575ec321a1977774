"""The client's side of the laws: which functions it runs, and which values it sends.

Every client holds its own copy of the method. It runs only functions that this copy marks with `@at_client`, by name.
It sends a value only as the kind that its function `gives`, and labels only if the method says so. A kind that has a
codec leaves only as this codec encodes it. No request of a server can change that.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from cutlayer.core.codec import Coder
from cutlayer.core.engine import Fn
from cutlayer.core.kinds import LABELS, Kind, check_kind
from cutlayer.core.values import Gives, Mark, OfTuple, PerClient, Raw, Seed
from cutlayer.errors import LawError

F = TypeVar("F", bound=Fn)

OWN = {"x": "inputs", "y": "labels"}  # a client's raw data, by the name of the parameter that takes it


def at_client(*, gives: Kind | Mapping[str, Kind] | None = None, passes: Raw | None = None) -> Callable[[F], F]:
    """Mark a pure method that a client may be asked to run, and say what it may send of the result.

    `gives` is the kind of the result, or a dict with the kind of each field that may leave; by default nothing leaves.
    With `vjp` a kind covers the output and never the pullback; with `grad` only named fields leave. A parameter named x
    takes a client's own inputs and one named y its labels. No other parameter takes them, and these take nothing else.
    So a server cannot pass raw data off as something that may leave, nor run a client's layers on inputs of its choice.
    `passes` says that the result is still raw data: a part of x or of y.
    """
    for kind in gives.values() if isinstance(gives, Mapping) else () if gives is None else (gives,):
        check_kind(kind)

    def mark(fn: F) -> F:
        fn.__dict__.update(at_client=True, gives=gives, passes=passes)
        return fn

    return mark


@runtime_checkable
class HasLabels(Protocol):
    """Says whether a client may send its labels: every method (`@method` has the default, no), and some pieces."""

    @property
    def labels_leave(self) -> bool: ...


class Program:
    """The functions that a method marks for its clients, and those of the codecs, by address."""

    def __init__(self, method: object, coders: Mapping[Kind, Coder] = MappingProxyType({})) -> None:
        self.name = type(method).__name__
        self.coders = coders
        self._codings = {fn: coding for coder in coders.values() for fn, coding in _codings(coder).items()}
        self._parameters: dict[str, tuple[str, ...]] = {}  # names of the parameters of functions, by address
        owners = list(_owners(method, ""))
        self.functions = {prefix + name: getattr(o, name) for prefix, o in owners for name in _marked(o)}
        # No function makes labels: each method, and each piece that has to do with them, says whether they may leave.
        self.labels: Gives = LABELS if any(o.labels_leave for _, o in owners if isinstance(o, HasLabels)) else None
        # Bound methods compare by the identity of their object: a function of another copy is not this client's.
        self._addresses = {fn: address for address, fn in self.functions.items()}
        self._addresses |= {fn: coding.address for fn, coding in self._codings.items()}
        self.by_address = {address: fn for fn, address in self._addresses.items()}

    def address(self, fn: Fn) -> str:
        """Return the name under which a client finds fn; raise an error with the reason if there is none."""
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
        gives: Gives = self._codings[fn].gives if fn in self._codings else fn.gives  # type: ignore[attr-defined]
        return gives

    def check_coding(self, fn: Fn, values: Sequence[PerClient], spent: set[tuple[int, int]]) -> None:
        """Check that a codec is given what it is for: a value that may leave, its base, and the rest of the last.

        One that draws takes a seed of the client's own besides, each only once: whoever knows the numbers that it drew,
        or has two codes with the same ones, can take them off again.
        """
        coding = self._codings.get(fn)
        if coding is None:
            return
        seeds = [(j, b.gives) for v in values[len(coding.takes) :] for b in v.blocks for j in b.ids]
        drawn = {(j, seed.number) for j, seed in seeds if isinstance(seed, Seed)}
        if len(values) != coding.num_arguments or len(drawn) < len(seeds):
            raise LawError(f"{coding.address} takes {coding.arguments}")
        for place, wanted in enumerate(coding.takes):
            if wanted is not None and any(block.gives != wanted for block in values[place].blocks):
                kind = wanted.kind if isinstance(wanted, Mark) else wanted
                what = f"the {wanted.part} of {kind.name}" if isinstance(wanted, Mark) else f"made as {kind.name}"
                raise LawError(f"argument {place + 1} of {coding.address} is not {what}, so it is not encoded")
        for client, _ in sorted(drawn & spent):
            raise LawError(f"client {client} has drawn with this seed before; each code needs a seed of its own")
        spent |= drawn

    def passes(self, fn: Fn) -> Raw | None:
        """Return which raw data the result of fn is a part of, if any."""
        passes: Raw | None = getattr(fn, "passes", None)
        return passes

    def check_differentiable(self, fn: Fn) -> None:
        """Check that the result of fn is no raw data, whose mark a derivative would lose."""
        raw = self.passes(fn)
        if raw is not None:
            raise LawError(
                f"{self.address(fn)} passes a client's own {OWN[raw]} on, so it is not differentiated; run it with `do`"
            )

    def check_raw(self, fn: Fn, place: int, raw: Raw | None) -> None:
        """Check that raw data goes to the parameter of its name, and that nothing else goes there."""
        address = self.address(fn)
        if address not in self._parameters:
            self._parameters[address] = tuple(inspect.signature(fn).parameters)
        names = self._parameters[address]
        name = names[place] if place < len(names) else ""
        if raw != (name if name in OWN else None):
            takes = f"takes a client's own {OWN[name]}" if name in OWN else "takes none of a client's own data"
            given = OWN[raw] if raw is not None else "something else"
            raise LawError(f"argument {place + 1} of {self.address(fn)} {takes}, but it was given {given}")

    def release(self, kind: Kind, gives: Gives | OfTuple, client: int) -> None:
        """Check, on the client's side, that a value may leave as this kind."""
        if isinstance(gives, OfTuple):
            raise LawError(
                f"client {client} refuses to send {kind.name}: the function gives {gives.kind.name}, but it returns a "
                "plain tuple, and a kind covers one value. Return one value; or a NamedTuple, with gives={field: kind}"
                ", and send its fields; or, if the tuple is (output, buffers), run the function with `vjp`"
            )
        coder = self.coders.get(kind)
        if coder is not None and gives == kind:
            raise LawError(f"client {client} sends {kind.name} only as {coder} encodes them")
        if gives != (kind if coder is None else Mark(kind, "code")):
            made = gives.name if isinstance(gives, Kind) else "nothing that may leave whole"
            raise LawError(
                f"client {client} refuses to send {kind.name}: the value was not made by a function of {self.name} "
                f"that gives {kind.name} (it gives {made})"
            )


class _Coding(NamedTuple):
    """A function of a codec: its address, what its result is, and what its arguments must be."""

    address: str
    gives: Gives
    takes: tuple[Kind | Mark | None, ...]  # None for any value
    draws: bool  # it takes a seed of the client's own, too

    @property
    def num_arguments(self) -> int:
        return len(self.takes) + self.draws

    @property
    def arguments(self) -> str:
        number = f"{self.num_arguments} argument{'' if self.num_arguments == 1 else 's'}"
        return number + (", the last of them a seed of the client's own, which it draws with" if self.draws else "")


def _codings(coder: Coder) -> dict[Fn, _Coding]:
    """Return the functions that clients run for a coder, and none that it does not use."""
    kind, (code, rest, base) = coder.kind, (Mark(coder.kind, part) for part in ("code", "rest", "base"))
    found: dict[Fn, tuple[Gives, tuple[Kind | Mark | None, ...]]] = {coder.decode: (base, (None,))}
    if coder.error_feedback:
        found[coder.no_rest] = (rest, (kind,))
        found[coder.encode_with_rest] = ({"coded": code, "rest": rest}, (kind, base, rest))
    elif not coder.by_sample:
        found[coder.encode_change] = (code, (kind, base))
    if not coder.only_changes:
        found[coder.encode] = (code, (kind,))
    draw = {coder.encode, coder.encode_change, coder.encode_with_rest} if coder.traits.draws else set()
    return {fn: _Coding(f"codecs.{kind.name}.{fn.__name__}", *both, fn in draw) for fn, both in found.items()}


def _owners(owner: object, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield a method and, with a prefix of field names, its pieces; pieces in a tuple by number."""
    yield prefix, owner
    for field in fields(owner) if is_dataclass(owner) else ():
        value = getattr(owner, field.name)
        several = {f"{field.name}.{i}": v for i, v in enumerate(value)} if type(value) is tuple else {field.name: value}
        for name, piece in several.items():
            if is_dataclass(piece):
                yield from _owners(piece, f"{prefix}{name}.")


def _marked(owner: object) -> list[str]:
    return [name for name, fn in vars(type(owner)).items() if getattr(fn, "at_client", False)]
