"""Split: a model cut into a client's part and a server's part, as pure functions of their values."""

import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.core.calculus import crossing
from cutlayer.core.checks import check_type
from cutlayer.core.masks import Key
from cutlayer.core.state import Model, Tensors
from cutlayer.data.datasets import inputs_of
from cutlayer.errors import ConfigError, CutError
from cutlayer.split.accepted import check_model
from cutlayer.split.cuts import cut_number, head_number, place_of, refuse_shared, shared
from cutlayer.split.drawing import first_draw
from cutlayer.split.generators import States, kept, states
from cutlayer.split.graphs import Unit
from cutlayer.split.inputs import without_name
from cutlayer.split.losses import cross_entropy
from cutlayer.split.proof import compare, is_whole
from cutlayer.split.rehearsal import first_loss, misfit
from cutlayer.split.segment import Body, Segment, Values
from cutlayer.split.traits import warn_of_eval_mode
from cutlayer.split.units import in_training, preloaded, shell, skeleton, units_of, untied

TRY_A_SAMPLE = "give Split a batch of inputs, sample=x, with which torch.export sees more; or "


class Split:
    """A model whose first `cut` units run at the client and the rest at the server.

    With a `head`, the units from there on run at the client again (the U-shape). A cut is the number of units below it
    or the name of the last of them; a head is the number or the name of its first unit. Either may be the path of a
    module: a cut after its end, a head from its beginning. The given module is never changed: training uses pure
    functions of values, by their names in its state dict. During training each sub-module has the mode that the model's
    own `train()` gives it; one that was put in eval mode before the split (such as a frozen normalisation layer) stays
    in eval mode.

    Args:
        model: its units are the children of an `nn.Sequential`, what its `units()` method lists, or what its traced
            forward shows.
        cut: where the client's part ends.
        head: where the client's part begins again.
        loss: the mean loss of a batch, of (outputs, targets); by default the cross entropy of classes, also of one at
            each position of a text. Others are in `cutlayer.losses`.
        sample: a batch of inputs like those of the data, or samples themselves (an Arrays, a data set, a list of
            items); with it torch.export traces models that torch.fx cannot.
        untie: train separate copies of parameters that have several names. Tied ones cannot be on both sides of a cut.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: int | str,
        *,
        head: int | str | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
        sample: Any = None,
        untie: bool = False,
    ) -> None:
        check_model(model)
        self.model = untied(model) if untie else model
        self.loss = loss
        self.sample = tree.map(lambda a: a[:3], _as_tensors(inputs_of(sample)))  # a split may travel to other processes
        self._build(())
        place = place_of(cut, self.model, self._body.units)
        if place is not None:
            self._build((place,))
        self._place(cut, head)
        if not model.training and not callable(getattr(model, "preloaded", None)):  # those are in eval mode on purpose
            warn_of_eval_mode(type(model).__name__, skeleton(model))

    def _build(self, places: tuple[str, ...]) -> None:
        """Find the units, of which one ends after each of these modules."""
        self._places, self._export = places, False
        self._trace()
        if self.sample is not None and self._body.units[0].by_fx and not self._is_whole():
            self._export = True
            self._trace()

    def _trace(self) -> None:
        self._body = self._bare(in_training(self.model))
        self.units = tuple(unit.name for unit in self._body.units)
        self.num_units = len(self.units)
        evaluated = self._bare(shell(self.model).eval())
        self._evaluated = evaluated.segment(0, len(evaluated.units))

    def _bare(self, model: nn.Module) -> Body:
        """Return the structure of a model in its mode."""
        structure = skeleton(model)
        units = units_of(model, sample=self.sample, places=self._places, onto=structure, export=self._export)
        return Body(structure, units)

    def _is_whole(self) -> bool:
        """Return whether the units compute what the module does, as far as the sample shows."""
        values = _copied(self._values(), self._body.segment(0, self.num_units))
        return is_whole(self.model, self._body, values, without_name(self.sample, self._body.units[0].module))

    def bare_units(self) -> tuple[Unit, ...]:
        """Return the units in eval mode, without values and without a part in any other use of the model."""
        return self._bare(shell(self.model).eval()).units

    def _place(self, cut: int | str, head: int | str | None) -> None:
        kind = type(self.model).__name__
        self.cut = cut_number(cut, self._body.units, kind)
        self.head = None if head is None else head_number(head, self.cut, self._body.units, kind)
        self.u_shaped = self.head is not None
        end = self.num_units if self.head is None else self.head
        self._lower = self._body.segment(0, self.cut)
        self._upper = self._body.segment(self.cut, end)
        self._top = self._body.segment(end, self.num_units)
        ends = {"lower": (0, self.cut), "upper": (self.cut, end), "top": (end, self.num_units)}
        self._evaluated_parts = {name: self._evaluated.body.segment(*at) for name, at in ends.items()}
        self._others: dict[tuple[int, int | None], Split] = {}
        refuse_shared((self._lower, self._upper, self._top), self.model)

    def with_cut(self, cut: int | str, head: int | str | None = None) -> "Split":
        """Return the same model with another cut and head."""
        other = object.__new__(Split)
        other.__dict__.update(self.__dict__)
        place = place_of(cut, self.model, self._body.units)
        if place is not None:
            other._build((*self._places, place))
        other._place(cut, head)
        return other

    def at(self, cut: int, head: int | None = None) -> "Split":
        """Return the same model at another cut, cached; it keeps its head unless another is given."""
        where = cut, self.head if head is None else head
        if where not in self._others:
            self._others[where] = self.with_cut(*where)
        return self._others[where]

    @property
    def sides(self) -> tuple[frozenset[str], frozenset[str]]:
        """The names of the values at the client and at the server."""
        client, server = (*_held(self._lower), *_held(self._top)), _held(self._upper)
        return frozenset(client), frozenset(server)

    @property
    def passes_raw(self) -> bool:
        """Whether no weight stands between the inputs and the cut, so that what crosses is the inputs themselves."""
        return not any(True for _ in _held(self._lower))

    @property
    def normalises(self) -> bool:
        """Whether a layer uses batch statistics, and so needs more than one sample."""
        return self.normalises_at("client") or self.normalises_at("server")

    def normalises_at(self, side: Literal["client", "server"]) -> bool:
        """Return whether a layer on this side uses batch statistics."""
        return any(s.normalises for s in ((self._lower, self._top) if side == "client" else (self._upper,)))

    def __reduce__(self) -> tuple[Any, ...]:
        hidden = self._body.draws_by_key, self._body.draws_otherwise
        traced = self._places, self._export
        return _rebuilt, (self.model, self.cut, self.head, self.loss, self.sample, traced, hidden)

    def initial(self) -> tuple[Model, Model]:
        """Return the client's and the server's values, copied from the module's current ones."""
        values = self._values()
        return _copied(values, self._lower, self._top), _copied(values, self._upper)

    def _values(self) -> Tensors:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def lower(self, part: Values, x: Any, key: Key | None = None) -> tuple[Any, Tensors]:
        """Run the client's units up to the cut; return the output and the new buffers."""
        return self._lower(part, x, key)

    def upper(self, part: Values, z: Any, key: Key | None = None) -> tuple[Any, Tensors]:
        """Run the server's units from the cut to the output or head; return the output and the new buffers."""
        return self._upper(part, z, key)

    def top(self, part: Values, h: Any, key: Key | None = None) -> tuple[Any, Tensors]:
        """Run the client's units from the head on; without a head, return the input."""
        return self._top(part, h, key)

    def whole(self, part: Values, x: Any, key: Key | None = None) -> tuple[Any, Tensors]:
        """Run all units, as lower, upper and top with the same key; return the output and the new buffers."""
        z, below = self.lower(part, x, key)
        h, between = self.upper(part, z, key)
        out, above = self.top(part, h, key)
        return out, {**below, **between, **above}

    @cached_property
    def unit_params(self) -> tuple[tuple[str, ...], ...]:
        """The names of each unit's trained parameters; a tied one belongs to the first unit that has it."""
        seen: set[str] = set()
        found = []
        for i in range(self.num_units):
            own = tuple(name for name in self._body.segment(i, i + 1).params if name not in seen)
            seen.update(own)
            found.append(own)
        return tuple(found)

    @torch.no_grad()
    def predict(self, model: Values, x: Any) -> Any:
        """Return the output of the whole model in eval mode, without gradients."""
        return self._evaluated(model, x, 0)[0]

    @torch.no_grad()
    def predict_part(self, part: Literal["lower", "upper", "top"], model: Values, x: Any) -> Any:
        """Return the output of the units on one side in eval mode, without gradients."""
        return self._evaluated_parts[part](model, x, 0)[0]

    @torch.no_grad()
    def rehearse(self, x: Any, y: Tensor, num_classes: int | None = None) -> None:
        """Run a few samples through the initial model in training mode, to find mistakes before training.

        The module and the shared generators do not change. If the model turns out to draw random numbers although none
        of its modules is known to, they are drawn from the key from now on.
        """
        client, server = self.initial()
        model = client.joined(server)
        devices = sorted({a.device.index or 0 for a in tree.tensors(x) if a.device.type == "cuda"})
        with kept(devices):
            before = states(devices)
            try:
                out, buffers = self.whole(model, x, key=0)
                loss = first_loss(self.loss, out, y, num_classes)
                self._check_crossing(model, x)
            except (RuntimeError, ValueError, LookupError, TypeError) as error:
                raise ConfigError(misfit(error, x, model, self.sample)) from error
            if before != states(devices):
                self._find_hidden_draws(lambda: self.whole(model, x, key=0), lambda: states(devices))
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss gives a {found}; it must be the mean over the batch")
        self._refuse_moving_buffers(model.buffers, buffers)

    def _check_crossing(self, model: Model, x: Any) -> None:
        z = self.lower(model, x, 0)[0]
        for value in (z, *([self.upper(model, z, 0)[0]] if self.u_shaped else [])):
            crossing(value)

    def prove(self, x: Any, y: Tensor) -> None:
        """Compare a pass of the cut model with one of the module itself, forward and backward, and refuse a difference.

        A model without a forward has nothing to compare with. Preloaded models are left out: two more passes through a
        large base take long, and its units are what its forward runs.
        """
        if type(self.model).forward is nn.Module.forward or preloaded(self.model):
            return
        client, server = self.initial()
        cuts = [cut for cut in (self.cut, self.head) if cut is not None]
        first = self._body.units[0]
        hint = TRY_A_SAMPLE if first.by_fx and self.sample is None else ""
        x = without_name(x, first.module)
        compare(self.model, self._body, client.joined(server), cuts, x, lambda out: self.loss(out, y), hint)

    @torch.no_grad()
    def without_rows(self, x: Any) -> tuple[str, ...]:
        """Return the names of the tensors at a cut whose first axis is not the samples: it does not grow with them."""
        client, server = self.initial()
        once, twice = ([self.lower(client, x, 0)[0]] for x in (x, tree.map(lambda a: torch.cat([a, a]), x)))
        if self.u_shaped:
            for z in (once, twice):
                z.append(self.upper(server, z[0], 0)[0])
        pairs = [
            (name, a, crossing(more)[name])
            for z, more in zip(once, twice, strict=True)
            for name, a in crossing(z).items()
        ]
        return tuple(name for name, a, more in pairs if not a.dim() or len(more) != 2 * len(a))

    @torch.enable_grad()
    def masks(self, x: Any) -> frozenset[str]:
        """Return the names of the tensors that cross beside others and depend on no parameter, at any possible cut.

        A trace shows them. Of units that are no trace, what has no gradient is one, if another tensor has.
        """
        traced = [unit.masks for unit in self._body.units if unit.masks is not None]
        if traced:
            return frozenset().union(*traced)
        client, server = self.initial()
        model = client.joined(server)
        params, frozen = (tree.map(_differentiable, held) for held in (model.params, model.frozen))
        model = model._replace(params=params, frozen=frozen)
        z, masks, others = x, set[str](), set[str]()
        for i in range(self.num_units):
            z = self._body.segment(i, i + 1)(model, z, 0)[0]
            named = z if isinstance(z, dict) else {}
            trained = {name for name, a in named.items() if a.requires_grad}
            others |= trained
            masks |= named.keys() - trained if trained else set()
            z = tree.map(lambda a: a.detach().requires_grad_(a.requires_grad), z)
        return frozenset(masks - others)

    def _refuse_moving_buffers(self, before: Tensors, after: Tensors) -> None:
        """Refuse a buffer on both sides of a cut that a user's module updates: the two would drift apart.

        A buffer is found only if these samples change it.
        """
        names = [name for segment in (self._lower, self._upper, self._top) for name in segment.buffers]
        for name in sorted({name for name in names if names.count(name) > 1}):
            old, new = before[name], after[name]
            if bool(((old != new) & (new == new)).any()):  # NaN differs from itself but has not changed
                raise shared(name, self.model)

    @property
    def needs_key(self) -> bool:
        """Whether the model draws random numbers in training, so that calls need a key."""
        return any(s.needs_key for s in (self._lower, self._upper, self._top))

    @property
    def random(self) -> str | None:
        """What draws random numbers in training that only the engine loop can draw from a key; None if nothing does."""
        segments = self._lower, self._upper, self._top
        return next((s.draws_otherwise for s in segments if s.draws_otherwise is not None), None)

    def _find_hidden_draws(self, run: Callable[[], Any], states: Callable[[], States]) -> None:
        """Find out how a model draws that was seen to: by key if that leaves the generators alone, or otherwise."""
        self._mark_hidden_draws(by_key=True, otherwise=None)
        if self.random is None:
            self._mark_hidden_draws(by_key=True, otherwise=first_draw(run, states))

    def _mark_hidden_draws(self, by_key: bool, otherwise: str | None) -> None:
        """Mark the model as random at every cut: splits from `with_cut` share the bodies."""
        for body in (self._body, self._evaluated.body):
            body.draws_by_key, body.draws_otherwise = by_key, otherwise

    def export(self, model: Model) -> dict[str, Any]:
        """Return a state dict that loads strictly into the unsplit module."""
        values = {**model.params, **model.frozen, **model.buffers}
        lost = [n for s in (self._lower, self._upper, self._top) for n in _held(s) if n not in values]
        if lost:
            raise CutError(f"export needs every unit, but {lost[0]!r} is missing: give it client.joined(server).")
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        first_name = {id(tensor): name for name, tensor in named}
        entries = self.model.state_dict(keep_vars=True)  # tied tensors have an entry under each of their names
        exported = {key: values.get(first_name.get(id(entry), key), entry) for key, entry in entries.items()}
        return {key: v.detach() if isinstance(v, Tensor) else v for key, v in exported.items()}


