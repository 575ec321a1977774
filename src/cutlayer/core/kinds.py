"""Kinds: the names under which values cross between places, and the home server of each."""

from typing import TYPE_CHECKING, Generic, Literal, NamedTuple

from cutlayer.core.tree import T
from cutlayer.errors import LawError

if TYPE_CHECKING:
    from cutlayer.core.values import PerClient

Place = Literal["clients", "server", "fed", "anywhere"]  # anywhere: derived from the seed and never sent


class Parcel(NamedTuple, Generic[T]):
    """A value with the kind under which it crosses."""

    kind: "Kind"
    value: "PerClient[T]"


class Kind(NamedTuple):
    """The kind of a crossing, and its home: the server that may see a single client's values."""

    name: str
    home: Place | None

    def __call__(self, value: "PerClient[T]") -> Parcel[T]:
        return Parcel(self, value)


# The training server computes on what crosses the cut ...
ACTIVATIONS = Kind("activations", "server")
LABELS = Kind("labels", "server")
GRADIENTS = Kind("gradients", "server")
AUXILIARY = Kind("auxiliary", "server")
SCALARS = Kind("scalars", "server")
# ... and the fed server keeps and averages client-side models: no server holds both.
MODEL = Kind("model", "fed")
SLOPES = Kind("slopes", "fed")
STATISTICS = Kind("statistics", "fed")
# These tell nothing about a single client's data.
SETTINGS = Kind("settings", None)
SETUP = Kind("setup", None)
SYNC = Kind("sync", None)

KINDS = (ACTIVATIONS, LABELS, GRADIENTS, AUXILIARY, SCALARS, MODEL, SLOPES, STATISTICS, SETTINGS, SETUP, SYNC)


def check_kind(kind: Kind) -> None:
    """Refuse a kind that is not one of these: with a new kind, a method could choose any home."""
    if kind not in KINDS:
        raise LawError(f"{kind!r} is not a kind of cutlayer.core.kinds; what crosses goes under one of those")
