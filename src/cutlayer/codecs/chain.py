"""Several codecs, one after another."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.codec import NOTHING, PROBE, Code, Codec, Traits, check_code, code_of, codec, traits_of
from cutlayer.errors import ConfigError


@codec()
@dataclass(frozen=True)
class Chained:
    """Encodes with one codec, and then its `values` with the next, which may be a chain itself."""

    first: Codec
    then: Codec

    def __post_init__(self) -> None:
        values = _values(code_of(self.first, PROBE, torch.float32))
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise ConfigError(f"{self.then} cannot follow {self.first}, which leaves no tensor of values")
        if traits_of(self.then).matrices and (traits_of(self.first).as_one_row or values.dim() < len(PROBE)):
            raise ConfigError(
                f"{self.then} cannot follow {self.first}, which leaves no matrices but a row of numbers; leave out one "
                "of them"
            )

    def __str__(self) -> str:
        return f"{self.first}, {self.then}"

    @property
    def traits(self) -> Traits:
        """What is true of either."""
        return Traits(*(a or b for a, b in zip(traits_of(self.first), traits_of(self.then), strict=True)))

    def encode(self, a: Tensor, key: Tensor) -> Code:
        hashed = directions.mixed(key)
        code = self.first.encode(a, directions.sibling(hashed, 0))
        values = self.then.encode(_values(code), directions.sibling(hashed, 1))
        return {**code, "values": values} if isinstance(code, dict) else values

    def decode(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.first.decode(self._undone(code, shape, dtype), shape, dtype)

    def check(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        first = code_of(self.first, shape, dtype)
        like = _values(first)
        check_code(self.then, code["values"] if isinstance(first, dict) else code, tuple(like.shape), like.dtype)
        check_code(self.first, self._undone(code, shape, dtype), shape, dtype)

    def _undone(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Code:
        """Return the code of the first codec."""
        first = code_of(self.first, shape, dtype)
        like = _values(first)
        inner = code["values"] if isinstance(first, dict) else code
        values = self.then.decode(inner, tuple(like.shape), like.dtype)
        return {**code, "values": values} if isinstance(first, dict) else values


def chain(*codecs: Codec) -> Codec:
    """Return these codecs, one after another."""
    first, *rest = [own for own in codecs if own != NOTHING] or [NOTHING]
    return Chained(first, chain(*rest)) if rest else first


def _values(code: Code) -> Any:
    """Return what the next codec encodes: the values, or all if it is one tensor."""
    return code.get("values") if isinstance(code, dict) else code
