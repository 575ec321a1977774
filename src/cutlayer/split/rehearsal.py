"""Checks of a model on a few samples, and error messages for a model that does not fit the data."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.core.state import Model
from cutlayer.errors import ConfigError


def generators(cuda_devices: list[int]) -> list[Tensor]:
    """Return the states of torch's global generators."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda_devices)]


def check_classes(loss: Callable[..., Tensor], out: Any, num_classes: int | None) -> None:
    """Refuse too few outputs: cross entropy fails only at the first sample of a class without an output."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    entropy = loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
    if not entropy or num_classes is None or not isinstance(out, Tensor) or not out.dim():
        return
    outputs = out.shape[1] if out.dim() > 1 else out.shape[0]
    if outputs < num_classes:
        raise ConfigError(
            f"the model has {outputs} outputs, but the data have {num_classes} classes; give the model one for each"
        )


def misfit(error: Exception, x: Any, model: Model) -> str:
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
    shapes = tree.map(lambda a: tuple(a.shape[1:]), x)
    return (
        f"the model does not fit the data: {reason(error).rstrip('.')}; "
        f"check the model's options against inputs of shape {shapes}"
    )


def _listed(things: Iterable[object]) -> str:
    return " and ".join(sorted(map(str, things)))
