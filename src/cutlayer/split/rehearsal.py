"""Checks of a model on a few samples, and error messages for a model that does not fit the data."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.core.state import Model
from cutlayer.errors import ConfigError
from cutlayer.split.losses import by_class, cross_entropy, next_token

CROSS_ENTROPIES = (F.cross_entropy, cross_entropy, next_token)


def first_loss(loss: Callable[..., Tensor], out: Any, y: Tensor, num_classes: int | None) -> Any:
    """Return the loss of the outputs; refuse what would fail later, or train something else."""
    if is_cross_entropy(loss) and isinstance(out, Tensor):
        _check_classes(by_class(out, y), y, num_classes)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # torch's word for broadcasting (n, 1) and (n,)
        try:
            found = loss(out, y)
        except UserWarning as warning:
            raise broadcasting("the loss", out, y) from warning
    if broadcasts(loss, out, y):
        raise broadcasting("the loss", out, y)
    return found


def broadcasts(fn: Callable[[Tensor, Tensor], Any], out: Any, y: Tensor) -> bool:
    """Return whether a function that gives one number broadcasts (n, 1) and (n,) to (n, n).

    Then the order of the targets does not matter, but equal shapes, whichever, give another number. This is tried with
    numbers that differ from each other; a function that fails for one of the shapes reshapes what it gets.
    """
    if not isinstance(out, Tensor) or {out.shape, y.shape} != {(len(y),), (len(y), 1)}:
        return False
    scores, targets = torch.tensor([0.2, 0.9, 0.4]).to(out), torch.tensor([0.0, 1.0, 0.0]).to(y)
    given = [(scores.view(-1, *out.shape[1:]), order.view(-1, *y.shape[1:])) for order in (targets, targets.roll(1))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mixed, rolled, rows, columns = (
                float(fn(*pair)) for pair in (*given, (scores, targets), (scores[:, None], targets[:, None]))
            )
        except Exception:  # a user's function may do anything
            return False
    alike = partial(math.isclose, rel_tol=1e-4)
    return alike(mixed, rolled) and alike(rows, columns) and not alike(mixed, rows)


def broadcasting(what: str, out: Tensor, y: Tensor) -> ConfigError:
    equal = "out, y.squeeze(1)" if y.dim() > out.dim() else "out.squeeze(1), y"
    return ConfigError(
        f"{what} would broadcast outputs of the shape {tuple(out.shape)} and targets of the shape {tuple(y.shape)}; "
        f"make them equal, such as lambda out, y: F.mse_loss({equal})"
    )


def is_cross_entropy(loss: Callable[..., Tensor]) -> bool:
    """Return whether a loss is a cross entropy of classes, also with options."""
    while isinstance(loss, partial):
        loss = loss.func
    return loss in CROSS_ENTROPIES or isinstance(loss, nn.CrossEntropyLoss)


def _check_classes(out: Tensor, y: Tensor, num_classes: int | None) -> None:
    """Refuse numbers as classes, and too few outputs: that fails only at the first sample of a class without one."""
    if y.is_floating_point() and y.shape != out.shape:
        raise ConfigError(
            "the loss is cross entropy, which is for classes, but the targets are real numbers; choose another, such "
            "as loss = 'mse' in a run file, or loss=lambda out, y: F.mse_loss(out.squeeze(1), y) of a Split"
        )
    if num_classes is None or not out.dim():
        return
    outputs = out.shape[1] if out.dim() > 1 else out.shape[0]
    if outputs < num_classes:
        raise ConfigError(
            f"the model has {outputs} outputs, but the data have {num_classes} classes; give the model one for each"
        )


def misfit(error: Exception, x: Any, model: Model, sample: Any) -> str:
    """Return an error message that says why a model cannot run on these samples, and what to do."""
    given = {a.dtype for a in tree.tensors(x) if a.is_floating_point()}
    own = {a.dtype for a in model.params.values() if a.is_floating_point()}
    if given and own and not given & own:
        return (
            f"the model does not fit the data: inputs are {_listed(given)} and the model is {_listed(own)}; "
            "cast one of them, with data.cast(...) or model.to(...)"
        )
    places, home = ({a.device for a in some} for some in (tree.tensors(x), model.params.values()))
    if places and home and not places & home:
        return (
            f"the model is on {_listed(home)} and the data are on {_listed(places)}; "
            "move one of them, with data.to(...) or model.to(...)"
        )
    if isinstance(error, KeyError) and isinstance(x, Mapping):
        return f"the model reads {error}, and the data have {', '.join(x)}; choose with inputs= of from_dataset"
    shapes, expected = (tree.map(lambda a: tuple(a.shape[1:]), value) for value in (x, sample))
    if sample is not None and shapes != expected:
        return (
            f"the model does not fit the data: inputs have the shape {shapes}, and the sample given to Split has "
            f"{expected}; all dimensions but the first must be those of the sample ({reason(error).rstrip('.')})"
        )
    named = next(iter(x)) if isinstance(error, TypeError) and isinstance(x, Mapping) and len(x) == 1 else None
    return (
        f"the model does not fit the data: {reason(error).rstrip('.')}; "
        f"check the model's options against inputs of shape {shapes}"
        + ("" if named is None else f"; the model's input may have no name: choose it with inputs={named!r}")
    )


def _listed(things: Iterable[object]) -> str:
    return " and ".join(sorted(map(str, things)))
