"""Specifies HO-SFL's time: a round in closed form, and what passes ahead hide of it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hybrid_worlds import ENGINES, WIDTH, P, hosfl, smooth, take_turns, world

from cutlayer import optim
from cutlayer.planning.devices import Device, Devices, Lanes
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.stopping import Limits
from cutlayer.runs.training import Training

BELOW, ABOVE = 2 * 64 * 3, 2 * 3 * 10  # forward FLOPs of a sample
INSTANT = 1e30
THREE = (
    Device(flops=2.1e3, up=3.1e2, down=9.7e2, fed_up=1.9e2, fed_down=5.3e2),
    Device(flops=9.3e3, up=1.1e2, down=4.1e2, fed_up=2.7e2, fed_down=2.3e2),
    Device(flops=5.7e3, up=7.9e2, down=1.3e2, fed_up=4.3e2, fed_down=3.7e2),
)
SERVER = 4.9e3
SIZES = (8, 8, 3)
BATCH = (4, 4, 3)
TURNS = ((0, 1, 2), (0, 2), (0,), (0, 1, 2))
MISSED = ({}, {0: 0, 2: 0}, {0: 0}, {0: 0, 1: 2, 2: 1})  # nothing is missed by a newcomer: it downloads, for free


def timed(clients: Sequence[Device], sizes: Sequence[int], lanes: Lanes = "parallel", **options: Any) -> Simulation:
    given = Devices(clients=tuple(clients), server=options.pop("server", SERVER), lanes=lanes)
    engine = options.pop("engine", "loop")
    return world(hosfl(smooth(torch.float32), **options), sizes, devices=given, engine=engine)


def seconds(turn: tuple[int, ...], missed: dict[int, int], overlap: int, lanes: Lanes) -> float:
    """A round: synchronise, forward, up, server, down, the other passes; then slopes up, their mean, and down."""
    there, ahead = {}, {}
    for j in turn:
        d, b = THREE[j], BATCH[j]
        heard = 64 * P / d.rate("down", "fed")  # the seeds
        caught_up = heard + 128 * P * missed[j] / d.rate("down", "fed") if missed.get(j) else 0.0
        forward = caught_up + b * BELOW / d.flops
        ahead[j] = max(forward, heard if overlap else 0.0) + overlap * b * BELOW / d.flops
        there[j] = forward + 32 * b * WIDTH / d.up
    work = {j: 3 * BATCH[j] * ABOVE / SERVER for j in turn}
    shared = max(there.values()) + sum(work.values())
    told = []
    for j in turn:
        d, b = THREE[j], BATCH[j]
        served = shared if lanes == "shared" else there[j] + work[j]
        gradient = served + 32 * b * WIDTH / d.down
        slopes = max(gradient, ahead[j]) + (P - overlap) * b * BELOW / d.flops
        told.append(slopes + 64 * P / d.rate("up", "fed"))
    return max(told) + max(64 * P / THREE[j].rate("down", "fed") for j in turn)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lanes", ("parallel", "shared"))
@pytest.mark.parametrize("overlap", range(P + 1))
def test_a_round_takes_its_parts(overlap: int, lanes: Lanes, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch, *TURNS)
    sim = timed(THREE, SIZES, lanes, overlap=overlap, engine=engine, opt=optim.adamw(1e-3))
    assert sim.clock is not None
    state, total = sim.start(), 0.0
    for turn, missed in zip(TURNS, MISSED, strict=True):
        state = sim.round(state)
        total += seconds(turn, missed, overlap, lanes)
        assert sim.clock.now == pytest.approx(total, rel=1e-9)
        assert sim.clock.spent.aggregation == 0.0  # no model is ever under way


# One client whose pass takes 1 s; activations go up in 2 s, the server takes 3 s, and the gradient is down in 1 s.
ALONE = Device(flops=4 * BELOW, up=32 * 4 * WIDTH / 2, down=32 * 4 * WIDTH, fed_up=INSTANT, fed_down=INSTANT)
LONG_WAIT = {0: 12.0, 1: 11.0, 2: 10.0, 3: 9.0, 4: 8.0, 5: 7.0}  # 1 + 6 + (5 - k)
# The server and the links twice as fast: 3 s to wait, so that more than three passes ahead hide nothing more.
SHORT_WAIT = {0: 9.0, 1: 8.0, 2: 7.0, 3: 6.0, 4: 6.0, 5: 6.0}
FASTER = ALONE._replace(up=2 * ALONE.up, down=2 * ALONE.down)


@pytest.mark.parametrize("overlap", range(6))
def test_passes_ahead_hide_what_fits_into_the_wait(overlap: int) -> None:
    for device, server, golden in (
        (ALONE, 4 * ABOVE, LONG_WAIT),
        (FASTER, 8 * ABOVE, SHORT_WAIT),
    ):
        sim = timed((device,), (8,), server=server, perturbations=5, overlap=overlap)
        assert sim.clock is not None
        sim.round(sim.start())
        assert sim.clock.now == pytest.approx(golden[overlap], rel=1e-9)


@pytest.mark.parametrize("overlap", (0, 2, P))
def test_passes_ahead_cost_no_extra_work(overlap: int) -> None:
    """P + 1 forward passes of each client, whenever they run."""
    training = Training(runner=timed(THREE, SIZES, overlap=overlap), limits=Limits(rounds=2))
    records = [training.round(), training.round()]
    assert [r["client_flops"] for r in records] == [n * (P + 1) * sum(BATCH) * BELOW for n in (1, 2)]
    assert {r["extra_cut_tensors"] for r in records} == {overlap}
