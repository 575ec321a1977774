"""Specifies HASFL's time: a round takes what the planner's equations say, and the shared server and links behave."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import clients_of, images, run, simulation
from torch import nn

from cutlayer import methods, models, optim
from cutlayer.core.batches import Batching
from cutlayer.meters.clock import Spent
from cutlayer.methods.hasfl import Hasfl
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.problem import Bound, Costs, Fleet, Latency, Problem
from cutlayer.planning.profile import profile
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.training import Training
from cutlayer.split import Split

ENGINES = ("loop", "vmap")
OPT = optim.sgd(0.1, momentum=0.9)
THREE = (
    Device(flops=2.1e5, up=3.1e4, down=9.7e4, fed_up=1.9e4, fed_down=5.3e4),
    Device(flops=9.3e5, up=1.1e4, down=4.1e4, fed_up=2.7e4, fed_down=2.3e4),
    Device(flops=5.7e5, up=7.9e4, down=1.3e4, fed_up=4.3e4, fed_down=3.7e4),
)
HELD = (9, 14, 11)
INTERVAL, ROUNDS = 3, 2


def small() -> nn.Module:
    """Four units: two convolutions with pooling, and two linear layers."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return models.build("cnn", width=2)


def devices(clients: Sequence[Device] = THREE, **options: Any) -> Devices:
    given = {"server": 4.9e6, "lanes": "shared", "server_up": 6.1e4, "server_down": 8.3e4, "model_sync": True}
    return Devices(clients=tuple(clients), **{**given, **options})


def hasfl(cuts: Any, batches: Any, interval: int = INTERVAL, cut: int | None = None, **options: Any) -> Hasfl:
    """The model's own cut is the deepest, so that the first round moves no layer."""
    split = Split(small(), max(cuts) if cut is None else cut)
    return methods.hasfl(
        model=split, client_opt=OPT, server_opt=OPT, interval=interval, batches=batches, cuts=cuts, **options
    )


def timed(method: Any, given: Devices, **options: Any) -> Simulation:
    data = images(sum(HELD), torch.float32)
    return simulation(method, data, clients_of(HELD), devices=given, **options)


def latency(given: Devices, batches: Sequence[int], cuts: Sequence[int]) -> Latency:
    table = Costs.of(profile(small(), (1, 8, 8)))
    none = np.zeros(4)
    bound = Bound(beta=1.0, lr=1.0, noise=none, slope=none, gap=1.0)
    return Problem(costs=table, fleet=Fleet.of(given), bound=bound).latency(batches, cuts)


