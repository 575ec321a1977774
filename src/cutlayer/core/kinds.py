"""Kinds: the name of everything that may cross between places, and the one server each belongs to."""

from typing import TYPE_CHECKING, Generic, Literal, NamedTuple

from cutlayer.core.tree import T
from cutlayer.errors import LawError

if TYPE_CHECKING:
    from cutlayer.core.values import PerClient

Place = Literal["clients", "server", "fed", "anywhere"]  # anywhere: derived from the seed, never sent


class Parcel(NamedTuple, Generic[T]):
    """A value under the kind it travels as."""

    kind: "Kind"
    value: "PerClient[T]"


class Kind(NamedTuple):
    """What a crossing is, and its home: the server that may see a single client's values of it."""

    name: str
    home: Place | None

    def __call__(self, value: "PerClient[T]") -> Parcel[T]:
        return Parcel(self, value)


# The training server computes on what the cut lets through ...
ACTIVATIONS = Kind("activations", "server")
LABELS = Kind("labels", "server")
GRADIENTS = Kind("gradients", "server")
AUXILIARY = Kind("auxiliary", "server")
SCALARS = Kind("scalars", "server")
# ... the fed server keeps and averages client-side models: nobody holds both.
MODEL = Kind("model", "fed")
SLOPES = Kind("slopes", "fed")
STATISTICS = Kind("statistics", "fed")
# Not about any one client's data.
SETTINGS = Kind("settings", None)
SETUP = Kind("setup", None)
SYNC = Kind("sync", None)

KINDS = (ACTIVATIONS, LABELS, GRADIENTS, AUXILIARY, SCALARS, MODEL, SLOPES, STATISTICS, SETTINGS, SETUP, SYNC)


def check_kind(kind: Kind) -> None:
    """Refuse a kind that is not one of these: a home of one's own choosing would be no law."""
    if kind not in KINDS:
        raise LawError(f"{kind!r} is not a kind of cutlayer.core.kinds; what crosses goes under one of those")
