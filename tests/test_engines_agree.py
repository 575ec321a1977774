"""Specifies that every engine gives the loop engine's numbers, bytes and round trips, for every method."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from conftest import (
    BATCH,
    GENERAL,
    NUM_UNITS,
    SEED,
    TOLD,
    TWO_PART_ONLY,
    agree,
    clients_of,
    distance,
    fit_for,
    images,
    resnet,
    run,
    simulation,
    trained,
)
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.state import State
from cutlayer.core.values import Held
from cutlayer.meters.ledger import Ledger
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.problem import Costs
from cutlayer.planning.profile import profile
from cutlayer.split import Split


class Case(NamedTuple):
    """A method as a configuration names it."""

    name: str
    options: dict[str, Any]
    batching: Batching = BATCH


HETEROGENEOUS = Devices(
    clients=tuple(Device(flops=1e7 * 2**k, up=1e6 / 3**k, down=4e6 / 2**k) for k in (0, 2, 1, 3, 1)),
    server=1e9,
    lanes="shared",
    server_up=1e7,
    server_down=1e7,
)
COSTS = Costs.of(profile(resnet(), (1, 8, 8)))
PLANNING = {"interval": 3, "devices": HETEROGENEOUS, "costs": COSTS}

CASES = {
    "fedavg": Case("fedavg", {}),
    "fedavg uniform": Case("fedavg", {"agg": "uniform"}),
    "fedprox": Case("fedprox", {"mu": 0.3}),
    "fednar": Case("fednar", {"max_norm": 0.5}),
    "fedavgm": Case("fedavgm", {}),
    "slowmo": Case("slowmo", {}, Batching(size=4, steps=4)),
    "slowmo average": Case("slowmo", {"alpha": 0.5, "buffers": "average"}, Batching(size=4, steps=4)),
    "fednag": Case("fednag", {}, Batching(size=4, steps=4)),
    "sl": Case("sl", {}),
    "sfl_v1": Case("sfl_v1", {}),
    "sfl_v1 epoch": Case("sfl_v1", {"sync": "epoch"}, Batching(size=4, epochs=2)),
    "sfl_v1 step": Case("sfl_v1", {"sync": "step"}),
    "sfl_v1 step uniform": Case("sfl_v1", {"sync": "step", "agg": "uniform"}),
    "smofi": Case("smofi", {"alpha": -0.5}, Batching(size=4, epochs=2)),
    "smofi literal": Case("smofi", {"alpha": -0.5, "staleness_offset": 0}),
    "smofi without alignment": Case("smofi", {"align": False}),
    "smofi random cut": Case("smofi", {"random_cut": (0, 3)}),
    "sfl_v2": Case("sfl_v2", {}),
    "sfl_v2 reset round": Case("sfl_v2", {"server_opt_reset": "round"}),
    "sfl_v2 reset step": Case("sfl_v2", {"server_opt_reset": "step", "order": "fixed"}),
    "sfl_v2 client": Case("sfl_v2", {"interleave": "client"}),
    "mergesfl": Case("mergesfl", {}),
    "hasfl": Case("hasfl", {"interval": 3, "batches": (4, 1, 2, 5, 3), "cuts": "fixed"}),
    "hasfl own cuts": Case("hasfl", {"interval": 3, "batches": (4, 1, 2, 4, 2), "cuts": (1, 3, 2, 1, 3)}),
    "hasfl random": Case("hasfl", {**PLANNING, "batches": "random", "random_batch": (1, 6), "cuts": "random"}),
    "hasfl planned": Case("hasfl", {**PLANNING, "batches": "planned", "cuts": "planned"}),
    "hasfl planned cuts": Case("hasfl", {**PLANNING, "batches": (4, 1, 2, 4, 2), "cuts": "planned", "target": 1e6}),
    "hasfl by resources": Case("hasfl", {**PLANNING, "batches": "random", "cuts": "resources", "replan_every": 2}),
    # A longer look ahead than usual: rounding is divided by it.
    "hosfl": Case("hosfl", {"smoothing": 0.1}),
    "hosfl ahead": Case("hosfl", {"smoothing": 0.1, "perturbations": 3, "overlap": 2, "agg": "samples"}),
    "zo_sfl": Case("zo_sfl", {"smoothing": 0.1}, Batching(size=4, steps=1)),
    "mu_splitfed": Case("mu_splitfed", {"smoothing": 0.1}),
    "fsl_sage": Case("fsl_sage", {"align_epochs": 2, "server_interval": 2}),
    "splitlora": Case("splitlora", {}),
    "splitlora shared": Case("splitlora", {"mode": "shared_server", "interval": 3}),
    "sfl_v1 random layers": Case("sfl_v1", {}),
    "mergesfl regulated": Case("mergesfl", {"seconds_per_sample": (1.0, 2.0, 1.0, 0.5, 4.0), "largest_batch": 8}),
}
RANDOM_LAYERS = {"sfl_v1 random layers"}  # cases whose network draws random numbers
ONE_OF_EACH = {case.name: name for name, case in reversed(CASES.items())}  # the first case of every method
OPTIMISERS = {
    "momentum": optim.sgd(0.05, momentum=0.9),
    "nesterov": optim.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": optim.adam(1e-3),
}
SHAPES = {  # cut and head
    "two-part": (1, None),
    "u-shaped": (1, 4),
    "empty client": (0, None),
    "empty server": (NUM_UNITS, None),
    "empty server of a u-shape": (1, 1),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


class Outcome(NamedTuple):
    """All that two rounds leave behind."""

    state: State
    ledger: Ledger

    @property
    def values(self) -> Any:
        """The client's and the server's parts with moments and buffers, the method's memory, and the report."""
        return plain((self.state.client, self.state.server, self.state.memory, self.state.report))


