"""Segments: consecutive units of a model as one pure function of the tensors they name."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cutlayer.core import keys, named, tree
from cutlayer.core.compiling import Compiler, compiler
from cutlayer.core.precision import layers
from cutlayer.core.state import Model, Tensors
from cutlayer.core.torch_private import BatchNorm, NormBase, foreach_add, tensor_homes
from cutlayer.errors import ConfigError
from cutlayer.split.traits import draws, normalises, writes
from cutlayer.split.units import Chain, Unit, preloaded, units_of

_GENERATORS = Lock()  # torch's own generators belong to the process: one seeded call at a time


class Values(Protocol):
    """Anything that holds the values of a model by name: a Model or a Part."""

    @property
    def params(self) -> Tensors: ...
    @property
    def frozen(self) -> Tensors: ...
    @property
    def buffers(self) -> Tensors: ...


class Slot(NamedTuple):
    """A place inside a module where the tensor of that name is put for the time of a call."""

    home: Any  # a dict or list of tensors
    key: Any
    name: str
    empty: Tensor  # what stands there between calls
    module: nn.Module


class Body:
    """The structure of a model without its values, from which segments are cut.

    Segments of one body share modules, so a lock lets one of them run at a time.
    """

    def __init__(self, structure: nn.Module) -> None:
        self.structure = structure
        self.units: tuple[Unit, ...] = units_of(structure)
        named = [*structure.named_parameters(), *structure.named_buffers()]
        constant = preloaded(structure)  # these stand in the structure for good
        self.names = {id(tensor): name for name, tensor in named if name not in constant}  # tied: by its first name
        self.lock = Lock()
        self.draws = False  # random numbers that only a rehearsal has brought to light, in whichever segment

    def segment(self, start: int, stop: int) -> "Segment":
        """The units from start up to, not including, stop."""
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
        self.normalises = any(normalises(unit.module) for unit in units)  # with the statistics of its batch
        self._draws = any(draws(unit.module) for unit in units)
        self._writes = any(writes(unit.module) for unit in units)
        # What normalisation layers move in training: running statistics, and a count of batches.
        moved = [s for s in self._buffers if isinstance(s.module, NormBase) and s.module.training]
        self.statistics = _names(moved)
        self._counters = frozenset(s.name for s in moved if s.key == "num_batches_tracked" and _only_counts(s.module))
        self._found_times: dict[tuple[torch.Size, ...], list[int]] = {}

    @property
    def draws(self) -> bool:
        return self._draws or self.body.draws

    def __call__(self, values: Values, x: Any, seed: int | None) -> tuple[Any, Tensors]:
        """What leaves the units, and their new buffers; a unit that draws does so from the seed and its number.

        So what a unit draws does not depend on where the model is cut.
        """
        return layers(self._seeded, values, x, seed) if self._units else (x, {})

    def _seeded(self, values: Values, x: Any, seed: int | None) -> tuple[Any, Tensors]:
        if not self.draws:
            by = compiler()
            return self._run(values, x, _no_seed) if by is None else self._compiled(by, values, x)
        if seed is None:
            raise ConfigError("the model draws random numbers (dropout or the like): give the call a key, not None.")
        with _seeding(seed, tree.tensors(x)[0].device) as seed_for:
            return self._run(values, x, seed_for)

    def _compiled(self, by: Compiler, values: Values, x: Any) -> tuple[Any, Tensors]:
        """The same, compiled. Counters of batches, each a number of its own, go on all at once outside."""
        counted = [name for name in self.buffers if name in self._counters]
        others = tuple(name for name in self.buffers if name not in self._counters)
        kinds = (values.params, self.params), (values.frozen, self.frozen), (values.buffers, others)
        own = Model(*({name: held[name] for name in names} for held, names in kinds))
        out, buffers = by(self._uncounted)(own, x)
        if counted:
            later = foreach_add([values.buffers[name] for name in counted], self._times(values, x, counted))
            buffers = {**buffers, **dict(zip(counted, later, strict=True))}
        return out, {name: buffers[name] for name in self.buffers}

    def _times(self, values: Values, x: Any, counters: list[str]) -> list[int]:
        """By how much a pass moves each counter: a layer may be called several times, or never. It is found once."""
        shapes = tuple(a.shape for a in tree.tensors(x))
        if shapes not in self._found_times:
            with torch.no_grad():
                _, made = self._run(values, x, _no_seed)
            self._found_times[shapes] = [int(made[name] - values.buffers[name]) for name in counters]
        return self._found_times[shapes]

    def _uncounted(self, values: Model, x: Any) -> tuple[Any, Tensors]:
        return self._run(values, x, _no_seed)

    def _run(self, values: Values, x: Any, seed_for: Callable[[int], None]) -> tuple[Any, Tensors]:
        if self._writes:
            x = tree.map(torch.clone, x)  # the caller's value stays as it is
        params, frozen, buffers = values.params, values.frozen, values.buffers
        # Normalisation layers update them in place; a counter that is left out is none to them.
        left_out = self._counters - buffers.keys()
        fresh = named.copies(buffers, tuple(name for name in self.buffers if name not in left_out))
        with self.body.lock:
            try:
                for home, key, name, _, _ in self._params:
                    home[key] = params[name]
                for home, key, name, _, _ in self._frozen:
                    home[key] = frozen[name]
                for home, key, name, _, _ in self._buffers:
                    home[key] = fresh.get(name)
                for number, steps in self._units:
                    seed_for(number)
                    for step in steps:
                        x = step(x)
                return x, {name: home[key] for home, key, name, _, _ in self._buffers if name in fresh}
            finally:
                for home, key, _, empty, _ in self._slots:
                    home[key] = empty


def _names(slots: Sequence[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(slot.name for slot in slots))


def _only_counts(norm: nn.Module) -> bool:
    """Without a momentum, a layer's means over all batches need their number."""
    return isinstance(norm, BatchNorm) and norm.momentum is not None


def _steps(module: nn.Module) -> tuple[nn.Module, ...]:
    return module._steps if isinstance(module, Chain) else (module,)


def _slots(units: tuple[Unit, ...], names: dict[int, str]) -> tuple[Slot, ...]:
    """Every place in the units where a tensor of the model stands."""
    found: dict[tuple[int, Any], Slot] = {}
    for unit in units:
        for module in unit.module.modules():
            for home, places in tensor_homes(module):
                for key, tensor in places:
                    if id(tensor) in names:
                        found[id(home), key] = Slot(home, key, names[id(tensor)], tensor, module)
    return tuple(found.values())


def _no_seed(number: int) -> None:
    """For units that draw nothing."""


@contextmanager
def _seeding(seed: int, device: torch.device) -> Iterator[Callable[[int], None]]:
    """What makes each unit draw from the seed inside; the global generators are left as they were."""

    def seed_for(number: int) -> None:
        own = keys.fold(seed, number)
        torch.default_generator.manual_seed(own)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)

    with _GENERATORS, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield seed_for
