"""Optimisers with a learning rate and a count that are tensors: the same steps as with plain numbers."""

import pytest
import torch

from cutlayer.core import tree
from cutlayer.core.state import Grads, Model, Part
from cutlayer.optim.optimiser import Optimiser, adam, adamw, sgd

OPTIMISERS = {
    "sgd": sgd(0.05),
    "momentum": sgd(0.05, momentum=0.9, weight_decay=0.1),
    "nesterov": sgd(0.05, momentum=0.9, nesterov=True),
    "adam": adam(0.01, betas=(0.8, 0.999)),
    "adamw": adamw(0.01, weight_decay=0.1),
    "clip": sgd(0.05, momentum=0.9, clip=0.5),
    "proximal": adam(0.01, proximal=0.3),
}


def start(optimiser: Optimiser, dtype: torch.dtype) -> Part:
    """Values with and without dimensions."""
    params = {"a": torch.linspace(-1, 2, 6, dtype=dtype).reshape(2, 3), "b": torch.tensor(3.0, dtype=dtype)}
    return optimiser.begin(Model(params, {}, {}), 0)


def with_tensors(part: Part) -> Part:
    return part._replace(lr=torch.tensor(part.lr, dtype=torch.float64), count=torch.tensor(part.count))


def after_20_steps(optimiser: Optimiser, part: Part) -> Part:
    for step in range(20):
        pull = tree.map(lambda value, at=step: torch.sin(3 * value + at), part.params)
        part = optimiser.step(part, Grads(pull, {}, part.params["b"].square()))
    return part


@pytest.mark.parametrize("name", OPTIMISERS)
def test_tensors_and_numbers_give_the_same_steps(name: str) -> None:
    optimiser = OPTIMISERS[name]
    part = start(optimiser, torch.float64)
    numbers = after_20_steps(optimiser, part)
    tensors = after_20_steps(optimiser, with_tensors(part))
    assert (numbers.count, int(tensors.count)) == (20, 20)
    assert not torch.allclose(numbers.params["a"], part.params["a"], rtol=0, atol=1e-3)
    for kind in ("params", "moments"):
        torch.testing.assert_close(getattr(tensors, kind), getattr(numbers, kind), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_single_precision_stays_single(name: str) -> None:
    part = after_20_steps(OPTIMISERS[name], with_tensors(start(OPTIMISERS[name], torch.float32)))
    assert {t.dtype for t in tree.tensors((part.params, part.moments))} == {torch.float32}
    assert (part.lr.dtype, part.count.dtype) == (torch.float64, torch.int64)


def test_adams_corrections_are_in_double_precision() -> None:
    """After one step from nothing, Adam moves by the learning rate whatever the beta: single precision would not."""
    optimiser = adam(0.01, betas=(0.0, 1 - 1e-9), eps=1e-30)
    part = with_tensors(start(optimiser, torch.float64))
    after = optimiser.step(part, Grads({"a": torch.full((2, 3), 0.3, dtype=torch.float64)}, {}, None))
    moved = part.params["a"] - after.params["a"]
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-6, atol=0)
