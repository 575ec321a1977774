"""Checks of clients' answers: a server trusts nothing that a client sends before it has passed them."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cutlayer.core.codec import Coder
from cutlayer.core.kinds import LABELS, Kind
from cutlayer.core.tree import Tree
from cutlayer.errors import WireError
from cutlayer.remote.server.queue import Request


def checked(
    request: Request,
    numbers: Sequence[float],
    tensors: Sequence[Tensor],
    num_classes: int | None,
    coders: Mapping[Kind, Coder],
) -> list[Tree]:
    """Return the values of an answer; raise WireError if they are not what the request asked for."""
    asked = [(kind, a) for kind, flat in request.expected for a in flat.tensors]
    number_kinds = [kind for kind, flat in request.expected for _ in flat.numbers]
    if len(tensors) != len(asked) or len(numbers) != len(number_kinds):
        raise WireError(
            f"{len(tensors)} tensors and {len(numbers)} numbers came, but {len(asked)} and {len(number_kinds)} were "
            "asked for"
        )
    for (kind, wanted), a in zip(asked, tensors, strict=True):
        _check(kind, a, wanted, num_classes)
    for kind, number in zip(number_kinds, numbers, strict=True):
        if not math.isfinite(number):
            raise WireError(f"a number among the {kind} is not finite")
    values = request.values(numbers, tensors)
    by_name = {kind.name: coder for kind, coder in coders.items()}
    for (kind, _), value in zip(request.expected, values, strict=True):
        if kind in by_name:
            by_name[kind].check(value)
    return values


def _check(kind: str, a: Tensor, wanted: Tensor, num_classes: int | None) -> None:
    if a.dtype != wanted.dtype or a.shape != wanted.shape:
        raise WireError(
            f"the {kind} have the type {_name(a)} and the shape {tuple(a.shape)}, but {_name(wanted)} and "
            f"{tuple(wanted.shape)} were asked for"
        )
    if a.is_floating_point() and not bool(torch.isfinite(a.sum()).item() or torch.isfinite(a).all().item()):
        raise WireError(f"what came as {kind} is not finite")
    if kind == LABELS.name and num_classes is not None and a.numel():
        low, high = int(a.min()), int(a.max())
        if low < 0 or high >= num_classes:
            raise WireError(f"a label is {low if low < 0 else high}, but there are the classes 0 to {num_classes - 1}")


def _name(a: Tensor) -> str:
    return str(a.dtype).removeprefix("torch.")
