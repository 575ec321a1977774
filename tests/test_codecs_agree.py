"""Specifies the seam: with codecs, every engine gives the loop engine's numbers and bytes, for every method."""

from functools import cache
from typing import Any

import pytest
import torch
from conftest import CODECS, SEED, clients_of, fit_for, images, resnet, run, simulation
from in_process import deployment
from test_engines_agree import CASES, ONE_OF_EACH, OPTIMISERS, PLANNING, Outcome, must_agree

from cutlayer import methods
from cutlayer.core.batches import Batching
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.split import Split

TOLERANCE = 1e-11


def outcome(case: str, codecs: str, engine: str, head: int | None = None) -> Outcome:
    """Three rounds, so that what a codec lost in the first two is sent in the next."""
    name, options, batching = CASES[case]
    model = Split(fit_for(name, resnet()), 1, head=head)
    method = methods.build(name, model, OPTIMISERS["momentum"], OPTIMISERS["momentum"], **options)
    data, partition = images(), clients_of()
    if engine == "devices":
        there = deployment(method, data, partition, batching=batching, seed=SEED, codecs=CODECS[codecs])
        return Outcome(run(there, 3), there.ledger)
    sim = simulation(
        method, data, partition, batching=batching, codecs=CODECS[codecs], engine=engine.replace("graph", "loop")
    )
    if engine == "graph":
        sim.backend.engine = Graph(Again(torch.device("cpu")), 5)
    return Outcome(run(sim, 3), sim.ledger)


@cache
def on_loop(case: str, codecs: str) -> Outcome:
    return outcome(case, codecs, "loop")


SOON = {("sparse", "vmap"), ("sparse", "graph")}
FEW = {"sfl_v1", "smofi", "sl", "hasfl", "fednag"}  # whose models cross in different ways
MOVING = ("smofi random cut", "hasfl random")  # a client does not always hold the layers of which something was lost
OWN_CUTS = "hasfl own cuts"  # each client holds other layers
RUNS = [
    *((case, codecs, "vmap") for case in ONE_OF_EACH.values() for codecs in CODECS),
    *((case, codecs, "graph") for case in ONE_OF_EACH.values() for codecs in ("sparse", "noisy")),
    *((case, "sparse", "devices") for case in ONE_OF_EACH.values()),
    *((case, "sparse", engine) for case in (*MOVING, OWN_CUTS) for engine in ("vmap", "graph", "devices")),
    *(("sfl_v1", codecs, "devices") for codecs in CODECS if codecs != "sparse"),
]


def when_slow(case: str, codecs: str, engine: str) -> tuple[pytest.MarkDecorator, ...]:
    soon = {("smofi random cut", "vmap"), ("smofi random cut", "devices"), (OWN_CUTS, "devices")}
    return () if ((codecs, engine) in SOON and case in FEW) or (case, engine) in soon else (pytest.mark.slow,)


@pytest.mark.parametrize(("case", "codecs", "engine"), [pytest.param(*r, marks=when_slow(*r)) for r in RUNS])
def test_engines_agree(case: str, codecs: str, engine: str) -> None:
    found, expected = outcome(case, codecs, engine), on_loop(case, codecs)
    must_agree(found, expected, TOLERANCE)
    assert found.ledger.before == expected.ledger.before


@pytest.mark.slow
@pytest.mark.parametrize("coded", ["activations", "gradients"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mergesfl", {"seconds_per_sample": (1.0, 1.3, 1.1, 0.5, 4.0), "largest_batch": 30}),
        ("hasfl", {**PLANNING, "batches": "random", "random_batch": (1, 40), "cuts": "fixed"}),
    ],
)
def test_devices_follow_a_method_that_chooses_batches(name: str, options: dict[str, Any], coded: str) -> None:
    """Sizes that no rehearsal has played: codes depend on them."""
    sizes, rounds = (60,) * 5, 7 if name == "hasfl" else 3
    data, partition, batching = images(sum(sizes)), clients_of(sizes), Batching(size=16)

    def method() -> Any:
        return methods.build(
            name, Split(fit_for(name, resnet()), 1), OPTIMISERS["momentum"], OPTIMISERS["momentum"], **options
        )

    given: dict[str, Any] = {"batching": batching, "codecs": {coded: "int8"}}
    far = deployment(method(), data, partition, seed=SEED, followed=(1, 4), **given)
    found = Outcome(run(far, rounds), far.ledger)
    sim = simulation(method(), data, partition, **given)
    must_agree(found, Outcome(run(sim, rounds), sim.ledger), TOLERANCE)
    assert sorted(far.backend.sessions.present()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("engine", ["vmap", "devices"])
def test_the_head_of_a_u_shape_is_encoded_too(engine: str) -> None:
    """Activations go down and gradients up at the head."""
    found = outcome("sfl_v1", "sparse", engine, head=4)
    must_agree(found, outcome("sfl_v1", "sparse", "loop", head=4), TOLERANCE)
    assert {"up_activations", "down_activations", "up_gradients", "down_gradients"} <= found.ledger.before.keys()