def plain(value: Any) -> Any:
    """The values alone, wherever they are held."""
    return tree.replace(Held, lambda held: held.tree, value)


def net_of(case: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return random_layers(dtype) if case in RANDOM_LAYERS else fit_for(CASES[case].name, resnet(dtype=dtype))


def random_layers(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Five units for square images: a leaky ReLU with random slopes, attention, and all kinds of dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(1, 2), nn.Linear(4, 8), nn.RReLU(0.6, 0.9)),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, activation="gelu", batch_first=True),
            nn.Dropout1d(0.2),
            nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.1), nn.Dropout(0.2, inplace=True)),
            nn.Sequential(nn.Flatten(), nn.Linear(32, 10)),
        ).to(dtype)


def outcome(case: str, opt: str, shape: str, dtype: torch.dtype, **engine: Any) -> Outcome:
    name, options, batching = CASES[case]
    cut, head = SHAPES[shape]
    model = Split(net_of(case, dtype), cut, head=head)
    method = methods.build(name, model, OPTIMISERS[opt], OPTIMISERS[opt], **options)
    sim = simulation(method, images(dtype=dtype), clients_of(), batching=batching, **engine)
    return Outcome(run(sim), sim.ledger)


@cache
def on_loop(case: str, opt: str, shape: str, dtype: torch.dtype) -> Outcome:
    return outcome(case, opt, shape, dtype, engine="loop")


RUNS = [
    *((opt, shape, torch.float64) for opt in OPTIMISERS for shape in ("two-part", "u-shaped")),
    *((opt, "two-part", torch.float32) for opt in OPTIMISERS),
    ("momentum", "u-shaped", torch.float32),
]


def fits(case: str, shape: str) -> bool:
    return SHAPES[shape][1] is None or CASES[case].name not in TWO_PART_ONLY


# Pieces that are put on FedAvg or SFL-V1 need not meet every optimiser and shape again, nor need a method's variants.
ON_FEDAVG = {"fedavg uniform", "fedprox", "fednar", "fedavgm", "slowmo", "slowmo average", "fednag"}
PIECES = {
    *ON_FEDAVG,
    *("sfl_v1 step uniform", "smofi literal", "smofi without alignment"),
    "zo_sfl",  # whose steps are so long that single precision has no digits left after a few
    *("hasfl random", "hasfl planned", "hasfl planned cuts", "hasfl by resources"),
}
FEW_RUNS = [("nesterov", "two-part", torch.float64), ("momentum", "two-part", torch.float32)]
VARIANT_RUNS = [
    *(("momentum", "u-shaped", torch.float64), ("adam", "two-part", torch.float64)),
    ("momentum", "two-part", torch.float32),
]


