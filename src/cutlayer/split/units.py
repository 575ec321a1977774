"""Units: the pieces between which a model can be cut.

They come from the model's `units()` method; from an `nn.Sequential`, in which every child is a unit; or else from the
traced graph.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cutlayer.core.torch_private import children
from cutlayer.errors import CutError
from cutlayer.split.tracing import traced


class Unit(NamedTuple):
    """A piece of a model: it takes the previous unit's output, and its tensors have their names in the whole model."""

    name: str
    module: nn.Module


class Chain(nn.Module):
    """Sub-modules of a model, run one after another, with their names in that model."""

    def __init__(self, root: nn.Module, paths: tuple[str, ...]) -> None:
        super().__init__()
        self._steps = tuple(root.get_submodule(path) for path in paths)  # a plain tuple does not register them
        for path, step in zip(paths, self._steps, strict=True):
            *parents, name = path.split(".")
            container: nn.Module = self
            for parent in parents:
                if parent not in children(container):
                    container.add_module(parent, nn.Module())
                container = container.get_submodule(parent)
            container.add_module(name, step)

    def forward(self, x: Any) -> Any:
        for step in self._steps:
            x = step(x)
        return x


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model in the order in which they run."""
    if callable(getattr(model, "units", None)):
        return _declared(model)
    if type(model).forward is nn.Sequential.forward:
        return tuple(Unit(name, Chain(model, (name,))) for name in children(model))
    return tuple(Unit(name, module) for name, module in traced(model))


def preloaded(model: nn.Module) -> frozenset[str]:
    """Return the names of the values that every place has from the start, such as those of a public base model.

    They are constants, not state: they are never copied, sent, averaged or trained.
    """
    if not callable(getattr(model, "preloaded", None)):
        return frozenset()
    names = frozenset[str](model.preloaded())  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if name in names and parameter.requires_grad:
            raise CutError(f"{name!r} trains, so it cannot be preloaded at every place: freeze it or leave it out.")
    return names


def skeleton(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; preloaded values are shared instead."""
    memo: dict[int, Any] = {}
    shared = preloaded(model)
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise CutError(f"{name!r} has no shape yet (a lazy module): run one batch through the model, then cut it.")
        empty = torch.empty_like(parameter.detach(), device="meta")
        alike = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        memo[id(parameter)] = parameter if name in shared else alike
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = buffer if name in shared else torch.empty_like(buffer.detach(), device="meta")
    return copy.deepcopy(model, memo)


def _declared(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units that a model's `units()` lists as (name, qualified names of sub-modules)."""
    listed: tuple[tuple[str, tuple[str, ...]], ...] = tuple(model.units())  # type: ignore[operator]
    kind, modules = type(model).__name__, dict(model.named_modules(remove_duplicate=False))
    for name, paths in listed:
        for path in paths:
            if path not in modules:
                raise CutError(f"unit {name!r} of {kind} names the sub-module {path!r}, which the model does not have.")
    units = tuple(Unit(name, Chain(model, paths)) for name, paths in listed)
    covered = {id(p) for unit in units for p in unit.module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            raise CutError(f"{name!r} is in none of the units of {kind}: add its sub-module to one in units().")
    return units
