"""Specifies how HO-SFL's clients catch up: by replaying the log or by one download, to the same bits as the others."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import agree, images
from hybrid_worlds import (
    ENGINES,
    EQUAL,
    NUM_LOWER,
    PLAIN,
    P,
    flat,
    hosfl,
    kept,
    same,
    seeds_of,
    smooth,
    states,
    take_turns,
    world,
)
from stopping import SMALL, outcome, stopped, unbroken

from cutlayer import optim
from cutlayer.core import directions, tree
from cutlayer.core.batches import Batching
from cutlayer.core.state import Part, State
from cutlayer.core.values import Block, PerClient, shared
from cutlayer.data.arrays import Arrays
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.methods.hosfl import PART
from cutlayer.optim.schedules import cosine, exponential, warmup
from cutlayer.pieces.hybrid import History
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation

OPTIMISERS = {
    "sgd": PLAIN,
    "a schedule": optim.sgd(exponential(0.1, 0.5)),
    "momentum": optim.sgd(0.1, momentum=0.9),
    "nesterov, decay and a schedule": optim.sgd(exponential(0.1, 0.9), momentum=0.9, nesterov=True, weight_decay=5e-4),
    "clipped": optim.sgd(0.1, momentum=0.9, clip=0.05),
    "adam": optim.adam(0.01, weight_decay=1e-3),
    "adamw": optim.adamw(1e-2, weight_decay=5e-4),
    "adamw and a schedule": optim.adamw(warmup(cosine(1e-2, rounds=9), rounds=3), weight_decay=0.1),
}
DTYPES = (torch.float32, torch.float64)

# Client 0 is always there; 1 sleeps for five rounds, 2 for one and three; 3 comes last and 4 never.
TURNS = ((0, 1, 2), (0,), (0, 2), (0,), (0,), (0,), (0, 1, 2), (0, 3), (0, 1, 2, 3))


# -- who sleeps and who does not ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_an_absent_client_replays_to_the_bits_of_those_who_stayed(
    name: str, engine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are also those of the fed server, which follows every round, and of clients that join late."""
    take_turns(monkeypatch, *TURNS)
    sim = world(hosfl(smooth(dtype), OPTIMISERS[name]), engine=engine)
    start = state = sim.start()
    for number, turn in enumerate(TURNS, start=1):
        state = sim.round(state)
        for j in turn:
            assert kept(sim, j).version == kept(sim, j).value.count == number
            assert same(kept(sim, j).value, state.client.tree)
    assert sim.backend.engine is not None and sim.backend.engine.name == engine
    assert float((flat(state.client.tree.params) - flat(start.client.tree.params)).abs().min()) > 0
    assert 4 not in sim.backend.memory.of(PART)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_is_the_same_whether_its_clients_slept_or_downloaded(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of one round forces a download where the other run replays."""
    take_turns(monkeypatch, *TURNS)
    replayed, downloaded = (
        states(world(hosfl(opt=OPTIMISERS["adamw"], max_history=num), engine=engine), len(TURNS))[-1]
        for num in (10_000, 1)
    )
    assert same(replayed.client.tree, downloaded.client.tree) and same(replayed.server.tree, downloaded.server.tree)


def test_clients_that_are_as_far_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch, *TURNS)
    sim = world(hosfl(opt=OPTIMISERS["adamw"]))
    states(sim, len(TURNS))
    assert kept(sim, 0).value is kept(sim, 1).value is kept(sim, 2).value is kept(sim, 3).value


def sleepers(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[int, Part], State]:
    """A method, parts of rounds 1 and 3 as clients kept them, and the state after 9 rounds, log and all."""
    take_turns(monkeypatch, (0, 1, 2), (0,), (0, 2), *[(0,)] * 6)
    method = hosfl(smooth(dtype), OPTIMISERS[name])
    sim = world(method)
    state = states(sim, 9)[-1]
    return method, {j: kept(sim, j).value for j in (1, 2)}, state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_both_engines_replay_a_log_to_the_same_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, parts, state = sleepers(name, dtype, monkeypatch)
    log = state.memory.log.tree
    assert (state.memory.oldest, len(log.seeds)) == (1, 8)
    behind = PerClient("clients", [Block((j,), part, stacked=False) for j, part in parts.items()])
    missed = PerClient("clients", [Block((j,), log.since(part.count - 1), stacked=False) for j, part in parts.items()])
    for engine in (Loop(), Vmap()):
        made = PerClient("clients", engine.call(method.client.catch_up, (behind, missed), (1, 2)))
        assert all(same(made.at(j), state.client.tree) for j in (1, 2))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_stacked_unequal_parts_replay_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping aside: a norm over stacked parts may be summed in another order."""
    method, parts, state = sleepers(name, torch.float32, monkeypatch)
    one = parts[1]
    other = one._replace(params={k: 1.5 * v for k, v in one.params.items()})
    both = Block((0, 1), tree.map(lambda a, b: torch.stack((a, b)), one, other), stacked=True)
    missed = shared("clients", (0, 1), state.memory.log.tree)
    (made,) = Vmap().call(method.client.catch_up, (PerClient("clients", [both]), missed), (0, 1))
    alone = [method.client.catch_up(part, state.memory.log.tree) for part in (one, other)]
    assert same(alone[0], state.client.tree)
    for j, part in enumerate(alone):
        if name == "clipped":
            agree(flat(made.row(j).params), flat(part.params), 1e-6)
        else:
            assert same(made.row(j), part)


def test_a_replay_is_the_update_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Algorithm 3 with plain numbers: θ ← θ − η (1/Pμ) Σ v̄_p u_p, in order, each with its own round's η."""
    method, parts, state = sleepers("a schedule", torch.float64, monkeypatch)
    theta = flat(parts[1].params)
    log = state.memory.log.tree
    for number, (seeds, slopes) in enumerate(zip(log.seeds, log.slopes, strict=True), start=1):
        assert torch.equal(seeds, seeds_of(number))
        u = directions.normals(seeds[:, None], 0, NUM_LOWER)
        theta = theta - 0.1 * 0.5**number * (slopes @ u) / (P * method.smoothing)
    agree(theta, flat(state.client.tree.params))


# -- the log -----------------------------------------------------------------------------------------------------------


def test_the_log_reaches_back_to_the_client_that_is_furthest_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that never took part does not count."""
    take_turns(monkeypatch, *TURNS)
    sim = world(hosfl())
    found = states(sim, len(TURNS))
    # A client that took part last in round t is at version t; the log begins at the oldest of these.
    assert [s.memory.oldest for s in found] == [0, 1, 1, 1, 1, 1, 1, 7, 7, 9]
    for number, s in enumerate(found):
        log, oldest = s.memory.log.tree, s.memory.oldest
        assert log.seeds.shape == log.slopes.shape == (number - oldest, P)
        assert (log.seeds.dtype, log.slopes.dtype) == (torch.int64, torch.float64)
        for row, of_round in enumerate(range(oldest, number)):
            assert torch.equal(log.seeds[row], seeds_of(of_round))
        assert s.memory.seen == last_seen(number)
        assert sim.method.metrics(s) == {"extra_cut_tensors": 0, "history_rounds": number - oldest}  # type: ignore[attr-defined]


def last_seen(number: int) -> dict[int, int]:
    seen: dict[int, int] = {}
    for r, turn in enumerate(TURNS[:number], start=1):
        seen |= dict.fromkeys(turn, r)
    return seen


def downs(sim: Simulation, j: int) -> dict[str, int]:
    """Bytes down to a client so far, less what every step has."""
    return {k: v for k, v in sim.ledger.per_client[j].items() if k.startswith("down") and k != "down_gradients"}


def spent(sim: Simulation, state: State, j: int) -> tuple[State, dict[str, int]]:
    """One more round, and what it sent down to a client."""
    before = downs(sim, j)
    state = sim.round(state)
    return state, {k: v - before.get(k, 0) for k, v in downs(sim, j).items() if v != before.get(k, 0)}


VECTORS = {"sgd": 1, "momentum": 2, "adamw": 3}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VECTORS)
def test_a_client_absent_for_longer_than_the_log_downloads_once(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 d_c bytes, 8 with momentum, 12 with Adam, the round's number, and nothing of the log."""
    take_turns(monkeypatch, (0, 1), *[(0,)] * 4, (0, 1), (0,), (0, 1))
    sim = world(hosfl(smooth(torch.float32), OPTIMISERS[name], max_history=3), engine=engine)
    state = states(sim, 5)[-1]
    assert (state.memory.oldest, len(state.memory.log.tree.seeds)) == (2, 3)
    state, down = spent(sim, state, 1)
    assert down == {"down_setup": VECTORS[name] * 4 * NUM_LOWER, "down_settings": 8, "down_slopes": 16 * P}
    assert same(kept(sim, 1).value, kept(sim, 0).value) and same(kept(sim, 1).value, state.client.tree)
    state, down = spent(sim, sim.round(state), 1)  # from then on it replays again
    assert down == {"down_slopes": 16 * P + 16 * P}
    assert same(kept(sim, 1).value, state.client.tree)


@pytest.mark.parametrize(("away", "setup"), ((3, 0), (4, 4 * NUM_LOWER)))
def test_the_log_reaches_exactly_as_far_as_max_history(away: int, setup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch, (0, 1), *[(0,)] * away, (0, 1))
    sim = world(hosfl(smooth(torch.float32), max_history=3))
    state, down = spent(sim, states(sim, 1 + away)[-1], 1)
    assert down.get("down_setup", 0) == setup
    assert down["down_slopes"] == 16 * P + (0 if setup else 16 * P * away)
    assert same(kept(sim, 1).value, state.client.tree)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_lost_its_part_downloads_it(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_turns(monkeypatch, *[(0, 1, 2)] * 5)
    method = hosfl(smooth(torch.float32), OPTIMISERS["momentum"])
    sim, whole = world(method, engine=engine), world(method, engine=engine)
    state = states(sim, 3)[-1]
    del sim.backend.memory.of(PART)[1]
    state, down = spent(sim, state, 1)
    assert down == {"down_setup": 8 * NUM_LOWER, "down_settings": 8, "down_slopes": 16 * P}
    expected = states(whole, 4)[-1]
    assert same(state.client.tree, expected.client.tree) and same(kept(sim, 1).value, state.client.tree)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_is_ahead_of_a_restored_server_downloads(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client kept of the lost rounds is not used."""
    take_turns(monkeypatch, *[(0, 1, 2)] * 6)
    sim = world(hosfl(smooth(torch.float32), OPTIMISERS["adamw"]), engine=engine)
    found = states(sim, 6)
    assert kept(sim, 1).version == 6
    state, down = spent(sim, found[3], 1)
    assert down == {"down_setup": 12 * NUM_LOWER, "down_settings": 8, "down_slopes": 16 * P}
    assert same(state.client.tree, found[4].client.tree) and same(state.server.tree, found[4].server.tree)
    assert kept(sim, 1).version == 4 and same(kept(sim, 1).value, state.client.tree)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_ahead_of_a_restored_server_downloads_even_if_it_returns_later(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounds since then were others than those that the client has seen."""
    take_turns(monkeypatch, *[(0, 1, 2)] * 6)
    sim = world(hosfl(smooth(torch.float32), OPTIMISERS["adamw"]), engine=engine)
    state = states(sim, 6)[3]
    take_turns(monkeypatch, *[()] * 3, *[(0, 3)] * 5, (0, 1))
    for _ in range(5):
        state = sim.round(state)
    assert (kept(sim, 1).version, state.memory.oldest, state.round) == (6, 3, 8)
    state, down = spent(sim, state, 1)
    assert down == {"down_setup": 12 * NUM_LOWER, "down_settings": 8, "down_slopes": 16 * P}
    assert same(kept(sim, 1).value, state.client.tree)


# -- values that are not finite ----------------------------------------------------------------------------------------


def broken(*clients: int) -> Arrays:
    """Data of which these clients have no finite number."""
    data = images(sum(EQUAL))
    x = data.x.clone()
    for j in clients:
        x[8 * j : 8 * j + 8] = torch.nan
    return replace(data, x=x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("agg", ("uniform", "samples"))
def test_a_client_whose_slopes_are_not_finite_is_left_out(
    agg: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean is without it, but it receives the update like the others."""
    method = hosfl(opt=OPTIMISERS["adamw"], agg=agg)
    take_turns(monkeypatch, *[(0, 1, 2)] * 3)
    sim = world(method, data=broken(1), engine=engine)
    found = states(sim, 3)[-1]
    assert float(found.report.tree.stopped) == 1.0 and float(found.report.tree.batches) == 2.0
    assert same(kept(sim, 1).value, found.client.tree)
    take_turns(monkeypatch, *[(0, 2)] * 3)
    without = states(world(method, engine=engine), 3)[-1]
    agree(flat(found.client.tree.params), flat(without.client.tree.params), 1e-9)
    agree(flat(found.server.tree.params), flat(without.server.tree.params), 1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ("sgd", "nesterov, decay and a schedule", "adamw"))
def test_a_round_without_finite_clients_changes_nothing_and_replays_so(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(monkeypatch, (0, 1), (0,), (2, 3), (0,), (0, 1))
    sim = world(hosfl(opt=OPTIMISERS[name]), data=broken(2, 3), engine=engine)
    found = states(sim, 5)
    before, after = found[2], found[3]
    assert torch.equal(flat(before.client.tree.params), flat(after.client.tree.params))
    assert torch.equal(flat(before.server.tree.params), flat(after.server.tree.params))
    for kind in after.client.tree.moments:
        assert torch.equal(flat(before.client.tree.moments[kind]), flat(after.client.tree.moments[kind]))
    assert bool(after.memory.log.tree.slopes[-1].isnan().all())
    assert float(after.report.tree.stopped) == 2.0 and after.client.tree.count == 3
    assert not torch.equal(flat(found[4].client.tree.params), flat(after.client.tree.params))  # it goes on
    assert same(kept(sim, 1).value, found[5].client.tree) and same(kept(sim, 0).value, found[5].client.tree)


def test_choosing_an_engine_leaves_nothing_in_the_clients_memory() -> None:
    sim, plain = (world(hosfl(), engine=engine) for engine in ("vmap", "loop"))
    sim.round(sim.start())
    plain.round(plain.start())
    assert sim.backend.memory.of(PART).keys() == plain.backend.memory.of(PART).keys() and kept(sim, 0).version == 1
    assert sim.ledger.content() == plain.ledger.content()


# -- another process ---------------------------------------------------------------------------------------------------

RUN = replace(
    SMALL,
    per_round=2,
    rounds=8,
    model=Choice("cnn", {"width": 2}),
    method=Choice("hosfl", {"perturbations": 2, "max_history": 4, "overlap": 1}),
    optimiser=Choice("adamw", {"lr": 0.01}),
    batching=Batching(size=8),
)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "stopped")


def memory_of(folder: Folder) -> Any:
    return folder.store.load()[0]["rounds"]["Memory"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("number", (1, 5))
def test_a_run_goes_on_as_if_it_had_not_stopped(number: int, engine: str, folder: Folder, tmp_path: Path) -> None:
    """Metrics, bytes, checkpoints with what clients keep, and the model, to the last bit."""
    run = replace(RUN, engine=engine)
    execute(run, stopped(run, folder, number), resume=True)
    assert outcome(folder) == outcome(unbroken(run, tmp_path))
    content = memory_of(folder)[PART]
    assert {version for version, _ in content["clients"].values()} > {8}
    assert len(content["values"]) < len(content["clients"])


def test_a_killed_process_goes_on_in_another(folder: Folder, tmp_path: Path) -> None:
    killed(RUN, folder, "in_a_round", 6)
    assert (len(folder.history()), max(folder.store.rounds())) == (5, 5)
    execute(RUN, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(RUN, tmp_path))


def killed(run: Run, folder: Folder, moment: str, number: int) -> None:
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    file = folder.path.parent / "killed.toml"
    file.write_text(config.dumps(run))
    script = Path(__file__).with_name("killed_run.py")
    command = [sys.executable, str(script), str(file), str(folder.path), moment, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_an_empty_log_has_the_types_of_a_full_one() -> None:
    empty = History.empty(P)
    full = empty.plus(seeds_of(0), torch.ones(P, dtype=torch.float32))
    assert [a.dtype for a in empty] == [a.dtype for a in full] == [torch.int64, torch.float64]
    assert (len(empty.seeds), len(full.seeds), len(full.since(1).seeds)) == (0, 1, 0)
