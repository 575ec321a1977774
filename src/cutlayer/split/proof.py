"""The proof before a training: the cut model computes what the module itself computes, on a few samples.

Both run forward and backward in training mode, with random layers switched off.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.core.calculus import crossing, vjp
from cutlayer.core.state import Model, Tensors
from cutlayer.errors import CutError
from cutlayer.split.calling import call, main_output
from cutlayer.split.generators import States, kept, seed, states
from cutlayer.split.graphs import Unit
from cutlayer.split.quiet import Quiet
from cutlayer.split.segment import Body
from cutlayer.split.units import in_training

log = logging.getLogger("cutlayer")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest element; others: 0.05
# Seeds of three passes, and the numbers that torch's functions give in them. The first that each generator draws is
# below 0.05 by the second seed and above 0.95 by the third, so a branch on it goes both ways.
DRAWN = {0: 0.5, 1208: 0.05, 56: 0.95}
Loss = Callable[[Any], Tensor]


class Pass(NamedTuple):
    """What a forward and backward pass gives; `inside`: the main output of each unit that has one."""

    out: Any
    grads: Tensors
    buffers: Tensors
    inside: Mapping[str, Tensor]


class Mismatch(NamedTuple):
    """What differs, by how much, and where it may come from."""

    what: str
    size: float
    names: tuple[str, ...]
    worst: str


def is_whole(model: nn.Module, body: Body, values: Model, x: Any) -> bool:
    """Return whether the units compute what the module does for these inputs; True if it cannot run them itself."""
    devices = _cuda_devices(x)
    with kept(devices), torch.enable_grad(), Quiet():
        _seed_all(0, devices)
        try:
            expected = _whole(model, body.units, x, _sum)
        except Exception:  # a forward may do anything
            return True
        _seed_all(0, devices)
        try:
            found = _in_units(body, values, (), x, _sum)
        except Exception:
            return False
        if _difference(found, expected) is None:
            return True
        _seed_all(0, devices)
        return _difference(_whole(model, body.units, x, _sum), expected) is not None  # nothing equals what varies


def _sum(out: Any) -> Tensor:
    """Return a loss of any output, to which each element contributes another share."""
    real = [a for a in tree.tensors(out) if a.is_floating_point()]
    return sum(((a * torch.arange(a.numel()).to(a).cos().view_as(a)).sum() for a in real), torch.zeros(()))


def compare(
    model: nn.Module, body: Body, values: Model, cuts: Sequence[int], x: Any, loss: Loss, hint: str = ""
) -> None:
    """Raise an error that names the first unit which differs from the module, and the hint.

    `cuts` are the numbers of units below which gradients change hands.
    """
    devices = _cuda_devices(x)
    for number, drawn in DRAWN.items():
        with kept(devices), torch.enable_grad(), Quiet(drawn):
            _seed_all(number, devices)  # for what is drawn in a way that cannot be switched off
            found = _in_units(body, values, cuts, x, loss)
            start = _seed_all(number, devices)
            expected = _whole(model, body.units, x, loss)
            draws = states(devices) != start
            difference = _difference(found, expected)
            if difference is not None:
                _seed_all(number, devices)
                if _difference(_whole(model, body.units, x, loss), expected) is None:
                    raise _differs(model, body, found, expected, difference, hint)
                log.warning(
                    "the cut model is not compared with the whole: its forward gives something else at each call"
                )
                return
        if not draws:
            return  # other seeds would change nothing


def _cuda_devices(x: Any) -> list[int]:
    return sorted({a.device.index or 0 for a in tree.tensors(x) if a.device.type == "cuda"})


def _seed_all(number: int, cuda_devices: list[int]) -> States:
    """Seed the shared generators; return their states."""
    torch.manual_seed(number)
    seed(number)
    return states(cuda_devices)


def _differs(model: nn.Module, body: Body, found: Pass, expected: Pass, difference: Mismatch, hint: str) -> CutError:
    units = _where(body, found, expected, difference)
    where = f"the unit {units[0]!r}" if len(units) == 1 else f"one of the units {units[0]!r} to {units[-1]!r}"
    which = f" ({difference.worst!r})" if difference.what != "outputs" else ""
    return CutError(
        f"{type(model).__name__} does not compute the same when it is cut: {difference.what} differ by "
        f"{difference.size:.1e}{which}, first in {where}. Its forward does something that its units do not; {hint}"
        "write it as nn.Sequential, or give it a units() method that lists all it runs."
    )


def _whole(model: nn.Module, units: Sequence[Unit], x: Any, loss: Loss) -> Pass:
    """Run the module itself."""
    own = in_training(model, own_buffers=True)
    inside: dict[str, Tensor] = {}
    for path in {path for unit in units for path in unit.ends}:
        own.get_submodule(path).register_forward_hook(_note(path, inside))
    out = call(own, tree.map(torch.clone, x))
    params = {name: p for name, p in own.named_parameters() if p.requires_grad}
    end = loss(out)
    found = torch.autograd.grad(end, list(params.values()), allow_unused=True) if end.requires_grad else ()
    grads = {name: g for name, g in zip(params, found, strict=False) if g is not None}
    return Pass(tree.detach(out), grads, dict(own.named_buffers()), inside)


def _note(path: str, inside: dict[str, Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, given: Any, out: Any) -> None:
        out = main_output(out)
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, Tensor):
            inside[path] = first.detach().clone()  # a layer may write into it later

    return hook


def _in_units(body: Body, values: Model, cuts: Sequence[int], x: Any, loss: Loss) -> Pass:
    """Run unit after unit, with gradients handed over at the cuts as in training."""
    inside: dict[str, Tensor] = {}
    buffers: Tensors = {}
    outputs: list[Any] = []

    def run(start: int, stop: int, model: Model, z: Any) -> tuple[Any, Tensors]:
        for i in range(start, stop):
            known = model._replace(buffers={**model.buffers, **buffers})  # a layer may be in several units
            z, new = body.segment(i, i + 1).plain(known, z)
            buffers.update(new)
            main = z.get("hidden") if isinstance(z, dict) else z
            if isinstance(main, Tensor):
                inside.update({path: main.detach().clone() for path in body.units[i].ends})
        if stop < num_units:
            crossing(z)
            return z, {}
        outputs.append(tree.detach(z))
        return loss(z), {}

    num_units, z, pulls = len(body.units), x, []
    for start, stop in pairwise([0, *sorted({cut for cut in cuts if 0 < cut < num_units}), num_units]):
        z, pull = vjp(partial(run, start, stop), [values, z], 1 if start else None)
        pulls.append(pull)
    grads: Tensors = {}
    gradient: Any = torch.ones_like(z)
    for pull in reversed(pulls):
        found = pull(gradient)
        grads |= {name: grads[name] + g if name in grads else g for name, g in found.params.items()}
        gradient = {} if found.cut is None else found.cut
    return Pass(outputs[0], grads, buffers, inside)


def _difference(found: Pass, expected: Pass) -> Mismatch | None:
    """Return the first of outputs, buffers and gradients that differs by more than rounding."""
    outs = [{str(i): a for i, a in enumerate(tree.tensors(out))} for out in (found.out, expected.out)]
    kinds: dict[str, tuple[Tensors, Tensors]] = {
        "outputs": (outs[0], outs[1]),
        "buffers": (found.buffers, {name: expected.buffers[name] for name in found.buffers}),
        "gradients": (found.grads, expected.grads),
    }
    for what, (own, other) in kinds.items():
        scale = max(map(_largest, other.values()), default=0.0)
        pairs = {name: (own.get(name), other.get(name)) for name in {**own, **other}}
        worse = {name: _distance(*pair) for name, pair in pairs.items() if _distance(*pair) > _allowed(*pair, scale)}
        if worse:
            worst = max(worse, key=lambda name: worse[name])
            return Mismatch(what, worse[worst], tuple(worse), worst)
    return None


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest difference; a gradient that is missing is zero, and NaN equals NaN."""
    if a is None or b is None:
        there = a if b is None else b
        return float(there.abs().nan_to_num(nan=float("inf")).max()) if there is not None and there.numel() else 0.0
    if a.shape != b.shape:
        return float("inf")
    apart = (a.double() - b.double()).abs()
    apart[a.isnan() & b.isnan() | (a == b)] = 0.0
    return float(apart.nan_to_num(nan=float("inf")).max()) if a.numel() else 0.0


