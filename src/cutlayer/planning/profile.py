"""The costs of each unit of a model, for the planner and the clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cutlayer.core import tree
from cutlayer.split import Split
from cutlayer.split.graphs import Unit
from cutlayer.split.units import skeleton, units_of

Shapes = tuple[tuple[int, ...], ...]  # of the tensors of one sample


def elements(shapes: Shapes) -> int:
    return sum(map(prod, shapes))


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """Costs of one unit, for one sample; FLOPs of convolutions and matrix products only, two to a multiply-add."""

    name: str
    forward_flops: int
    backward_flops: int  # of both gradients; without that of the model's input and those of frozen parameters
    shapes: Shapes  # of what leaves the unit
    params: int  # elements, frozen ones included; a tied parameter counts in its first unit
    optimiser_state: int  # elements

    @property
    def macs(self) -> int:
        return self.forward_flops // 2

    @property
    def activation(self) -> int:
        """Elements that leave the unit."""
        return elements(self.shapes)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Costs of every unit. The cumulative tuples are indexed by the cut: entry 0 is for no unit, then 1, 2, ..."""

    rows: tuple[UnitProfile, ...]
    inputs: Shapes

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """Shapes of what crosses at each cut; at cut 0 the input itself."""
        return (self.inputs, *(row.shapes for row in self.rows))

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """Elements that cross at each cut, A(L)."""
        return tuple(map(elements, self.shapes))

    @cached_property
    def cumulative_params(self) -> tuple[int, ...]:
        return _cumulative(row.params for row in self.rows)

    @cached_property
    def cumulative_optimiser_state(self) -> tuple[int, ...]:
        return _cumulative(row.optimiser_state for row in self.rows)

    @cached_property
    def cumulative_forward_flops(self) -> tuple[int, ...]:
        return _cumulative(row.forward_flops for row in self.rows)

    @property
    def macs(self) -> int:
        """Multiply-adds of the whole forward pass."""
        return self.cumulative_forward_flops[-1] // 2

    @property
    def params(self) -> int:
        return self.cumulative_params[-1]

    def client_units(self, cut: int, head: int | None = None) -> tuple[UnitProfile, ...]:
        """Return the units at the client: those below the cut, and in a U-shape those from the head on."""
        return self.rows[:cut] + (self.rows[head:] if head is not None else ())

    def crossing(self, cut: int, head: int | None = None) -> Shapes:
        """Return the shapes of what crosses in one direction: at the cut, and in a U-shape at the head."""
        return self.shapes[cut] + (self.shapes[head] if head is not None else ())

    def share(self, cut: int) -> float:
        """Return O(L): the fraction of the forward FLOPs below the cut."""
        return self.cumulative_forward_flops[cut] / self.cumulative_forward_flops[-1]


def profile(
    model: nn.Module | Split, sample: Tensor | Mapping[str, Tensor] | tuple[int, ...], optimiser_slots: int = 1
) -> Profile:
    """Measure every unit on one sample: the first of a batch, or the shape of one input.

    Nothing is computed: tensors without content run through the units, forward and backward, in eval mode.
    `optimiser_slots` is the number of values that the optimiser keeps a parameter: 0 for plain SGD, 1 with momentum, 2
    for Adam.
    """
    module = model.model if isinstance(model, Split) else model
    x = _one_sample(module, sample)
    inputs = _shapes(x)
    rows = []
    counted: set[int] = set()
    for unit in model.bare_units() if isinstance(model, Split) else units_of(skeleton(module).eval()):
        row, x = _measure(unit, x, optimiser_slots, counted)
        rows.append(row)
    return Profile(rows=tuple(rows), inputs=inputs)


def _measure(unit: Unit, x: Any, optimiser_slots: int, counted: set[int]) -> tuple[UnitProfile, Any]:
    """Return the profile of a unit, and its output as input of the next unit."""
    module = unit.module.to("meta")  # constants that tracing found are not there yet
    with FlopCounterMode(display=False) as forward:
        out = module(x)
    ends = [a for a in tree.tensors(out) if a.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(a) for a in ends])
    new = [p for p in module.parameters() if id(p) not in counted]
    counted.update(id(p) for p in new)
    row = UnitProfile(
        name=unit.name,
        forward_flops=forward.get_total_flops(),
        # The counter counts the weight gradient of a grouped convolution as that of a full one.
        backward_flops=min(backward.get_total_flops(), 2 * forward.get_total_flops()),
        shapes=_shapes(out),
        params=sum(p.numel() for p in new),
        optimiser_state=optimiser_slots * sum(p.numel() for p in new if p.requires_grad),
    )
    return row, tree.map(lambda a: a.detach().requires_grad_(a.requires_grad), out)


def _one_sample(model: nn.Module, sample: Tensor | Mapping[str, Tensor] | tuple[int, ...]) -> Any:
    if isinstance(sample, tuple):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
        return torch.empty(1, *sample, dtype=dtype, device="meta")
    return tree.map(lambda a: a[:1].to("meta"), dict(sample) if isinstance(sample, Mapping) else sample)


def _shapes(sample: Any) -> Shapes:
    """Return the shapes of the tensors of one sample, without its axis of length 1."""
    return tuple(tuple(a.shape[1:]) if a.shape[:1] == (1,) else tuple(a.shape) for a in tree.tensors(sample))


def _cumulative(values: Any) -> tuple[int, ...]:
    return tuple(accumulate(values, initial=0))
