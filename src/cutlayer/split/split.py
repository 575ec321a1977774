"""Split: a model cut into a client's part and a server's part, as pure functions of their values."""

import functools
from collections.abc import Callable
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.core.masks import Key
from cutlayer.core.state import Model, Tensors
from cutlayer.errors import ConfigError, CutError
from cutlayer.split.drawing import first_draw
from cutlayer.split.rehearsal import check_classes, generators, misfit
from cutlayer.split.segment import Body, Segment, Values
from cutlayer.split.units import skeleton


class Split:
    """A model whose first `cut` units run at the client and the rest at the server.

    With a `head`, the units from there on run at the client again (the U-shape). A cut is the number of units below it
    or the name of the last of them; a head is the number or the name of its first unit. The given module is never
    changed: training uses pure functions of values, by their names in its state dict. A sub-module that was put in eval
    mode before the split (such as a frozen normalisation layer) stays in eval mode during training.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: int | str,
        *,
        head: int | str | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    ) -> None:
        self.model = model
        self.loss = loss
        self._body = Body(skeleton(model))
        self.units = tuple(unit.name for unit in self._body.units)
        self.num_units = len(self.units)
        evaluated = Body(skeleton(model).eval())
        self._evaluated = evaluated.segment(0, len(evaluated.units))
        self._place(cut, head)

    def _place(self, cut: int | str, head: int | str | None) -> None:
        kind = type(self.model).__name__
        self.cut = _cut_number(cut, self.units, kind)
        self.head = None if head is None else _head_number(head, self.cut, self.units, kind)
        self.u_shaped = self.head is not None
        end = self.num_units if self.head is None else self.head
        self._lower = self._body.segment(0, self.cut)
        self._upper = self._body.segment(self.cut, end)
        self._top = self._body.segment(end, self.num_units)
        ends = {"lower": (0, self.cut), "upper": (self.cut, end), "top": (end, self.num_units)}
        self._evaluated_parts = {name: self._evaluated.body.segment(*at) for name, at in ends.items()}
        self._others: dict[tuple[int, int | None], Split] = {}
        _refuse_shared((self._lower, self._upper, self._top), kind)

    def with_cut(self, cut: int | str, head: int | str | None = None) -> "Split":
        """Return the same model with another cut and head."""
        other = object.__new__(Split)
        other.__dict__.update(self.__dict__)
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
    def normalises(self) -> bool:
        """Whether a layer uses batch statistics, and so needs more than one sample."""
        return self.normalises_at("client") or self.normalises_at("server")

    def normalises_at(self, side: Literal["client", "server"]) -> bool:
        """Return whether a layer on this side uses batch statistics."""
        return any(s.normalises for s in ((self._lower, self._top) if side == "client" else (self._upper,)))

    def __reduce__(self) -> tuple[Any, ...]:
        hidden = self._body.draws_by_key, self._body.draws_otherwise
        return _rebuilt, (self.model, self.cut, self.head, self.loss, hidden)

    def initial(self) -> tuple[Model, Model]:
        """Return the client's and the server's values, copied from the module's current ones."""
        values: Tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return _copied(values, self._lower, self._top), _copied(values, self._upper)

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

        The module and torch's generators do not change. If the model turns out to draw random numbers although none of
        its modules is known to, they are drawn from the key from now on.
        """
        client, server = self.initial()
        model = client.joined(server)
        devices = sorted({a.device.index or 0 for a in tree.tensors(x) if a.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices):
            before = generators(devices)
            try:
                out, buffers = self.whole(model, x, key=0)
                check_classes(self.loss, out, num_classes)
                loss = self.loss(out, y)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                raise ConfigError(misfit(error, x, model)) from error
            drew = any(not torch.equal(a, b) for a, b in zip(before, generators(devices), strict=True))
            if drew:
                self._find_hidden_draws(lambda: self.whole(model, x, key=0), lambda: generators(devices))
        if not isinstance(loss, Tensor) or loss.dim():
            found = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"the loss gives a {found}; it must be the mean over the batch")
        self._refuse_moving_buffers(model.buffers, buffers)

    def _refuse_moving_buffers(self, before: Tensors, after: Tensors) -> None:
        """Refuse a buffer on both sides of a cut that a user's module updates: the two would drift apart.

        A buffer is found only if these samples change it.
        """
        names = [name for segment in (self._lower, self._upper, self._top) for name in segment.buffers]
        for name in sorted({name for name in names if names.count(name) > 1}):
            old, new = before[name], after[name]
            if bool(((old != new) & (new == new)).any()):  # NaN differs from itself but has not changed
                raise _shared(name, type(self.model).__name__)

    @property
    def needs_key(self) -> bool:
        """Whether the model draws random numbers in training, so that calls need a key."""
        return any(s.needs_key for s in (self._lower, self._upper, self._top))

    @property
    def random(self) -> str | None:
        """What draws random numbers in training that only the engine loop can draw from a key; None if nothing does."""
        segments = self._lower, self._upper, self._top
        return next((s.draws_otherwise for s in segments if s.draws_otherwise is not None), None)

    def _find_hidden_draws(self, run: Callable[[], Any], states: Callable[[], list[Tensor]]) -> None:
        """Find out how a model draws that was seen to: by key if that stops torch's generators, or otherwise."""
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