def _allowed(a: Tensor | None, b: Tensor | None, scale: float) -> float:
    tensors = [t for t in (a, b) if t is not None and t.numel() and t.is_floating_point()]
    own = max(map(_largest, tensors), default=0.0)
    return max((TOLERANCE.get(t.dtype, 0.05) for t in tensors), default=0.0) * (own + 0.01 * scale)


def _largest(value: Tensor) -> float:
    """Return the largest size of a finite element: the others would allow any difference."""
    finite = value[value.isfinite()]
    return float(finite.double().abs().max()) if finite.numel() else 0.0


def _where(body: Body, found: Pass, expected: Pass, difference: Mismatch) -> list[str]:
    """Return the units of which one is the first that differs: above the last whose output is known to be alike.

    The first that differs has another output, or a value that differs; if none has, it is the last.
    """
    names = [unit.name for unit in body.units]
    alike = 0
    for i, unit in enumerate(body.units):
        segment = body.segment(i, i + 1)
        if {*segment.params, *segment.buffers} & set(difference.names):
            return [unit.name]
        pairs = [(found.inside[path], expected.inside[path]) for path in unit.ends if _known(path, found, expected)]
        if any(_distance(a, b) > _allowed(a, b, 0.0) for a, b in pairs):
            return names[alike : i + 1]
        if pairs:
            alike = i + 1
    return names[alike:] or names[-1:]


def _known(path: str, *passes: Pass) -> bool:
    """Return whether both passes note the output of a module, in the same form."""
    shapes = {each.inside[path].shape if path in each.inside else None for each in passes}
    return len(shapes) == 1 and None not in shapes
