"""The codecs of a run, for its model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from cutlayer import codecs
from cutlayer.core.codec import OF_SAMPLES, Coder
from cutlayer.core.coders import coder
from cutlayer.core.kinds import Kind
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.planning.problem import Bits, uncoded
from cutlayer.planning.profile import Shapes
from cutlayer.split import Split

Codecs = Mapping[str, Any]  # by the name of a kind: a codec, or its name, table or list as in a run file


def built(given: Codecs) -> dict[str, Coder]:
    """Return the coder of each kind, by its name, whose codec does anything."""
    found = {name: _coder(name, own) for name, own in given.items()}
    return {name: own for name, own in found.items() if own is not None}


def _coder(name: str, given: Any) -> Coder | None:
    try:
        return coder(name, codecs.build(given))
    except (ConfigError, UnknownNameError) as error:
        error.args = (f"codecs.{name}: {error}",)
        raise


def bits(given: Codecs, name: str) -> Bits:
    """Return the bits that the tensors of a sample take as they cross as this kind."""
    own = built(given).get(name)
    if own is None:
        return uncoded

    def coded(shapes: Shapes) -> float:
        return 8.0 * sum(own.size((1, *shape), torch.float32) for shape in shapes)

    return coded


def idle(coders: Mapping[Kind, Coder], totals: Mapping[str, int]) -> Iterator[str]:
    """Say which codecs have had nothing to encode, from the bytes by direction and kind."""
    for kind, own in coders.items():
        if totals.keys().isdisjoint((f"up_{kind.name}", f"down_{kind.name}")):
            yield f"codecs.{kind.name}: nothing crossed as {kind.name} in the first round, so {own} encoded nothing"


def coders(given: Codecs, split: Split, x: Any) -> dict[Kind, Coder]:
    """Return the coder of each kind that has a codec; masks among the inputs' activations cross as they are."""
    found = {own.kind: own for own in built(given).values()}
    if not found.keys().isdisjoint(OF_SAMPLES) and (masks := split.masks(x)):
        found |= {kind: replace(own, skipped=masks) for kind, own in found.items() if kind in OF_SAMPLES}
    return found