def _rebuilt(
    model: nn.Module,
    cut: int,
    head: int | None,
    loss: Callable[[Tensor, Tensor], Tensor],
    hidden_draws: tuple[bool, str | None],
) -> Split:
    split = Split(model, cut, head=head, loss=loss)
    split._mark_hidden_draws(*hidden_draws)
    return split


def _held(segment: Segment) -> tuple[str, ...]:
    return segment.params + segment.frozen + segment.buffers


def _copied(values: Tensors, *segments: Segment) -> Model:
    def copies(names: tuple[str, ...]) -> Tensors:
        return {name: values[name].detach().clone() for name in names}

    models = [Model(copies(s.params), copies(s.frozen), copies(s.buffers)) for s in segments]
    return functools.reduce(Model.joined, models)


def _refuse_shared(segments: tuple[Segment, ...], kind: str) -> None:
    """Refuse trained values and running statistics on both sides: they would drift apart. Frozen values may be."""
    seen: set[str] = set()
    for segment in segments:
        own = segment.params + segment.statistics
        for name in own:
            if name in seen:
                raise _shared(name, kind)
        seen.update(own)


def _shared(name: str, kind: str) -> CutError:
    return CutError(
        f"{kind} cannot be cut here: {name!r} is used on both sides of a cut. Cut elsewhere, untie it or freeze it."
    )


def _cut_number(cut: int | str, units: tuple[str, ...], kind: str) -> int:
    cuts = ", ".join(f"{i} {name!r}" for i, name in enumerate(units, start=1))
    if isinstance(cut, str):
        if cut in units:
            return units.index(cut) + 1
        raise CutError(f"{kind} has no unit {cut!r} to cut after{_near(cut, units)} It has {cuts}.")
    _refuse_other_than_int("cut", cut)
    if not 0 <= cut <= len(units):
        raise CutError(
            f"cut {cut} is out of range: {kind} has {len(units)} units, so cuts go from 0 to {len(units)}: {cuts}."
        )
    return cut


def _head_number(head: int | str, cut: int, units: tuple[str, ...], kind: str) -> int:
    starts = ", ".join(f"{i} {name!r}" for i, name in enumerate(units) if i >= cut)
    if isinstance(head, str):
        if head not in units:
            raise CutError(f"{kind} has no unit {head!r} to start the head{_near(head, units)} It may be {starts}.")
        head = units.index(head)
    _refuse_other_than_int("head", head)
    if not cut <= head <= len(units):
        raise CutError(
            f"head {head} is out of range: above cut {cut} of {kind}, heads start from {cut} to {len(units)}: {starts}."
        )
    return head


def _refuse_other_than_int(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise CutError(f"{what} {value!r} is neither a number of units nor the name of one; give an int or a str")


def _near(name: str, units: tuple[str, ...]) -> str:
    near = get_close_matches(name, units, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else "."
