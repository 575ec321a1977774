"""Specifies the guard: what is out of all proportion is dropped before an average, and honest rounds do not change."""

import logging
import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attackers import Change, far, filled, in_simulation, over_the_wire
from conftest import SEED, agree, clients_of, images, run, simulation
from in_process import deployment
from test_engines_agree import CASES, ONE_OF_EACH, OPTIMISERS, net_of, plain
from test_faults import READERS
from test_grpc import CLIENTS, everybody, keys, opened
from test_remote import method_of
from two_servers import trained_apart

import cutlayer as cl
from cutlayer import methods
from cutlayer.core import tree
from cutlayer.core.guard import AllDropped, Guard, Update
from cutlayer.core.state import State
from cutlayer.core.sums import norms
from cutlayer.core.values import Block, PerClient
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.errors import DivergedError
from cutlayer.remote.device import client
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.monitor.prometheus import Metrics
from cutlayer.remote.monitor.status import Board
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

BAD = 1
HUGE = {"nan": filled(torch.nan), "infinite": filled(torch.inf), "3e38": filled(3e38), "1e30": filled(1e30)}
FAR = {"far": far(1e4)}  # whose norm is finite, so only the others tell
ENGINES = ("loop", "vmap", "graph")
keys = keys  # the fixture


def simulated(case: str, engine: str = "loop", dtype: torch.dtype = torch.float32, **options: Any) -> Simulation:
    name, given, batching = CASES[case]
    opt = OPTIMISERS["momentum"]
    method = methods.build(name, Split(net_of(case, dtype), 1), opt, opt, **given)
    on = {"engine": "loop" if engine == "graph" else engine}
    sim = simulation(method, images(dtype=dtype), clients_of(), batching=batching, **on, **options)
    if engine == "graph":
        sim.backend.engine = Graph(Again(torch.device("cpu")), 5)
    return sim


def largest(state: State) -> float:
    """The largest number of both halves; infinite if one of them is not finite."""
    values = [a for a in tree.tensors(plain((state.client, state.server))) if a.is_floating_point()]
    return max(float(a.nan_to_num(nan=torch.inf).abs().max()) for a in values)


def two_rounds(sim: Simulation) -> tuple[Any, State]:
    state = run(sim)
    return plain((state.client, state.server, state.memory, state.report)), state


