"""Specifies remote rounds: every method gives the loop engine's numbers, bytes and round trips."""

from typing import Any

import pytest
import torch
from conftest import SEED, clients_of, fit_for, images, resnet, run
from in_process import deployment
from test_engines_agree import CASES, OPTIMISERS, SHAPES, Outcome, fits, must_agree, on_loop
from torch import Tensor

from cutlayer import methods
from cutlayer.meters.base import Meter
from cutlayer.methods.base import Method
from cutlayer.remote.messages import Packing
from cutlayer.split import Split
from cutlayer.values import PerClient

PLANS = ("hasfl random", "hasfl planned", "hasfl planned cuts", "hasfl by resources")  # no U-shape has a plan
RUNS = [
    (case, shape)
    for case in CASES
    for shape in ("two-part", "u-shaped")
    if fits(case, shape) and (shape == "two-part" or case not in PLANS)
]


def method_of(case: str, shape: str = "two-part", device: str = "cpu") -> Method:
    name, options, _ = CASES[case]
    cut, head = SHAPES[shape]
    opt = OPTIMISERS["momentum"]
    return methods.build(name, Split(fit_for(name, resnet().to(device)), cut, head=head), opt, opt, **options)


def remotely(case: str, shape: str, **options: Any) -> Outcome:
    there = deployment(
        method_of(case, shape), images(), clients_of(), batching=CASES[case].batching, seed=SEED, **options
    )
    return Outcome(run(there), there.ledger)  # type: ignore[arg-type]


@pytest.mark.parametrize(("case", "shape"), RUNS)
def test_remote_rounds_give_the_loop_engines_numbers(case: str, shape: str) -> None:
    must_agree(remotely(case, shape), on_loop(case, "momentum", shape, torch.float64), 0.0)


@pytest.mark.parametrize(("packing", "most"), [("bf16", 2**-8), ("int8", 1 / 254)])
def test_packed_activations_are_a_little_off_and_nothing_else_is(packing: Packing, most: float) -> None:
    seen: dict[str, list[Tensor]] = {"raw": [], packing: []}
    for how, arrived in seen.items():
        there = deployment(
            method_of("sfl_v1"),
            images(),
            clients_of(),
            batching=CASES["sfl_v1"].batching,
            seed=SEED,
            packing=how,  # type: ignore[arg-type]
            meters=(Keeping(arrived),),
        )
        there.round(there.start())
    (z, y), (packed, labels) = ((a[0], a[1]) for a in seen.values())  # the first client's first batch
    assert torch.equal(y, labels)
    largest = z.abs().flatten(1).amax(1).view(-1, *[1] * (z.dim() - 1))  # of each sample
    assert 0 < float(((z - packed).abs() / largest).max()) <= most


class Keeping(Meter):
    """Keeps what comes up."""

    def __init__(self, kept: list[Tensor]) -> None:
        self.kept = kept

    def stepped(self, sizes: Any) -> None: ...

    def crossed(self, kind: Any, direction: str, value: PerClient) -> None:
        if direction == "up":
            self.kept.append(value.at(value.ids[0]))

    def waited(self, ids: Any) -> None: ...

    def sent(self, *_: Any) -> None: ...
