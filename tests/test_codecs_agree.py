"""Specifies the seam: with codecs, every engine gives the loop engine's numbers and bytes, for every method."""

from functools import cache

import pytest
import torch
from conftest import CODECS, SEED, clients_of, fit_for, images, resnet, run, simulation
from in_process import deployment
from test_engines_agree import CASES, ONE_OF_EACH, OPTIMISERS, Outcome, must_agree

from cutlayer import methods
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
RUNS = [
    *((case, codecs, "vmap") for case in ONE_OF_EACH.values() for codecs in CODECS),
    *((case, codecs, "graph") for case in ONE_OF_EACH.values() for codecs in ("sparse", "noisy")),
    *((case, "sparse", "devices") for case in ONE_OF_EACH.values()),
    *(("sfl_v1", codecs, "devices") for codecs in CODECS if codecs != "sparse"),
]


def when_slow(case: str, codecs: str, engine: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if (codecs, engine) in SOON and case in FEW else (pytest.mark.slow,)


@pytest.mark.parametrize(("case", "codecs", "engine"), [pytest.param(*r, marks=when_slow(*r)) for r in RUNS])
def test_engines_agree(case: str, codecs: str, engine: str) -> None:
    found, expected = outcome(case, codecs, engine), on_loop(case, codecs)
    must_agree(found, expected, TOLERANCE)
    assert found.ledger.before == expected.ledger.before


@pytest.mark.parametrize("engine", ["vmap", "devices"])
def test_the_head_of_a_u_shape_is_encoded_too(engine: str) -> None:
    """Activations go down and gradients up at the head."""
    found = outcome("sfl_v1", "sparse", engine, head=4)
    must_agree(found, outcome("sfl_v1", "sparse", "loop", head=4), TOLERANCE)
    assert {"up_activations", "down_activations", "up_gradients", "down_gradients"} <= found.ledger.before.keys()
