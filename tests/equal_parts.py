"""Compares a model that is cut with the whole: outputs, gradients and new buffers, also where several tensors cross."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from cutlayer.core import tree
from cutlayer.core.state import Model
from cutlayer.split import Split
from cutlayer.split.calling import call
from cutlayer.split.units import shell


class Step(NamedTuple):
    """One forward and backward pass; parameters without a gradient are left out."""

    out: Any
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def weight(out: Tensor) -> Tensor:
    """A gradient in which every element differs."""
    return torch.arange(out.numel(), dtype=out.dtype).cos().view_as(out)


def leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


def cut_step(split: Split, x: Any, values: Model | None = None, clients: int | None = None) -> Step:
    """A pass through the parts, with gradients handed over at the cuts; with clients, of a stack of them by vmap."""
    given = values or Model.joined(*split.initial())
    model = Model({name: leaf(v) for name, v in given.params.items()}, given.frozen, given.buffers)
    inputs, outputs, buffers = [tree.map(leaf, x)], [], {}
    for part in (split.lower, split.upper, split.top):
        out, new = (vmap(part, (0, 0, None)) if clients else part)(model, inputs[-1], 0)
        outputs.append(out)
        inputs.append(tree.map(leaf, out))
        buffers |= new
    ends = tree.tensors(outputs[-1])
    gradients = [torch.stack([weight(row) for row in a]) if clients else weight(a) for a in ends]
    grads: dict[str, Tensor] = {}
    for out, below in reversed(list(zip(outputs, inputs[:-1], strict=True))):
        sources = tree.tensors(below)
        gradients = _pulled(tree.tensors(out), gradients, model.params, sources, grads)
    return Step(tree.detach(outputs[-1]), grads, buffers)


def _pulled(
    ends: list[Tensor], given: list[Any], params: dict[str, Tensor], sources: list[Tensor], grads: dict[str, Tensor]
) -> list[Any]:
    """Add the gradients of the parameters, and return those of the sources."""
    known = [(a, g) for a, g in zip(ends, given, strict=True) if g is not None and a.requires_grad]
    wanted = {i: a for i, a in enumerate(sources) if a.requires_grad}
    if not known or not (wanted or params):
        return [None] * len(sources)
    found = torch.autograd.grad(
        [a for a, _ in known], [*wanted.values(), *params.values()], [g for _, g in known], allow_unused=True
    )
    by_source = dict(zip(wanted, found, strict=False))
    for name, gradient in zip(params, found[len(wanted) :], strict=True):
        if gradient is not None:
            grads[name] = gradient + grads[name] if name in grads else gradient
    return [by_source.get(i) for i in range(len(sources))]


def whole_step(model: nn.Module, x: Any) -> Step:
    """The same pass of the module itself."""
    own = shell(model, own_buffers=True)
    out = call(own, tree.map(torch.clone, x))
    params = {name: p for name, p in own.named_parameters() if p.requires_grad}
    ends = tree.tensors(out)
    grads: dict[str, Tensor] = {}
    _pulled(ends, [weight(a) for a in ends], params, [], grads)
    return Step(tree.detach(out), grads, dict(own.named_buffers()))


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    if not tolerance:
        assert tree.flatten(found)[0] == tree.flatten(expected)[0]
        assert all(torch.equal(a, b) for a, b in zip(tree.tensors(found), tree.tensors(expected), strict=True))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_steps_equal(found: Step, expected: Step, tolerance: float = 0.0) -> None:
    """Outputs and buffers are equal bit for bit, gradients to this tolerance."""
    assert_same(found.out, expected.out)
    assert found.grads.keys() == expected.grads.keys()
    assert_same(found.grads, {name: expected.grads[name] for name in found.grads}, tolerance)
    assert_same(found.buffers, {name: expected.buffers[name] for name in found.buffers})


def assert_every_cut_is_the_whole(split: Split, x: Any, tolerance: float = 0.0) -> None:
    expected = whole_step(split.model, x)
    for cut in range(split.num_units + 1):
        assert_steps_equal(cut_step(split.with_cut(cut), x), expected, tolerance)


def assert_evaluation_is_that_of_the_whole(split: Split, x: Any) -> None:
    """In one piece and part by part."""
    with torch.no_grad():
        expected = call(shell(split.model, own_buffers=True).eval(), x)
    model, out = Model.joined(*split.initial()), x
    assert_same(split.predict(model, x), expected)
    for part in ("lower", "upper", "top"):
        out = split.predict_part(part, model, out)
    assert_same(out, expected)


def assert_a_stack_is_a_loop(split: Split, x: Any) -> None:
    """Two clients with other values and samples get together what each gets alone, to rounding."""
    own = Model.joined(*split.initial())
    other = Model({name: v * 1.25 for name, v in own.params.items()}, own.frozen, own.buffers)
    samples = (x, tree.map(lambda a: a.flip(0), x))
    stacked = cut_step(split, _stack(*samples), _stack(own, other), clients=2)
    for i, values in enumerate((own, other)):
        expected = cut_step(split, samples[i], values)
        assert_same(tree.map(lambda a, i=i: a[i], stacked), expected, 1e-12)


def _stack(*values: Any) -> Any:
    structure, leaves = zip(*(tree.flatten(value) for value in values), strict=True)
    return tree.unflatten(structure[0], [torch.stack(rows) for rows in zip(*leaves, strict=True)])
