"""Specifies remote rounds: every method gives the loop engine's numbers, bytes and round trips."""

from typing import Any

import pytest
import torch
from conftest import SEED, clients_of, fit_for, images, resnet, run
from in_process import deployment
from test_engines_agree import CASES, OPTIMISERS, SHAPES, Outcome, fits, must_agree, on_loop

from cutlayer import methods
from cutlayer.methods.base import Method
from cutlayer.split import Split

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