def close(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


PLANS = {
    "unequal": ((4, 7, 2), (1, 3, 2)),
    "equal cuts": ((4, 7, 2), (2, 2, 2)),
    "the fastest the deepest": ((3, 3, 3), (1, 4, 1)),
    "single samples": ((1, 1, 1), (3, 1, 4)),
    "a large batch": ((9, 2, 1), (1, 1, 2)),
}
LINKS = {
    "as they are": devices(),
    "slow servers": devices(server_up=1.3e3, server_down=2.9e3),
    "a slow server": devices(server=3.7e5),
    "one rate to both servers": devices([Device(d.flops, d.up, d.down) for d in THREE]),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_round_takes_its_steps_and_one_aggregation(plan: str, links: str, engine: str) -> None:
    """I T_S + T_A of equations 38 and 39."""
    (batches, cuts), given = PLANS[plan], LINKS[links]
    expected = latency(given, batches, cuts)
    sim = timed(hasfl(cuts, batches), given, engine=engine)
    state = sim.start()
    for number in range(1, ROUNDS + 1):
        state = sim.round(state)
        assert sim.clock.now == close(number * (INTERVAL * expected.split + expected.aggregation))
        assert sim.clock.spent == (
            close(INTERVAL * expected.split),
            close(expected.aggregation),
            expected.straggler,
        )
    assert sim.backend.engine.name == engine


def test_the_plans_tell_the_terms_apart() -> None:
    """Each term decides somewhere: both ways of a step, of an aggregation, and between the servers."""
    found = [latency(LINKS[links], *PLANS[plan]) for plan in PLANS for links in LINKS]
    there = {int((f.forward + f.up).argmax()) for f in found}
    back = {int((f.down + f.backward).argmax()) for f in found}
    assert len(there) > 1 and len(back) > 1 and len({f.straggler for f in found}) > 1
    assert {f.servers_up > f.model_up.max() for f in found} == {True, False}
    assert {f.servers_down > f.model_down.max() for f in found} == {True, False}


@pytest.mark.parametrize("interval", (1, 5))
def test_a_longer_interval_shares_one_aggregation(interval: int) -> None:
    batches, cuts = PLANS["unequal"]
    expected = latency(devices(), batches, cuts)
    sim = timed(hasfl(cuts, batches, interval), devices())
    run(sim, 1)
    assert sim.clock.now == close(interval * expected.split + expected.aggregation)


def test_models_that_travel_for_free_leave_no_aggregation() -> None:
    batches, cuts = PLANS["unequal"]
    given = devices(model_sync=False)
    expected = latency(given, batches, cuts)
    sim = timed(hasfl(cuts, batches), given)
    run(sim, 1)
    assert sim.clock.spent == (close(INTERVAL * expected.split), 0.0, expected.straggler)
    assert sim.clock.now == close(INTERVAL * expected.split)


def test_a_lane_for_each_client_takes_the_slowest_of_each_way() -> None:
    """Without sharing, the server's work on one client's batch holds nobody else up but at the end of a step."""
    batches, cuts = PLANS["unequal"]
    given = devices(lanes="parallel")
    seconds, table = latency(given, batches, cuts), Costs.of(profile(small(), (1, 8, 8)))
    lanes = np.array(batches) * table.above[np.array(cuts) - 1] / given.server
    sim = timed(hasfl(cuts, batches), given)
    run(sim, 1)
    step = (seconds.own + lanes).max()
    assert sim.clock.now == close(INTERVAL * step + seconds.aggregation)
    assert INTERVAL * step + seconds.aggregation < INTERVAL * seconds.split + seconds.aggregation


def test_layers_that_change_servers_take_their_time_first() -> None:
    """From the training server to the fed server, before the round's own models go down."""
    batches, cuts = PLANS["unequal"]
    expected, given = latency(devices(), batches, cuts), devices()
    sim = timed(hasfl(cuts, batches, cut=1), given)
    table = Costs.of(profile(small(), (1, 8, 8)))
    late = (table.model[2] - table.model[0]) / given.server_up
    state = sim.round(sim.start())
    assert sim.clock.now == close(late + INTERVAL * expected.split + expected.aggregation)
    before = sim.clock.now
    sim.round(state)
    assert sim.clock.now - before == close(INTERVAL * expected.split + expected.aggregation)


def test_a_history_tells_each_rounds_seconds_and_its_straggler() -> None:
    batches, cuts = PLANS["unequal"]
    expected = latency(devices(), batches, cuts)
    training = Training(runner=timed(hasfl(cuts, batches), devices()))
    for number in (1, 2):
        record = training.round()
        assert record["simulated_seconds"] == close(number * (INTERVAL * expected.split + expected.aggregation))
        assert record["training_seconds"] == close(INTERVAL * expected.split)
        assert record["aggregation_seconds"] == close(expected.aggregation)
        assert record["straggler"] == training.runner.job.partition.names[expected.straggler]
        assert record["plan"] == {
            "batches": {0: 4, 1: 7, 2: 2},
            "cuts": {0: 1, 1: 3, 2: 2},
            "notes": (),
        }
        written = '{"batches": {"0": 4, "1": 7, "2": 2}, "cuts": {"0": 1, "1": 3, "2": 2}, "notes": []}'
        assert f'"plan": {written}' in json.dumps(record)
        assert "bound" not in record  # nothing is estimated for a plan that is fixed


def test_only_those_of_the_round_make_it_slow() -> None:
    batches, cuts = PLANS["equal cuts"]
    sim = timed(hasfl(cuts, batches), devices(), per_round=2)
    state = sim.round(sim.start())
    ids = sorted(state.memory.plan.cuts)
    assert len(ids) == 2
    given = devices([THREE[j] for j in ids])
    expected = latency(given, [batches[j] for j in ids], [cuts[j] for j in ids])
    assert sim.clock.now == close(INTERVAL * expected.split + expected.aggregation)
    assert sim.clock.spent.straggler == ids[expected.straggler]


def test_time_goes_on_from_where_it_was() -> None:
    batches, cuts = PLANS["unequal"]
    whole, first, second = (timed(hasfl(cuts, batches), devices()) for _ in range(3))
    run(whole, 2)
    state = first.round(first.start())
    second.clock.restore(first.clock.content())
    second.round(state)
    assert second.clock.content() == whole.clock.content()
    assert second.clock.spent == whole.clock.spent


# -- the shared server and the other methods ---------------------------------------------------------------------------

STEP = Batching(size=4, steps=1)
BATCH = 4


def terms(cut: int, given: Devices) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds of a batch of each client: until it is at the server, back, and at the server."""
    table = Costs.of(profile(small(), (1, 8, 8)))
    fleet, j = Fleet.of(given), cut - 1
    there = BATCH * (table.forward[j] / fleet.flops + table.up[j] / fleet.up)
    back = BATCH * (table.down[j] / fleet.down + table.backward[j] / fleet.flops)
    return there, back, BATCH * table.above[j] / given.server


@pytest.mark.parametrize("cut", (1, 3))
def test_a_server_that_all_share_starts_with_the_last_batch_and_adds_them_up(cut: int) -> None:
    """SFL-V1 on lanes of its own takes the slowest client's way; on a shared server the slowest of both ways."""
    method = methods.sfl_v1(model=Split(small(), cut), client_opt=OPT, server_opt=OPT)
    found = {}
    for lanes in ("parallel", "shared"):
        given = devices(lanes=lanes, model_sync=False)
        sim = timed(method, given, batching=STEP)
        run(sim, 1)
        found[lanes] = sim.clock.now
    there, back, server = terms(cut, devices())
    assert found["parallel"] == close((there + server + back).max())
    assert found["shared"] == close(there.max() + 3 * server + back.max())


@pytest.mark.parametrize("name", ("sfl_v1", "sfl_v2", "mergesfl", "smofi"))
def test_other_methods_aggregate_in_the_time_their_models_are_under_way(name: str) -> None:
    """On equal devices everybody's models leave and arrive at once."""
    given = devices((THREE[0],) * 3, lanes="parallel")
    free, paid = (timed(methods.build(name, Split(small(), 2), OPT, OPT), d, batching=STEP) for d in (
        replace(given, model_sync=False), given
    ))  # fmt: skip
    run(free, 1)
    run(paid, 1)
    model = Costs.of(profile(small(), (1, 8, 8))).model[1]
    aggregation = model / 1.9e4 + model / 5.3e4  # at the rates of the fed server
    assert paid.clock.spent[:2] == (close(free.clock.now), close(aggregation))


@pytest.mark.parametrize("name", ("sfl_v1", "sfl_v2", "mergesfl", "smofi", "sl", "fedavg"))
def test_other_methods_tell_training_and_aggregation_apart_too(name: str) -> None:
    given = devices(lanes="parallel")
    sim = timed(methods.build(name, Split(small(), 2), OPT, OPT), given)
    run(sim, 1)
    training, aggregation, straggler = sim.clock.spent
    assert training > 0 and aggregation > 0 and training + aggregation == close(sim.clock.now)
    assert straggler in range(3)
    free = timed(methods.build(name, Split(small(), 2), OPT, OPT), replace(given, model_sync=False))
    run(free, 1)
    assert free.clock.spent[1] == 0 and free.clock.spent[0] == close(free.clock.now)


def test_before_a_round_nothing_was_spent() -> None:
    assert timed(hasfl((1, 1, 1), (2, 2, 2)), devices()).clock.spent == Spent(0.0, 0.0, None)