def runs_of(case: str) -> list[tuple[str, str, torch.dtype]]:
    if case in PIECES:
        return FEW_RUNS
    return RUNS if case in ONE_OF_EACH.values() else VARIANT_RUNS


PAIRS = [(case, opt, shape, dtype) for case in CASES for opt, shape, dtype in runs_of(case) if fits(case, shape)]


def when_slow(case: str, opt: str, shape: str, dtype: torch.dtype) -> tuple[pytest.MarkDecorator, ...]:
    """Run every case in double precision in the fast suite, those that are not in PIECES with two optimisers."""
    soon = dtype == torch.float64 and (
        case in PIECES or (opt, shape) in {("momentum", "u-shaped"), ("adam", "two-part")}
    )
    return () if soon else (pytest.mark.slow,)


@pytest.mark.parametrize(("case", "opt", "shape", "dtype"), [pytest.param(*p, marks=when_slow(*p)) for p in PAIRS])
def test_vmap_gives_the_loop_engines_numbers(case: str, opt: str, shape: str, dtype: torch.dtype) -> None:
    found = outcome(case, opt, shape, dtype, engine="vmap")
    must_agree(found, on_loop(case, opt, shape, dtype), TOLERANCE[dtype])


# Of every method one case, and those whose clients differ in more than their data.
@pytest.mark.parametrize("case", [*ONE_OF_EACH.values(), "smofi random cut", "sfl_v2 client", "hasfl own cuts"])
def test_vmap_two_clients_at_a_time_gives_the_loop_engines_numbers(case: str) -> None:
    found = outcome(case, "momentum", "two-part", torch.float64, engine="vmap", chunk=2)
    must_agree(found, on_loop(case, "momentum", "two-part", torch.float64), TOLERANCE[torch.float64])


EMPTY = [
    (case, shape)
    for case in methods.METHODS
    if case not in ON_FEDAVG  # which know no cut
    for shape in ("empty client", "empty server", "empty server of a u-shape")
    if fits(case, shape)
]


@pytest.mark.parametrize(("case", "shape"), EMPTY)
def test_vmap_gives_the_loop_engines_numbers_where_one_side_is_empty(case: str, shape: str) -> None:
    found = outcome(case, "momentum", shape, torch.float64, engine="vmap")
    must_agree(found, on_loop(case, "momentum", shape, torch.float64), 1e-12)


def test_auto_gives_the_loop_engines_numbers() -> None:
    """The choice does not depend on the method, so one method is enough."""
    found = outcome("sfl_v1", "momentum", "two-part", torch.float64, engine="auto")
    must_agree(found, on_loop("sfl_v1", "momentum", "two-part", torch.float64), 1e-12)


def must_agree(found: Outcome, expected: Outcome, tol: float) -> None:
    lower, upper, memory, report = found.values
    lower_too, upper_too, memory_too, report_too = expected.values
    agree((lower, upper, report), (lower_too, upper_too, report_too), tol)
    if tol < 1e-8:  # a memory of differences between models has too few digits in single precision
        agree(memory, memory_too, tol)
    assert found.ledger.totals == expected.ledger.totals
    assert found.ledger.per_client == expected.ledger.per_client
    assert found.ledger.trips == expected.ledger.trips


def trained_with(name: str, engine: str, seed: int = SEED, cut: int = 3) -> dict[str, Tensor]:
    """The parameters of a network with random layers below and above the cut."""
    opt = optim.sgd(0.01, momentum=0.9)
    method = methods.build(name, Split(random_layers(), cut), opt, opt, **TOLD.get(name, {}))
    return trained(method, engine=engine, seed=seed)


@pytest.mark.parametrize("name", GENERAL)
def test_random_layers_draw_the_same_on_vmap(name: str, caplog: pytest.LogCaptureFixture) -> None:
    agree(trained_with(name, "vmap"), trained_with(name, "loop"), 1e-12)
    assert not caplog.records


@pytest.mark.parametrize("name", GENERAL)
def test_random_layers_are_a_function_of_the_seed(name: str) -> None:
    torch.manual_seed(0)
    first = trained_with(name, "loop")
    torch.manual_seed(1)  # torch's own generator plays no part
    agree(trained_with(name, "loop"), first, 0)
    assert distance(trained_with(name, "loop", seed=SEED + 1), first) > 1e-3
