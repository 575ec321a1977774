"""Codecs: what is done to the values of a kind before they cross, and undone after it.

A codec is two pure functions of one tensor, `encode` and `decode`. Its size is that of what `encode` returns on a
tensor without content. A `Coder` applies a codec to the values of one kind, at both places.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import torch
from torch import Tensor

from cutlayer.core import directions, tree
from cutlayer.core.kinds import ACTIVATIONS, AUXILIARY, GRADIENTS, MODEL, Kind
from cutlayer.core.state import Model
from cutlayer.core.tree import Tree, storable
from cutlayer.errors import WireError

C = TypeVar("C", bound=type[Any])
Code = Any  # a tensor, or a dict of tensors; a codec that follows in a chain encodes the one named "values"

OF_SAMPLES = (ACTIVATIONS, GRADIENTS)  # a row for each sample; the other kinds persist from round to round
CODED = (*OF_SAMPLES, MODEL, AUXILIARY)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the types of tensors that are encoded
MOST_AXES = 64  # of tensors that torch computes with
PROBE = (2, 3, 5)  # samples, channels and features of a tensor that codecs are tried on


class Traits(NamedTuple):
    """What is true of a codec."""

    draws: bool = False  # it draws random numbers
    drops: bool = False  # it leaves out so much that a model can only go as the change since it came down
    as_one_row: bool = False  # it encodes all tensors of a model together, not each by itself; so only a change
    matrices: bool = False  # it encodes the matrices of models, which neither samples are nor a model as one row
    noisy: bool = False  # it adds noise, which error feedback would take back


@runtime_checkable
class Codec(Protocol):
    """Two pure functions of a tensor: a frozen dataclass of options, decorated with `@codec`.

    The tensor has at least two axes and a row for each sample; a tensor of a model, which has no samples, is one row.
    """

    def encode(self, a: Tensor, key: Tensor) -> Code:
        """Return what crosses. The key, an int64 tensor without axes, is random if the codec `draws`, and else 0."""

    def decode(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of this shape and type from what crossed."""

    def __hash__(self) -> int: ...


@overload
def codec(cls: C, /) -> C: ...
@overload
def codec(
    *, draws: bool = False, drops: bool = False, as_one_row: bool = False, matrices: bool = False, noisy: bool = False
) -> Callable[[C], C]: ...
def codec(cls: Any = None, /, *, drops: bool = False, as_one_row: bool = False, **more: bool) -> Any:
    """Make a class a codec, and say what is true of it; see `Traits`.

    It may declare `check(code, shape, dtype)`, which raises a WireError if no tensor is encoded so. Structure, types
    and shapes of the code are right then; its numbers are anything. What passes must decode without an error, and to
    finite numbers if those of the code are finite.
    """
    traits = Traits(drops=drops or as_one_row, as_one_row=as_one_row, **more)

    def mark(cls: Any) -> Any:
        if "traits" not in vars(cls):  # those of a class that it derives from are not its own
            cls.traits = traits
        if not hasattr(cls, "check"):
            cls.check = _accept
        return cls

    return mark if cls is None else mark(cls)


