"""Random small models, cut at a random place, equal the whole: in training, with dropout by key, and in evaluation."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from equal_parts import assert_evaluation_is_that_of_the_whole, assert_steps_equal, cut_step, whole_step
from hypothesis import HealthCheck, Phase, assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cutlayer.core.masks import Masks, on_device
from cutlayer.core.state import Model
from cutlayer.errors import CutError
from cutlayer.split import Split, drawing

WIDTH, BATCH = 4, 3
LAYERS = ("linear", "norm", "batch", "relu", "dropout", "sequence")
Op = tuple[str, int, int]  # what to do, with which of the values made so far, and with which other or which module


def layer(kind: str) -> nn.Module:
    makes = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "batch": lambda: nn.BatchNorm1d(WIDTH),
        "relu": lambda: nn.ReLU(inplace=False),
        "dropout": lambda: nn.Dropout(0.5),
        "sequence": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.BatchNorm1d(WIDTH)),
    }
    return makes[kind]()


class Program(nn.Module):
    """Runs its operations on the values made so far; some share modules, and some look back a long way."""

    def __init__(self, ops: list[Op], outputs: int, looks: bool) -> None:
        super().__init__()
        self.ops, self.outputs, self.looks = ops, outputs, looks
        self.layers = nn.ModuleList(layer(kind) for kind, _, _ in ops if kind in LAYERS)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, keep: Tensor) -> Any:
        if self.looks and x.shape[1] != WIDTH:  # torch.fx cannot follow this
            raise ValueError
        made, own = [x], iter(self.layers)
        for kind, at, other in self.ops:
            value = made[-1 - at % len(made)]
            if kind in LAYERS:
                made.append(next(own)(value))
            elif kind == "again":
                made.append(self.layers[other % len(self.layers)](value))
            elif kind == "add":
                made.append(value + made[-1 - other % len(made)])
            elif kind == "mask":
                made.append(torch.where(keep.unsqueeze(1), value, -value))
            else:
                made.append(value * self.scale)
        found = tuple(self.out(value) for value in made[-self.outputs :])
        return found if self.outputs > 1 else found[0]


def ops(*kinds: str) -> st.SearchStrategy[Op]:
    return st.tuples(st.sampled_from(kinds), st.integers(0, 3), st.integers(0, 5))


def several(*others: str) -> st.SearchStrategy[list[Op]]:
    """Two or more operations; the first is a layer, and one of them is a dropout."""
    rest = st.lists(ops(*LAYERS, *others), min_size=1, max_size=7)
    every = st.builds(lambda first, rest: [first, *rest], ops(*LAYERS), rest)
    return every.filter(lambda found: "dropout" in {kind for kind, _, _ in found})


sequences, programs = several("again"), several("again", "add", "add", "mask", "scale")
Place = tuple[int, int, bool]  # where to cut, how far above it a head begins, if at all, and whether to cut by a path
places = st.tuples(st.integers(0, 20), st.integers(-1, 5), st.booleans())
fixed = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
SHARED, TWICE = "is used on both sides of a cut", "times. Cut after a module"
DEAD = "its forward does not call it"  # torch.export left it out, since nobody needs its output


def inputs(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=drawn)
    return {"x": x, "keep": torch.rand(BATCH, generator=drawn) > 0.5}


def split_at(model: nn.Module, place: Place, sample: Any) -> Split:
    """The model with units on both sides of the cut."""
    number, head, by_path = place
    paths = [path for path, _ in model.named_modules() if path.startswith(("layers.", "0", "1"))]
    split = Split(model, paths[number % len(paths)] if by_path else 0, sample=sample)
    assume(split.num_units > 1)
    cut = split.cut if by_path else 1 + number % (split.num_units - 1)
    assume(0 < cut < split.num_units)
    return split.with_cut(cut, None if head < 0 else cut + head % (split.num_units + 1 - cut))


class Noted(Masks):
    """Notes the number of the unit and of the call that each random number is drawn for."""

    def __init__(self, key: Tensor, calls: list[tuple[int, int]]) -> None:
        super().__init__(key)
        self.calls = calls

    def _halves(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        self.calls.append((self._unit, self._calls))
        return super()._halves(shape)


class Replayed(Masks):
    """Draws, call after call, for the units and calls noted: the module itself has no units."""

    def __init__(self, key: Tensor, calls: list[tuple[int, int]]) -> None:
        super().__init__(key)
        self.calls = iter(calls)

    def _halves(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        self._unit, self._calls = next(self.calls, None) or reject()  # torch.export left out a call that nobody needs
        return super()._halves(shape)


@contextmanager
def noted() -> Iterator[list[tuple[int, int]]]:
    calls: list[tuple[int, int]] = []
    with patch.object(drawing, "Masks", partial(Noted, calls=calls)):
        yield calls


def assert_equal_to_the_whole(split: Split, x: Any) -> None:
    """Outputs, gradients and buffers in training, with dropout by key, and outputs in evaluation."""
    with noted() as calls:
        found = cut_step(split, x)
    with noted() as uncut:
        split.with_cut(0).whole(Model.joined(*split.initial()), x, 0)
    assert calls == uncut and len(set(calls)) == len(calls)  # no mask twice, and none depends on the cut
    with Replayed(on_device(0, torch.device("cpu")), calls) as masks:
        expected = whole_step(split.model, x)
    assert calls and next(masks.calls, None) is None
    assert_steps_equal(found, expected, 1e-12)
    assert_evaluation_is_that_of_the_whole(split, x)


def outcomes(
    models: st.SearchStrategy[Callable[[], nn.Module]], num: int, named: bool, exported: bool = False
) -> Counter[str]:
    """Cut this many models, compare them with the whole, and count them: compared, or the reason why one is refused."""
    found: Counter[str] = Counter()

    @settings(fixed, max_examples=num)
    @given(models, places, st.integers(0, 9))
    def compare(build: Callable[[], nn.Module], place: Place, seed: int) -> None:
        torch.manual_seed(seed)
        model, x = build().double(), inputs(seed) if named else inputs(seed)["x"]
        try:
            split = split_at(model, place, inputs(0) if exported else None)
        except CutError as error:
            found[next(reason for reason in (SHARED, TWICE, DEAD) if reason in str(error))] += 1
            return
        assert_equal_to_the_whole(split, x)
        found["compared"] += 1
        found["several tensors"] += isinstance(split.lower(split.initial()[0], x, 0)[0], dict)

    compare()
    return found


def sequence(ops: list[Op]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        made: list[nn.Module] = []
        for kind, _, other in ops:
            made.append(made[other % len(made)] if kind == "again" else layer(kind))
        return nn.Sequential(*made)

    return build


def program(looks: bool) -> st.SearchStrategy[Callable[[], nn.Module]]:
    return st.builds(partial, st.just(Program), programs, st.integers(1, 3), st.just(looks))


# More than 200 models equal the whole; the others are refused because of what cannot be.


def test_eighty_random_sequences() -> None:
    found = outcomes(sequences.map(sequence), 120, named=False)
    assert found["compared"] >= 80 and found[SHARED] + found[TWICE] <= 40


def test_a_hundred_and_twenty_random_programs() -> None:
    found = outcomes(program(looks=False), 135, named=True)
    assert found["compared"] >= 120 and found["several tensors"] >= 30 and found[SHARED] + found[TWICE] <= 15


def test_random_programs_by_torch_export() -> None:
    found = outcomes(program(looks=True), 10, named=True, exported=True)
    assert found["compared"] >= 4 and found["several tensors"] >= 1 and found[SHARED] + found[TWICE] + found[DEAD] <= 6