def _as_tensors(sample: Any, name: str = "sample") -> Any:
    if isinstance(sample, Mapping):
        return {key: _as_tensors(value, f"{name}[{key!r}]") for key, value in sample.items()}
    if isinstance(sample, np.ndarray):
        return torch.from_numpy(sample)
    if sample is not None:
        check_type(name, sample, Tensor, "a dict of them by name, an Arrays, or a data set or list of items")
    return sample


def _rebuilt(
    model: nn.Module,
    cut: int,
    head: int | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    sample: Any,
    traced: tuple[tuple[str, ...], bool],
    hidden_draws: tuple[bool, str | None],
) -> Split:
    split = object.__new__(Split)
    split.model, split.loss, split.sample = model, loss, sample
    split._places, split._export = traced
    split._trace()
    split._place(cut, head)
    split._mark_hidden_draws(*hidden_draws)
    return split


def _differentiable(a: Tensor) -> Tensor:
    return a.detach().requires_grad_(a.is_floating_point())


def _held(segment: Segment) -> tuple[str, ...]:
    return segment.params + segment.frozen + segment.buffers


def _copied(values: Tensors, *segments: Segment) -> Model:
    def copies(names: tuple[str, ...]) -> Tensors:
        return {name: values[name].detach().clone() for name in names}

    models = [Model(copies(s.params), copies(s.frozen), copies(s.buffers)) for s in segments]
    return functools.reduce(Model.joined, models)
