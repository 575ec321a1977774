"""Units: the pieces between which a model can be cut.

They come from the model's `units()` method; from an `nn.Sequential`, in which every child is a unit; or else from the
graph of its forward, by torch.fx or, given a sample, by torch.export.
"""

import contextlib
import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cutlayer.core.torch_private import children
from cutlayer.errors import CutError
from cutlayer.split.accepted import ChangedError, constant_attributes
from cutlayer.split.exported import exported
from cutlayer.split.generators import DrawnError, without_draws
from cutlayer.split.graphs import Traced, Unit, units_from
from cutlayer.split.padding import keep_padding
from cutlayer.split.tracing import traced


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


def units_of(
    model: nn.Module,
    *,
    sample: Any = None,
    places: Collection[str] = (),
    onto: nn.Module | None = None,
    export: bool = False,
) -> tuple[Unit, ...]:
    """Return the units of a model in the order in which they run.

    Args:
        sample: inputs, by which torch.export traces what torch.fx cannot; of a dict, the keys name the inputs.
        places: paths of modules after which a unit must end, besides those after which one ends anyway.
        onto: a module of the same structure, whose values the units hold instead of the model's.
        export: let torch.export trace what torch.fx could, too.
    """
    home = model if onto is None else onto
    if callable(getattr(model, "units", None)):
        return _declared(home)
    pieces = tuple(children(model)) if type(model).forward is nn.Sequential.forward else None
    if pieces is not None and not places:
        return _chains(home, [(name, (name,)) for name in pieces])
    if export:
        return units_from(without_draws(model, lambda: exported(model, sample)), home, places, pieces)
    return _from_graph(model, sample, places, home, pieces)


def _from_graph(
    model: nn.Module, sample: Any, places: Collection[str], home: nn.Module, pieces: Collection[str] | None
) -> tuple[Unit, ...]:
    """Return the units by torch.fx; or else, given a sample, by torch.export."""
    try:
        return units_from(without_draws(model, lambda: _traced(model, sample, places)), home, places, pieces)
    except Exception as error:  # a forward may do anything with a traced value
        if sample is not None:
            return units_from(_exported(model, sample, error), home, places, pieces)
        if isinstance(error, CutError):
            raise
        raise CutError(
            f"{type(model).__name__} cannot be cut because its forward cannot be traced ({type(error).__name__}: "
            f"{error}). Give a batch of inputs, Split(..., sample=x), with which torch.export can trace more; or write "
            "it as nn.Sequential, or give it a units() method."
        ) from error


def _traced(model: nn.Module, sample: Any, places: Collection[str]) -> Traced:
    inputs = tuple(sample) if isinstance(sample, dict) else None
    with contextlib.suppress(ChangedError), constant_attributes(model):
        return traced(model, inputs, places)
    with constant_attributes(model):  # those that only the first pass changes, such as a size that it sees, may change
        return traced(model, inputs, places)


def _exported(model: nn.Module, sample: Any, first: Exception) -> Traced:
    """Return the graph by torch.export, which records what torch draws; if it fails, too, say what torch.fx drew."""
    try:
        return without_draws(model, lambda: exported(model, sample))
    except CutError as error:
        if isinstance(first, DrawnError):
            raise first from error
        raise


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
    structure = copy.deepcopy(model, memo)
    keep_padding(structure)
    return structure


def shell(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """Return a copy of a model that shares its tensors: its mode can change while the given module does not."""
    shared: list[Tensor] = [*model.parameters(), *([] if own_buffers else model.buffers())]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def in_training(model: nn.Module, *, own_buffers: bool = False) -> nn.Module:
    """Return a shell of a model in the modes in which it trains: what its own `train()` leaves in eval mode is so, too.

    What is in eval mode now stays in it.
    """
    own = shell(model, own_buffers=own_buffers)
    if any(type(m).train is not nn.Module.train for m in own.modules()):
        trained = skeleton(model)  # a train() of somebody's own may write into parameters, which a shell shares
        trained.train()
        modes = {path: m.training for path, m in trained.named_modules()}
        for path, module in own.named_modules():
            module.training = module.training and modes.get(path, True)
    return own


def untied(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which every path has a module and parameters of its own; the values are equal."""
    model = copy.deepcopy(model)
    seen: set[int] = set()
    for path, module in list(model.named_modules(remove_duplicate=False)):
        parent, _, name = path.rpartition(".")
        if id(module) in seen:
            module = copy.deepcopy(module)
            setattr(model.get_submodule(parent), name, module)
        seen.add(id(module))
    for path, parameter in list(model.named_parameters(remove_duplicate=False)):
        parent, _, name = path.rpartition(".")
        if id(parameter) in seen:
            own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(parent), name, own)
        seen.add(id(parameter))
    return model


def _declared(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units that a model's `units()` lists as (name, qualified names of sub-modules)."""
    listed: tuple[tuple[str, tuple[str, ...]], ...] = tuple(model.units())  # type: ignore[operator]
    kind, modules = type(model).__name__, dict(model.named_modules(remove_duplicate=False))
    for name, paths in listed:
        for path in paths:
            if path not in modules:
                raise CutError(f"unit {name!r} of {kind} names the sub-module {path!r}, which the model does not have.")
    units = _chains(model, listed)
    covered = {id(p) for unit in units for p in unit.module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            raise CutError(f"{name!r} is in none of the units of {kind}: add its sub-module to one in units().")
    return units


def _chains(model: nn.Module, listed: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[Unit, ...]:
    """Return a unit for each list of paths."""
    firsts, lasts = ([paths[i] if paths else "" for _, paths in listed] for i in (0, -1))
    return tuple(
        Unit(name, Chain(model, paths), _around(first, before), _around(last, after))
        for (name, paths), first, last, before, after in zip(
            listed, firsts, lasts, ["", *lasts[:-1]], [*firsts[1:], ""], strict=True
        )
    )


def _around(path: str, other: str) -> tuple[str, ...]:
    """Return the modules that contain a path, itself included, but do not contain the other; the outermost first."""
    parts = path.split(".")
    every = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return tuple(each for each in every if each and not f"{other}.".startswith(f"{each}."))