# -- attacks in simulation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "attack"),
    [
        *((case, attack) for case in ("fedavg", "sfl_v1") for attack in (*HUGE, *FAR)),
        *(("hosfl", attack) for attack in ("3e38", "1e30", "far")),  # it leaves out itself what is not finite
    ],
)
def test_a_client_with_a_huge_update_is_as_one_that_did_not_answer(
    case: str, attack: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = (HUGE | FAR)[attack]
    with pytest.MonkeyPatch.context() as patch:
        in_simulation(patch, BAD, None)
        without, _ = two_rounds(simulated(case, engine))
    in_simulation(monkeypatch, BAD, change)
    sim = simulated(case, engine)
    found, _ = two_rounds(sim)
    agree(found, without, 0.0)
    assert set(sim.dropped) == {BAD}


@pytest.mark.parametrize("case", ONE_OF_EACH.values())
def test_no_method_commits_an_overflow(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_simulation(monkeypatch, BAD, filled(3e38))
    sim = simulated(case)
    _, state = two_rounds(sim)
    assert largest(state) < 1e3
    assert set(sim.dropped) == {BAD}


@pytest.mark.parametrize("number", [3e38, 1e30])
def test_without_the_guard_the_attack_succeeds(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    in_simulation(monkeypatch, BAD, filled(number))
    _, state = two_rounds(simulated("fedavg", guard=False))
    assert not max(float(a.abs().max()) for a in state.client.tree.params.values()) < 1e20


@pytest.mark.parametrize("number", [3e38, 1e30])
def test_the_accuracy_of_an_attacked_run_is_that_of_one_without_the_attacker(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = cl.load("digits")
    data, test = digits.train, digits.test
    net = cl.models.build("mlp", in_features=64, num_classes=10, hidden=(16,))
    given: Any = {"rounds": 6, "test": test, "batching": cl.Batching(size=32), "engine": "loop", "eval_every": 6}
    opt = cl.sgd(0.2, momentum=0.9)

    def accuracy(**more: Any) -> float:
        method = cl.sfl_v1(model=cl.Split(net, 1), client_opt=opt, server_opt=opt)
        last = cl.train(method, data, cl.iid(len(data), 4, key=0), **given, **more).history[-1]
        return float(last["test_accuracy"])

    honest = accuracy()
    in_simulation(monkeypatch, BAD, filled(number))
    assert accuracy() > honest - 0.03 > 0.85
    with pytest.raises(DivergedError):
        accuracy(guard=False)


def test_the_upper_half_of_a_client_is_checked_where_it_lies() -> None:
    """What comes across the cut may blow up its server-side copy although its own layers look honest."""
    sim = simulated("sfl_v1")
    honest = sim.method.server_opt.step

    class Blown(type(sim.method.server_opt)):  # type: ignore[misc]
        def step(self, part: Any, grads: Any) -> Any:
            stepped = honest(part, grads)
            blown = int(part.count) == 4  # only the two longest clients take a fifth step
            return stepped._replace(params={k: p + 1e3 * blown for k, p in stepped.params.items()})

    object.__setattr__(sim.method, "server_opt", Blown(**vars(sim.method.server_opt)))
    state = run(sim, 1)
    assert set(sim.dropped) == {1, 3}
    assert max(float(a.abs().max()) for a in state.server.tree.params.values()) < 10


# -- what is dropped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "kept"),
    [
        ([1.0, 1.0, 100.0], (1, 1, 1)),
        ([1.0, 1.0, 100.1], (1, 1, 0)),
        ([1.0, 1e9], (1, 1)),  # the median of two says nothing ...
        ([1.0, torch.inf], (1, 0)),  # ... but what is not finite is dropped
        ([torch.nan], (0,)),
        ([torch.inf], (0,)),
        ([torch.inf, torch.inf], (1, 1)),  # no client's doing: the run diverges
        ([torch.nan, torch.nan], (0, 0)),
        ([0.0, 0.0, 1.0, 1e9], (1, 1, 1, 1)),  # clients that stopped say nothing, and two are left
        ([0.0, 1.0, 1.0, 1.0, 101.0], (1, 1, 1, 1, 0)),
        ([1.0, 2.0, 1e9, 1e9], (1, 1, 0, 0)),
    ],
)
def test_an_update_may_be_100_times_the_median(updates: list[float], kept: tuple[int, ...]) -> None:
    guard = Guard()
    assert guard.judged("models", {j: Update(norm) for j, norm in enumerate(updates)}) == kept
    assert set(guard.dropped) == {j for j, ok in enumerate(kept) if not ok}


def test_clients_that_come_one_by_one_are_compared_with_those_before() -> None:
    guard = Guard()
    verdicts = [guard.judged("models", {j: Update(norm)}) for j, norm in enumerate([1.0, 500.0, 2.0, 500.0, 3.0])]
    assert verdicts == [(1,), (1,), (1,), (0,), (1,)]


def test_an_update_may_be_one_per_cent_of_what_it_changes() -> None:
    """Where most clients hardly move any more, one that still learns is not out of proportion."""
    for norm, kept in ((0.99, 1), (1.01, 0)):
        updates = {0: Update(1e-4, 100.0), 1: Update(1e-4, 100.0), 2: Update(norm, 100.0)}
        assert Guard().judged("models", updates) == (1, 1, kept)


def test_a_norm_that_overflows_single_precision_is_not_finite_in_double_precision_either() -> None:
    values = {0: 1e30, 1: torch.inf, 2: -torch.inf, 3: torch.nan, 4: 1e10}
    rows = [Block((j,), {"w": torch.full((4,), v).double()}, stacked=False) for j, v in values.items()]
    found = norms(PerClient("fed", rows), None).tolist()
    assert found[0] == torch.inf and all(math.isnan(norm) for norm in found[1:4])
    assert found[4] == pytest.approx(2e10)


def test_the_norm_of_a_change_is_the_same_in_every_layout() -> None:
    start, own = torch.randn(5), torch.randn(3, 5)
    one = Block((0, 1, 2), {"w": start, "n": torch.tensor(7)}, stacked=False)
    stack = Block((0, 1, 2), {"w": own, "n": torch.tensor([1, 2, 3])}, stacked=True)
    each = [Block((j,), {"w": own[j], "n": torch.tensor(j)}, stacked=False) for j in (2, 0, 1)]
    expected = (own - start).norm(dim=1)
    before = PerClient("fed", [one])
    agree(norms(PerClient("fed", [stack]), before), expected, 1e-6)
    agree(norms(PerClient("fed", each, (0, 1, 2)), before), expected, 1e-6)
    agree(norms(PerClient("fed", [one]), None), start.norm().expand(3), 1e-6)
    agree(norms(before, PerClient("fed", [stack])), expected, 1e-6)


def test_if_nobody_is_left_the_run_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    in_simulation(monkeypatch, 0, filled(torch.nan))
    sim = simulation(simulated("fedavg").method, images(20, torch.float32), clients_of((20,)))
    with pytest.raises(AllDropped, match="the update of client 0 is not finite"):
        run(sim)


# -- honest rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_an_honest_round_has_the_same_bits_with_and_without_the_guard(case: str) -> None:
    on, off = simulated(case), simulated(case, guard=False)
    agree(two_rounds(on)[0], two_rounds(off)[0], 0.0)
    assert on.ledger.content() == off.ledger.content()
    assert not on.dropped


@pytest.mark.parametrize("case", ["fedavg", "sfl_v1", "sfl_v1 step", "smofi", "sfl_v2", "hasfl", "mergesfl"])
def test_the_host_waits_for_each_half_once_a_round(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim, reads = simulated(case, "vmap"), []
    state = sim.start()
    for name in READERS:
        honest = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, *args: Any, honest: Any = honest, name: str = name, **kwargs: Any) -> Any:
            reads.append(name)
            return honest(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noted)
    sim.round(state)
    assert reads == ["tolist"] * len(reads) and len(reads) <= 2


# -- what is told ------------------------------------------------------------------------------------------------------


def test_the_warning_names_the_client_and_the_record_counts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_simulation(monkeypatch, BAD, far(1e4), most=1)
    given: Any = {"rounds": 2, "batching": CASES["fedavg"].batching, "engine": "loop"}
    history = cl.train(simulated("fedavg").method, images(dtype=torch.float32), clients_of(), **given).history
    assert [record.get("guarded") for record in history] == [1, None]
    (said,) = (r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert said.startswith("round 1: the update of client 1 has the norm ")
    assert "more than 100 times the median of the round" in said


def test_prometheus_counts_what_the_guard_dropped() -> None:
    board = Board(name="run", method="fedavg", rounds=3)
    for record in ({"loss": 1.0, "guarded": 2}, {"loss": 1.0}, {"loss": 1.0, "guarded": 1}):
        board.round_ended(record)
    metrics = Metrics.__new__(Metrics)
    metrics._board = board
    found = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert found["cutlayer_guarded_total"] == 3


# -- over the wire -----------------------------------------------------------------------------------------------------


def served(case: str, **options: Any) -> Any:
    return deployment(method_of(case), images(), clients_of(), batching=CASES[case].batching, seed=SEED, **options)


@pytest.mark.parametrize(
    ("case", "attack"),
    [
        *((case, attack) for case in ("fedavg", "sfl_v1", "hosfl") for attack in ("1e300", "1e30", "far")),
        *(("sl", attack) for attack in ("1e300", "1e30")),  # its first turns have nothing to be compared with
    ],
)
def test_a_device_with_a_huge_update_is_dropped(case: str, attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change: Change = {"1e300": filled(1e300), "1e30": filled(1e30), "far": far(1e4)}[attack]
    over_the_wire(monkeypatch, BAD, change)
    there = served(case)
    state = run(there)
    assert largest(state) < 1e3
    assert set(there.dropped) == {BAD}


@pytest.fixture
def dead_ends() -> Iterator[list[threading.Thread]]:
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_device_with_a_huge_update_is_dropped_over_grpc(
    keys: Path, monkeypatch: pytest.MonkeyPatch, dead_ends: list[threading.Thread]
) -> None:
    from device_pool import case_device

    over_the_wire(monkeypatch, BAD, filled(1e30))
    with opened("sfl_v1", "two-part", keys, Board(name="", method="", rounds=2), everybody) as (there, address):
        for k in range(CLIENTS):
            name = f"client-{k + 1}"
            options = client.JoinOptions(
                address=address,
                name=name,
                credentials=Credentials.load(keys / "clients" / name),
                plugins={},
                ready=partial(case_device, None),
                gives_up_after=60.0,
            )
            dead_ends.append(threading.Thread(target=client.stay, args=(options,), daemon=True))
            dead_ends[-1].start()
        state = run(there)
    assert set(there.dropped) == {BAD}
    assert largest(state) < 1e3


@pytest.mark.parametrize("case", ["sfl_v1", "fedavg", "hosfl"])
def test_two_servers_drop_the_same_client(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = {"batching": CASES[case].batching, "seed": SEED}
    over_the_wire(monkeypatch, BAD, filled(1e30))
    there = served(case)
    expected = run(there)
    found = trained_apart(lambda: method_of(case), images(), clients_of(), **given)
    dropped = {name: dict(own.dropped) for name, own in found.deployments.items()}
    assert dropped["fed"] == there.dropped and set(dropped["train"]) == {BAD}
    assert dropped["train"][BAD] == "was dropped by the other server"
    agree(here(found.train.server), tree.tensors(plain(expected.server)), 0.0)
    agree(here(found.fed.client), tree.tensors(plain(expected.client)), 0.0)


def here(value: Any) -> list[torch.Tensor]:
    return [a for a in tree.tensors(plain(value)) if not a.is_meta]