def _accept(self: Codec, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Accept all values."""


def traits_of(codec: Codec) -> Traits:
    traits: Traits = codec.traits  # type: ignore[attr-defined]  # the decorator supplies it
    return traits


@lru_cache(4096)
def code_of(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype) -> Code:
    """Return the code of a tensor of this shape and type, without content."""
    return codec.encode(torch.empty(shape, dtype=dtype, device="meta"), _no_key("meta"))


def check_code(codec: Codec, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise a WireError if no tensor of this shape and type is encoded so."""
    codec.check(code, shape, dtype)  # type: ignore[attr-defined]  # the decorator supplies it


def as_it_is(self: object, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Decode a code that is the tensor itself: the `decode` of codecs without another."""
    tensor: Tensor = code
    return tensor


@codec()
@dataclass(frozen=True)
class Nothing:
    """Leaves tensors as they are. A kind with this codec is one without a codec."""

    def encode(self, a: Tensor, key: Tensor) -> Code:
        return a

    decode = as_it_is


NOTHING: Codec = Nothing()


@storable
class Coded(NamedTuple):
    """One tensor as it crosses."""

    code: Code
    like: Tensor  # the type and shape of the tensor behind an axis of length 0, so it takes no bytes


@storable
class WithRest(NamedTuple):
    """What a client sends, and what it adds to the next value that it sends: the part that the codec lost."""

    coded: Tree
    rest: Tree


@dataclass(frozen=True)
class Coder:
    """Applies a codec to the values of a kind.

    Values of samples cross as they are encoded. A model goes up as the change since it came down, and comes down
    whole: encoded, unless the codec drops most of a tensor, or error feedback shall make up for what is lost, which it
    cannot on the way down. Of a model only the parameters are encoded, and of any value only the floating-point
    tensors. All functions are pure.
    """

    kind: Kind
    codec: Codec
    error_feedback: bool = False  # add what was lost to what is sent next
    skipped: frozenset[str] = frozenset()  # names of tensors that cross a cut as they are: masks

    def __str__(self) -> str:
        return f"{self.codec} with error feedback" if self.error_feedback else str(self.codec)

    @property
    def traits(self) -> Traits:
        return traits_of(self.codec)

    @property
    def by_sample(self) -> bool:
        return self.kind in OF_SAMPLES

    @property
    def only_changes(self) -> bool:
        """Whether what goes up is encoded only as the change since it came down."""
        return not self.by_sample and (self.traits.drops or self.error_feedback)

    def encodes_down(self) -> bool:
        """Whether what goes down is encoded."""
        return not self.only_changes

    def encode(self, value: Tree, *key: Tensor) -> Tree:
        """Encode a value as a whole."""
        return self._encoded(value, _trained(value), key)

    def encode_change(self, value: Tree, base: Tree, *key: Tensor) -> Tree:
        """Encode the change of a value since the base came down."""
        return self._encoded(value, _changed(value, base), key)

    def encode_with_rest(self, value: Tree, base: Tree, rest: Tree, *key: Tensor) -> WithRest:
        """Encode the change and the rest of the last time; return what is lost as the new rest.

        The rest of a layer that the client does not hold now stays as it is.
        """
        wanted = _added(_changed(value, base), rest)
        coded = self._encoded(value, wanted, key)
        lost = tree.map(torch.sub, wanted, self._decoded(_trained(coded), wanted))
        return WithRest(coded, {**rest, **lost} if isinstance(rest, dict) else lost)

    def no_rest(self, value: Tree) -> Tree:
        """Return the rest before the first time."""
        return tree.map(torch.zeros_like, _trained(value))

    def decode(self, value: Tree) -> Tree:
        """Decode what `encode` made; a value that was not encoded comes back as it is."""
        return _with(value, self._decoded(_trained(value), None))

    def decode_change(self, value: Tree, base: Tree) -> Tree:
        """Decode what `encode_change` made, and add it to the base."""
        base = _trained(base)
        change = self._decoded(_trained(value), base)
        return _with(value, tree.map(_moved, change, base))

    def check(self, value: Tree) -> None:
        """Raise a WireError if this coder encodes no value so; a model whose changes alone are encoded may be whole."""
        found = _all_coded(value)
        if (found or not self.only_changes) and self._leaves_out(value):
            raise WireError(f"what came as {self.kind.name} is not all encoded by {self.codec}")
        for code, like in found:
            known = isinstance(like, Tensor) and like.dtype in FLOATS and like.dim() < MOST_AXES
            if not known or like.shape[:1] != (0,) or 0 in like.shape[1:]:
                raise WireError(f"what came as {self.kind.name} says of no tensor what type and shape it has")
            rows = self._rows(tuple(like.shape[1:]))
            try:
                expected = tree.signature(code_of(self.codec, rows, like.dtype))
            except RuntimeError as error:  # there are no such tensors
                raise WireError(f"what came as {self.kind.name} is said to be of shape {rows}: {error}") from error
            if tree.signature(code) != expected:
                raise WireError(f"what came as {self.kind.name} is not encoded by {self.codec}")
            check_code(self.codec, code, rows, like.dtype)

    def _leaves_out(self, value: Tree) -> bool:
        """Return whether a tensor is as it was that should be encoded."""
        trained = _trained(value)
        if self.skipped and isinstance(trained, dict):
            trained = {name: a for name, a in trained.items() if name not in self.skipped}
        return any(map(_is_encoded, tree.tensors(tree.replace(Coded, lambda _: None, trained))))

    def size(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Return the bytes that a tensor of this shape and type takes as it crosses."""
        return tree.num_bytes(code_of(self.codec, self._rows(shape), dtype)) if prod(shape) else 0

    def _rows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape with a row for each sample, and two or more axes."""
        shape = shape if self.by_sample and shape else (1, *shape)
        return shape if len(shape) > 1 else (*shape, 1)

    def _encoded(self, value: Tree, trained: Tree, key: tuple[Tensor, ...]) -> Tree:
        numbered = itertools.count()
        hashed = directions.mixed(key[0]) if key else None

        def one(a: Tensor) -> Any:
            if not _is_encoded(a):
                return a
            own = _no_key(a.device) if hashed is None else directions.sibling(hashed.to(a.device), next(numbered))
            return Coded(self.codec.encode(a.reshape(self._rows(a.shape)), own), a.new_empty((0, *a.shape)))

        if self._is_vector(trained):
            pieces = tree.tensors(trained)
            flat = torch.cat([a.reshape(-1) for a in pieces if _is_encoded(a)])
            return _with(value, [one(flat), *(a for a in pieces if not _is_encoded(a))])
        if self.skipped and isinstance(trained, dict):
            return {name: a if name in self.skipped else one(a) for name, a in trained.items()}
        return _with(value, tree.map(one, trained))

    def _decoded(self, trained: Tree, like: Tree) -> Tree:
        def one(coded: Coded) -> Tensor:
            shape, dtype = tuple(coded.like.shape[1:]), coded.like.dtype
            return self.codec.decode(coded.code, self._rows(shape), dtype).reshape(shape)

        if like is not None and self._is_vector(like):
            flat, *others = trained
            return _apart(one(flat), others, like)
        return tree.replace(Coded, one, trained)

    def _is_vector(self, trained: Tree) -> bool:
        """Whether these tensors are encoded as one."""
        one_row = self.traits.as_one_row and not self.by_sample and not isinstance(trained, Tensor)
        return one_row and any(map(_is_encoded, tree.tensors(trained)))


def _trained(value: Tree) -> Tree:
    """Return what is encoded of a value."""
    return value.params if isinstance(value, Model) else value


def _with(value: Tree, trained: Tree) -> Tree:
    """Return the value with this in place of what is encoded of it."""
    return value._replace(params=trained) if isinstance(value, Model) else trained


def _changed(value: Tree, base: Tree) -> Tree:
    return tree.map(lambda a, b: a - b if a.is_floating_point() else a, _trained(value), _trained(base))


def _added(change: Tree, rest: Tree) -> Tree:
    """Add the rest to the change, of a dict by name: a cut that moves changes which layers are there."""
    if not isinstance(change, dict):
        return tree.map(torch.add, change, rest)
    return {name: tree.map(torch.add, a, rest[name]) if name in rest else a for name, a in change.items()}


def _moved(change: Tensor, base: Tensor) -> Tensor:
    return base + change if base.is_floating_point() else change


def _is_encoded(a: Tensor) -> bool:
    return a.dtype in FLOATS and a.numel() > 0


def _apart(flat: Tensor, others: list[Tensor], like: Tree) -> Tree:
    """Return the pieces of a vector, and the tensors that are no part of it, in the shapes of these tensors."""
    pieces = iter(torch.split(flat, [a.numel() for a in tree.tensors(like) if _is_encoded(a)]))
    rest = iter(others)
    return tree.map(lambda a: next(pieces).reshape(a.shape).to(a.dtype) if _is_encoded(a) else next(rest), like)


def _no_key(device: torch.device | str) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _all_coded(value: Tree) -> list[Coded]:
    found: list[Coded] = []
    tree.replace(Coded, found.append, tree.bare(value))
    return found


def holds_codes(value: Tree) -> bool:
    """Return whether any tensor of a value is encoded."""
    return bool(_all_coded(value))


def before_encoding(value: Tree, *, stacked: bool = False) -> Tree:
    """Return the value with tensors without content in place of those that are encoded."""

    def one(coded: Coded) -> Tensor:
        rows, shape = coded.like.shape[: int(stacked)], coded.like.shape[1 + int(stacked) :]
        return torch.empty((*rows, *shape), dtype=coded.like.dtype, device="meta")

    return tree.replace(Coded, one, tree.bare(value))
