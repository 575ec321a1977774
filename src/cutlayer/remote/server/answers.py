"""Nothing that a client sends is trusted: what comes up is checked before it touches a model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cutlayer.core.kinds import LABELS
from cutlayer.core.tree import Tree
from cutlayer.errors import WireError
from cutlayer.remote.server.queue import Request
from cutlayer.remote.tensors.trees import filled
from cutlayer.remote.tensors.wire import ALIGN


def num_bytes(request: Request) -> int:
    """The most that the tensors of the answer may take, aligned."""
    return sum(a.numel() * a.element_size() + ALIGN for _, flat in request.expected for a in flat.tensors)


def checked(
    request: Request, numbers: Sequence[float], tensors: Sequence[Tensor], num_classes: int | None
) -> list[Tree]:
    """The values that were asked for, or what is wrong with those that came."""
    asked = [a for _, flat in request.expected for a in flat.tensors]
    asked_numbers = [n for _, flat in request.expected for n in flat.numbers]
    if len(tensors) != len(asked) or len(numbers) != len(asked_numbers):
        raise WireError(
            f"{len(tensors)} tensors and {len(numbers)} numbers came, but {len(asked)} and {len(asked_numbers)} were "
            "asked for"
        )
    number, tensor = iter(numbers), iter(tensors)
    wanted = iter(asked)
    values = []
    for kind, flat in request.expected:

        def next_tensor(kind: str = kind) -> Tensor:
            return _checked(kind, next(tensor), next(wanted), num_classes)

        def next_number(kind: str = kind) -> float:
            return _finite(kind, next(number))

        values.append(filled(flat.structure, next_number, next_tensor))
    return values


def _finite(kind: str, number: float) -> float:
    if number - number != 0:
        raise WireError(f"a number among the {kind} is not finite")
    return number


def _checked(kind: str, a: Tensor, wanted: Tensor, num_classes: int | None) -> Tensor:
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
    return a


def _name(a: Tensor) -> str:
    return str(a.dtype).removeprefix("torch.")
