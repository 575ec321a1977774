"""Layers that change servers when the cut moves: as aggregates, never those of a single client."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from cutlayer.core.kinds import SYNC
from cutlayer.core.servers import Fed, Keeper, Server
from cutlayer.core.state import Model, Part, Tensors
from cutlayer.core.values import Held
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split

V = TypeVar("V", Model, Tensors)
Pick = Callable[..., V]  # (names, *values) -> the values of these names


def recut(
    below: Held[V], above: Held[V], old: Split, new: Split, server: Server, fed: Fed, pick: Pick[V]
) -> tuple[Held[V], Held[V]]:
    """Return both servers' values, moved to the side of the new cut to which they belong."""
    (fed_has, server_has), (fed_needs, server_needs) = old.sides, new.sides
    lower = _moved(below, above, fed, server, fed_has, fed_needs, pick)
    return lower, _moved(above, below, server, fed, server_has, server_needs, pick)


def _moved(
    own: Held[V], other: Held[V], here: Keeper, there: Keeper, has: frozenset[str], needs: frozenset[str], pick: Pick[V]
) -> Held[V]:
    """Return the values that this server needs, from its own and from what the other server sends."""
    if needs <= has:
        return here.do(partial(pick, needs), own)
    sent = there.send(SYNC, there.do(partial(pick, needs - has), other), here)
    return here.do(partial(pick, needs), own, sent)


def regrown(opt: Transform, part: Part, model: Model, round: int) -> Part:
    """Return the part with these values; values that it had keep their moments, new ones get fresh moments."""
    fresh = opt.begin(model, round)
    moments = {
        kind: {name: part.moments[kind].get(name, value) for name, value in values.items()}
        for kind, values in fresh.moments.items()
    }
    return fresh._replace(moments=moments, count=part.count)


def of_model(names: frozenset[str], *models: Model) -> Model:
    """Return the model with the values of these names from all given models."""
    return Model(*(of_tensors(names, *some) for some in zip(*models, strict=True)))


def of_tensors(names: frozenset[str], *some: Tensors) -> Tensors:
    return {k: v for tensors in some for k, v in tensors.items() if k in names}
