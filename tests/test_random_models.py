"""Random small models, cut at a random place, equal the whole: outputs, gradients and buffers."""

from typing import Any

import torch
from equal_parts import assert_same, assert_steps_equal, cut_step, whole_step
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cutlayer.core.state import Model
from cutlayer.errors import CutError
from cutlayer.split import Split

WIDTH, BATCH = 4, 3
LAYERS = ("linear", "norm", "batch", "relu", "dropout", "sequence")
Op = tuple[str, int, int]  # what to do, with which of the values made so far, and with which other or which module


def layer(kind: str) -> nn.Module:
    makes = {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "batch": lambda: nn.BatchNorm1d(WIDTH),
        "relu": lambda: nn.ReLU(inplace=False),
        "dropout": lambda: nn.Dropout(0.0),
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
                shared = self.layers[other % len(self.layers)] if len(self.layers) else torch.tanh
                made.append(shared(value))
            elif kind == "add":
                made.append(value + made[-1 - other % len(made)])
            elif kind == "mask":
                made.append(torch.where(keep.unsqueeze(1), value, -value))
            else:
                made.append(value * self.scale)
        found = tuple(self.out(value) for value in made[-self.outputs :])
        return found if self.outputs > 1 else found[0]


programs = st.lists(
    st.tuples(st.sampled_from([*LAYERS, "again", "add", "add", "mask", "scale"]), st.integers(0, 3), st.integers(0, 5)),
    min_size=1,
    max_size=8,
)
sequences = st.lists(st.tuples(st.sampled_from(LAYERS), st.booleans()), min_size=1, max_size=7)


Place = tuple[int, int, bool]  # where to cut, how far above it a head begins, if at all, and whether to cut by a path
places = st.tuples(st.integers(0, 20), st.integers(-1, 5), st.booleans())


def inputs(seed: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=drawn)
    return {"x": x, "keep": torch.rand(BATCH, generator=drawn) > 0.5}


def check(model: nn.Module, place: Place, x: Any, sample: Any) -> None:
    """Equal to the whole; with dropout, to the same units without a cut. Or refused because of what cannot be."""
    split = split_at(model, place, sample)
    if split is not None:
        assert_steps_equal(cut_step(split, x), whole_step(model, x), 1e-12)
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in dropouts:
        module.p = 0.5
    if dropouts and (split := split_at(model, place, sample)) is not None:
        check_masks(split, x)


def check_masks(split: Split, x: Any) -> None:
    """What is dropped depends on the key, and not on the cut."""
    assert split.needs_key and split.random is None
    uncut = split.with_cut(0)
    assert_steps_equal(cut_step(split, x), cut_step(uncut, x), 1e-12)
    model = Model.joined(*split.initial())
    for key in (1, 2):
        assert_same(split.whole(model, x, key), uncut.whole(model, x, key))


def split_at(model: nn.Module, place: Place, sample: Any) -> Split | None:
    """The model, cut; None if it is refused because of what cannot be."""
    number, head, by_path = place
    paths = [path for path, _ in model.named_modules() if path]
    try:
        split = Split(model, paths[number % len(paths)] if by_path else 0, sample=sample)
        cut = split.cut if by_path else number % (split.num_units + 1)
        return split.with_cut(cut, None if head < 0 else cut + head % (split.num_units + 1 - cut))
    except CutError as error:
        assert any(reason in str(error) for reason in REASONS), error
        return None


REASONS = ("is used on both sides of a cut", "times. Cut after a module", "its forward does not call it")
fixed = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])


@settings(fixed, max_examples=100)
@given(sequences, places, st.integers(0, 9))
def test_a_random_sequence(kinds: list[tuple[str, bool]], place: Place, seed: int) -> None:
    torch.manual_seed(seed)
    made: list[nn.Module] = []
    for kind, again in kinds:
        made.append(made[0] if again and made else layer(kind))
    check(nn.Sequential(*made).double(), place, inputs(seed)["x"], None)


@settings(fixed, max_examples=200)
@given(programs, st.integers(1, 3), places, st.integers(0, 9))
def test_a_random_program(ops: list[Op], outputs: int, place: Place, seed: int) -> None:
    torch.manual_seed(seed)
    check(Program(ops, outputs, looks=False).double(), place, inputs(seed), None)


@settings(fixed, max_examples=20)
@given(programs, st.integers(1, 3), places, st.integers(0, 9))
def test_a_random_program_by_torch_export(ops: list[Op], outputs: int, place: Place, seed: int) -> None:
    torch.manual_seed(seed)
    x = inputs(seed)
    check(Program(ops, outputs, looks=True).double(), place, x, x)
