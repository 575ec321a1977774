"""Segments: consecutive units of a model as one pure function of named tensors."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from cutlayer.core import named, tree
from cutlayer.core.compiling import Compiler, compiler
from cutlayer.core.masks import Key, on_device
from cutlayer.core.precision import layers
from cutlayer.core.state import Model, Tensors
from cutlayer.core.torch_private import BatchNorm, NormBase, foreach_add, tensor_homes
from cutlayer.errors import ConfigError
from cutlayer.split.drawing import drawing
from cutlayer.split.graphs import Unit
from cutlayer.split.traits import draws_by_key, draws_otherwise, normalises, writes
from cutlayer.split.units import Chain, preloaded


class Values(Protocol):
    """Anything with the values of a model by name: a Model or a Part."""

    @property
    def params(self) -> Tensors: ...
    @property
    def frozen(self) -> Tensors: ...
    @property
    def buffers(self) -> Tensors: ...


class Slot(NamedTuple):
    """A place inside a module that holds the tensor of this name during a call."""

    home: Any  # a dict or list of tensors
    place: Any  # its key there, or its index
    name: str
    empty: Tensor  # what it holds between calls
    module: nn.Module


class Body:
    """The structure of a model without its values, from which segments are cut.

    Segments of one body share modules, so a lock lets one of them run at a time.
    """

    def __init__(self, structure: nn.Module, units: tuple[Unit, ...]) -> None:
        self.structure = structure
        self.units = units
        named = [*structure.named_parameters(), *structure.named_buffers()]
        constant = preloaded(structure)  # these stay in the structure
        self.names = {id(tensor): name for name, tensor in named if name not in constant}  # tied: the first name
        self.owners = {id(tensor): m for m in structure.modules() for _, held in tensor_homes(m) for _, tensor in held}
        self.lock = Lock()
        # What a rehearsal has found: whether some segment draws by key, and what else draws random numbers.
        self.draws_by_key = False
        self.draws_otherwise: str | None = None

    def segment(self, start: int, stop: int) -> "Segment":
        """Return the units from `start` up to, but not including, `stop`."""
        return Segment(self, self.units[start:stop], start)


class Segment:
    """Consecutive units; a call swaps values in, runs the units in order and puts everything back."""

    def __init__(self, body: Body, units: tuple[Unit, ...], start: int) -> None:
        self.body = body
        self._units = tuple((number, _steps(unit.module)) for number, unit in enumerate(units, start))
        slots = _slots(units, body.names)
        self._params = tuple(s for s in slots if isinstance(s.empty, nn.Parameter) and s.empty.requires_grad)
        self._frozen = tuple(s for s in slots if isinstance(s.empty, nn.Parameter) and not s.empty.requires_grad)
        self._buffers = tuple(s for s in slots if not isinstance(s.empty, nn.Parameter))
        self._slots = slots
        self.params, self.frozen, self.buffers = map(_names, (self._params, self._frozen, self._buffers))
        self.normalises = any(normalises(unit.module) for unit in units)  # with batch statistics
        self._draws_by_key = any(draws_by_key(unit.module) for unit in units)
        self._draws_otherwise = next(filter(None, (draws_otherwise(unit.module) for unit in units)), None)
        self._writes = any(writes(unit.module) for unit in units)
        # The buffers that normalisation layers update in training: running statistics, and a count of batches.
        moved = [s for s in self._buffers if _moves(body.owners[id(s.empty)])]
        self.statistics = _names(moved)
        self._counters = frozenset(s.name for s in moved if s.place == "num_batches_tracked" and _only_counts(s.module))
        self._found_times: dict[tuple[torch.Size, ...], list[int]] = {}

    @property
    def draws_by_key(self) -> bool:
        """Whether a unit draws random numbers that `Masks` draws from the key."""
        return self._draws_by_key or self.body.draws_by_key

    @property
    def draws_otherwise(self) -> str | None:
        """What draws random numbers from torch's generators, if anything does; these are seeded by the key."""
        return self.body.draws_otherwise or self._draws_otherwise

    @property
    def needs_key(self) -> bool:
        return self.draws_by_key or self.draws_otherwise is not None

    def __call__(self, values: Values, x: Any, key: Key | None) -> tuple[Any, Tensors]:
        """Return the output of the units and their new buffers.

        What a unit draws depends on the key and on the unit's own number, so the cut does not change it.
        """
        return layers(self._keyed, values, x, key) if self._units else (x, {})

    def plain(self, values: Values, x: Any) -> tuple[Any, Tensors]:
        """Run the units without a key; only for a pass in which nothing is drawn."""
        return self._run(values, x, None)

    def _keyed(self, values: Values, x: Any, key: Key | None) -> tuple[Any, Tensors]:
        if not self.needs_key:
            key = None
        elif key is None:
            raise ConfigError("the model draws random numbers (dropout or the like): give the call a key, not None.")
        own = None if key is None else on_device(key, tree.tensors(x)[0].device)
        by = compiler()
        return self._run(values, x, own) if by is None or self.draws_otherwise else self._compiled(by, values, x, own)

    def _compiled(self, by: Compiler, values: Values, x: Any, key: Tensor | None) -> tuple[Any, Tensors]:
        """Run the compiled units. Batch counters, each a tensor of one number, are updated together outside."""
        counted = [name for name in self.buffers if name in self._counters]
        others = tuple(name for name in self.buffers if name not in self._counters)
        kinds = (values.params, self.params), (values.frozen, self.frozen), (values.buffers, others)
        own = Model(*({name: held[name] for name in names} for held, names in kinds))
        out, buffers = by(self._uncounted)(own, x, key)
        if counted:
            later = foreach_add([values.buffers[name] for name in counted], self._times(values, x, key, counted))
            buffers = {**buffers, **dict(zip(counted, later, strict=True))}
        return out, {name: buffers[name] for name in self.buffers}

    def _times(self, values: Values, x: Any, key: Tensor | None, counters: list[str]) -> list[int]:
        """Return how often a pass calls each counter's layer: maybe never, maybe several times. Cached by shape."""
        shapes = tuple(a.shape for a in tree.tensors(x))
        if shapes not in self._found_times:
            with torch.no_grad():
                _, made = self._run(values, x, key)
            self._found_times[shapes] = [int(made[name] - values.buffers[name]) for name in counters]
        return self._found_times[shapes]

    def _uncounted(self, values: Model, x: Any, key: Tensor | None) -> tuple[Any, Tensors]:
        return self._run(values, x, key)

    def _run(self, values: Values, x: Any, key: Tensor | None) -> tuple[Any, Tensors]:
        if self._writes:
            x = tree.map(torch.clone, x)  # do not change the caller's value
        params, frozen, buffers = values.params, values.frozen, values.buffers
        # Normalisation layers update buffers in place; a counter that is left out is None to them.
        left_out = self._counters - buffers.keys()
        fresh = named.copies(buffers, tuple(name for name in self.buffers if name not in left_out))
        with self.body.lock, drawing(key, generators=self.draws_otherwise is not None) as begin:
            try:
                for home, place, name, _, _ in self._params:
                    home[place] = params[name]
                for home, place, name, _, _ in self._frozen:
                    home[place] = frozen[name]
                for home, place, name, _, _ in self._buffers:
                    home[place] = fresh.get(name)
                for number, steps in self._units:
                    begin(number)
                    for step in steps:
                        x = step(x)
                return x, {name: home[place] for home, place, name, _, _ in self._buffers if name in fresh}
            finally:
                for home, place, _, empty, _ in self._slots:
                    home[place] = empty


def _names(slots: Sequence[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.name for slot in slots))


def _moves(owner: nn.Module) -> bool:
    return isinstance(owner, NormBase) and owner.training


def _only_counts(norm: nn.Module) -> bool:
    """Return whether the count of batches has no effect: without a momentum, a layer divides by it."""
    return isinstance(norm, BatchNorm) and norm.momentum is not None


def _steps(module: nn.Module) -> tuple[Callable[[Any], Any], ...]:
    """Return what a unit runs; a call of a graph itself would print each error, such as that vmap cannot run it."""
    if isinstance(module, Chain):
        return module._steps
    return (module.forward if isinstance(module, fx.GraphModule) else module,)


def _slots(units: tuple[Unit, ...], names: dict[int, str]) -> tuple[Slot, ...]:
    """Return every place in the units that holds a tensor of the model."""
    found: dict[tuple[int, Any], Slot] = {}
    for unit in units:
        for module in unit.module.modules():
            for home, places in tensor_homes(module):
                for key, tensor in places:
                    if id(tensor) in names:
                        found[id(home), key] = Slot(home, key, names[id(tensor)], tensor, module)
    return tuple(found.values())
