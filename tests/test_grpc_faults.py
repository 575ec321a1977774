"""Specifies what runs survive: killed servers and clients, frozen ones, and clients that send what they like."""

import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import GENERAL, SEED, agree, clients_of, images, simulation, using
from conftest import run as plain_run
from device_pool import Devices, Pool, Process, Served, free_port, shared, wait_for
from in_process import deployment
from test_engines_agree import CASES, plain
from test_grpc import opened
from test_remote import method_of

from cutlayer.core.batches import Batching
from cutlayer.core.state import State
from cutlayer.meters.ledger import Ledger
from cutlayer.remote.device.store import ClientStore
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.monitor.status import Board, RunStatus
from cutlayer.remote.protocol.messages import STOPPING
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.serve import Serving
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import OVER
from cutlayer.runs.checkpoint import read
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.run import execute

NAMES = ["ann", "bob", "eve"]
RUN = Run(
    name="small",
    clients=3,
    partition=Choice("iid"),
    subset=0.1,
    model=Choice("cnn", {"width": 2, "norm": "batch"}),
    optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.9}),
    batching=Batching(size=8, steps=2),
    rounds=3,
    engine="loop",
)


@pytest.fixture
def pool() -> Pool:
    return shared()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ca"
    trial(folder, clients=",".join(NAMES))
    return folder


def serving(keys: Path, **options: float) -> Serving:
    return Serving(
        listen=f"127.0.0.1:{free_port()}", keys=keys / "train", **{"deadline": 20, "patience": 20, **options}
    )


def devices(order: Served, keys: Path, state: Path, names: Sequence[str] = NAMES, dies_at: int = 0) -> Devices:
    return Devices(address=order.serving.listen, keys=keys, names=names, state=state, dies_at=dies_at)


def outcome(folder: Path) -> dict[str, bytes]:
    """What a run leaves: the model and its measurements."""
    left = Folder(folder)
    return {file.name: file.read_bytes() for file in (left.model, left.metrics)}


def simulated(run: Run, folder: Path) -> dict[str, bytes]:
    execute(run, Folder(folder))
    return outcome(folder)


def uninterrupted(server: Process, clients: Process, order: Served, keys: Path, state: Path) -> tuple[RunStatus, int]:
    """The board at the end, and the number of moments at which the server could have died."""
    clients.order(devices(order, keys, state))
    server.order(order)
    status, moments = server.hear("served")
    assert sorted(clients.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    return status, moments


@pytest.mark.slow
@pytest.mark.parametrize("method", GENERAL)
def test_a_run_over_streams_leaves_what_a_simulation_leaves(
    method: str, pool: Pool, keys: Path, tmp_path: Path
) -> None:
    run = using(RUN, method)
    with pool.some(2) as (server, clients):
        order = Served(run=run, folder=tmp_path / "served", serving=serving(keys))
        status, _ = uninterrupted(server, clients, order, keys, tmp_path / "state")
    assert outcome(order.folder) == simulated(run, tmp_path / "simulated")
    assert [(c.state, c.rejoined, c.refusals) for c in status.clients.values()] == [("done", 0, 0)] * 3


# -- killed servers --------------------------------------------------------------------------------

FEDERATED = ("fedavg", "fedprox", "fednar", "fedavgm", "slowmo", "fednag")
# How often something happens at the server in RUN: requests, answers, and lines and checkpoints written.
MOMENTS = {
    **dict.fromkeys(GENERAL, 63),
    **dict.fromkeys(FEDERATED, 27),
    **{"hasfl": 81, "fsl_sage": 45, "mu_splitfed": 45, "hosfl": 54},
}
WRITES = 3  # in a round: metrics, timing, checkpoint


def check_checkpoints(folder: Path) -> None:
    """Check that every file with the name of a checkpoint can be loaded."""
    store = Folder(folder).store
    for number in store.rounds():
        assert read(store.path(number))[0]["state"].round == number


def with_killed_server(run: Run, moments: Sequence[int], pool: Pool, keys: Path, path: Path) -> None:
    """Serve a run whose server dies at these moments, each time to be started again by the same command."""
    order = Served(run=run, folder=path / "served", serving=serving(keys))
    with pool.some(len(moments) + 2) as (clients, again, *servers):
        clients.order(devices(order, keys, path / "state"))
        for server, moment in zip(servers, moments, strict=True):
            server.order(replace(order, dies_at=moment))
            server.wait_for_death()
            check_checkpoints(order.folder)
        again.order(order)
        again.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    check_checkpoints(order.folder)
    assert not list(order.folder.rglob("*.partial"))


def random_moments(method: str, number: int, of: int | None = None) -> list[int]:
    return random.Random(method).sample(range(1, (of or MOMENTS[method]) + 1), number)


@pytest.mark.slow
@pytest.mark.parametrize("moment", random_moments("sfl_v1", 10))
def test_a_server_may_be_killed_at_any_moment(moment: int, pool: Pool, keys: Path, tmp_path: Path) -> None:
    with_killed_server(RUN, [moment], pool, keys, tmp_path)
    assert outcome(tmp_path / "served") == simulated(RUN, tmp_path / "simulated")


@pytest.mark.slow
@pytest.mark.parametrize("method", GENERAL)
def test_with_every_method_a_killed_server_goes_on_as_if_it_had_not_been(
    method: str, pool: Pool, keys: Path, tmp_path: Path
) -> None:
    """Killed twice: somewhere in the first two thirds, and soon after it was started again."""
    run, whole = using(RUN, method), MOMENTS[method]
    moments = [*random_moments(method, 1, of=2 * whole // 3), *random_moments(method + " again", 1, of=whole // 3)]
    with_killed_server(run, moments, pool, keys, tmp_path)
    served, expected = outcome(tmp_path / "served"), simulated(run, tmp_path / "simulated")
    assert served["model.safetensors"] == expected["model.safetensors"]
    assert served["metrics.jsonl"] == expected["metrics.jsonl"]


# -- killed clients --------------------------------------------------------------------------------


def client_moments(method: str) -> int:
    """The number of events at one client in a round of RUN."""
    return (MOMENTS[method] // RUN.rounds - WRITES) // len(NAMES)


def with_killed_client(run: Run, moment: int, pool: Pool, keys: Path, path: Path) -> RunStatus:
    """Serve a run in which one client dies at this moment and is started again by the same command."""
    order = Served(run=run, folder=path / "served", serving=serving(keys))
    with pool.some(3) as (server, clients, mortal):
        server.order(order)
        server.hear("open")  # an attempt before that would be a moment, too
        clients.order(devices(order, keys, path / "state", NAMES[:2]))
        mortal.order(devices(order, keys, path / "state", NAMES[2:], moment))
        mortal.wait_for_death()
        clients.order(devices(order, keys, path / "state", NAMES[2:]))
        status, _ = server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    check_checkpoints(order.folder)
    return status


@pytest.mark.slow
@pytest.mark.parametrize("method", GENERAL)
def test_a_client_killed_before_its_first_message_of_a_round_is_waited_for(
    method: str, pool: Pool, keys: Path, tmp_path: Path
) -> None:
    run = using(RUN, method)
    first = 2 + client_moments(method) + 1  # after Hello and Ready, and a whole round
    status = with_killed_client(run, first, pool, keys, tmp_path)
    assert outcome(tmp_path / "served") == simulated(run, tmp_path / "simulated")
    assert [(c.state, c.rejoined) for c in status.clients.values()] == [("done", 0), ("done", 0), ("done", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("moment", random_moments("any client", 10, of=2 * client_moments("sfl_v1")))
def test_a_client_may_be_killed_at_any_moment(moment: int, pool: Pool, keys: Path, tmp_path: Path) -> None:
    status = with_killed_client(RUN, moment, pool, keys, tmp_path)
    history = Folder(tmp_path / "served").history()
    assert [record["round"] for record in history] == [1, 2, 3]
    assert all(record["test_loss"] < 10 for record in history)
    assert [(c.state, c.refusals, c.round_trips) for c in status.clients.values()][:2] == [("done", 0, 9)] * 2
    assert status.clients[2].state == "done"


# -- frozen ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_frozen_client_is_cut_at_its_deadline_and_comes_back(pool: Pool, keys: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "served")
    run = replace(RUN, rounds=60)
    order = Served(run=run, folder=folder.path, serving=serving(keys, deadline=10.0, patience=3.0, linger=20.0))
    with pool.some(3) as (server, clients, frozen):
        server.order(order)
        server.hear("open")
        clients.order(devices(order, keys, tmp_path / "state", NAMES[:2]))
        third = devices(order, keys, tmp_path / "state", NAMES[2:], dies_at=2 + 3)  # its second request
        frozen.order(replace(third, by=signal.SIGSTOP))
        frozen.wait_until_frozen()
        wait_for(lambda: len(folder.history()) >= 2)
        frozen.signal(signal.SIGCONT)
        status, _ = server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES[:2]) == [(name, OVER) for name in NAMES[:2]]
        assert frozen.hear("left") == ("eve", OVER)
    eve = status.clients[2]
    assert (eve.state, eve.rejoined, eve.reason) == ("done", 1, "it gave no answer within 10 seconds")
    # Nobody waited for her, and she took part again once she was back.
    *others, hers = [c.round_trips for c in status.clients.values()]
    assert others == [180, 180] and 1 < hers < 180


# -- HO-SFL: what clients keep ---------------------------------------------------------------------

EVE = 2
AWAY = (1, 2)  # the rounds without her
HOSFL_ROUNDS = 5
Played = tuple[Any, Ledger]


@pytest.fixture(scope="module")
def five_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ca"
    trial(folder, clients="5")
    return folder


def five(address: str, keys: Path, state: Path, numbers: Sequence[int]) -> Devices:
    return Devices(address=address, keys=keys, names=[f"client-{i + 1}" for i in numbers], case=True, state=state)


def never_gone() -> Played:
    """The same rounds with clients that never leave; one of them is not sampled in some rounds."""
    there = deployment(method_of("hosfl"), images(), clients_of(), batching=CASES["hosfl"].batching, seed=SEED)
    there.backend.gather = lambda number: (0, 1, 3, 4) if number in AWAY else (0, 1, 2, 3, 4)
    return rounds_of(there, HOSFL_ROUNDS), there.ledger


def rounds_of(there: Rounds, number: int) -> Any:
    """Run the rounds and return their result."""
    state = there.start()
    for _ in range(number):
        state = there.round(state)
    return result(state)


def result(state: State) -> Any:
    return plain((state.client, state.server, state.report))


def board() -> Board:
    return Board(name="hosfl", method="hosfl", rounds=HOSFL_ROUNDS)


def with_eve_away(forgets: bool, pool: Pool, keys: Path, state: Path) -> Played:
    """Kill a client after the first round and start it again before the fourth, with or without what it kept."""
    others = [0, 1, 3, 4]
    with pool.some(3) as (clients, mortal, again):

        def gather(sessions: Sessions, number: int) -> tuple[int, ...]:
            if number == AWAY[0]:
                wait_for(lambda: kept_version(state) == 1)
                mortal.kill()
            if number == AWAY[-1] + 1:
                if forgets:
                    shutil.rmtree(state / "client-3")
                again.order(five(address, keys, state, [EVE]))
            wanted = others if number in AWAY else [0, 1, 2, 3, 4]
            wait_for(lambda: list(sessions.present()) == wanted)
            return tuple(wanted)

        with opened("hosfl", "two-part", keys, board(), gather) as (there, address):
            clients.order(five(address, keys, state, others))
            mortal.order(five(address, keys, state, [EVE]))
            found = rounds_of(there, HOSFL_ROUNDS), there.ledger
        for process, number in ((clients, 4), (again, 1)):
            assert {process.hear("left")[1] for _ in range(number)} == {OVER}
    return found


def kept_version(state: Path) -> int:
    """The version of eve's part in her state folder."""
    store = ClientStore(EVE, state / "client-3")
    store.load()
    return max((entry.version for entry in store.entries.values()), default=-1)


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True], ids=["replays", "downloads"])
def test_a_client_that_was_away_replays_what_it_missed_or_downloads_what_it_lost(
    forgets: bool, pool: Pool, five_keys: Path, tmp_path: Path
) -> None:
    found, ledger = with_eve_away(forgets, pool, five_keys, tmp_path / "state")
    expected, plain_ledger = never_gone()
    agree(found, expected, 0)
    # The first round of everybody is a download; she has another one only if her memory is gone.
    whole = plain_ledger.per_client[EVE]["down_setup"]
    assert whole > 0
    assert ledger.per_client[EVE]["down_setup"] == (2 * whole if forgets else whole)
    assert (ledger.per_client == plain_ledger.per_client) is not forgets
    others = [0, 1, 3, 4]
    assert [ledger.per_client[j] for j in others] == [plain_ledger.per_client[j] for j in others]


@pytest.mark.slow
def test_clients_whose_memory_is_newer_than_a_restored_server_download(
    pool: Pool, five_keys: Path, tmp_path: Path
) -> None:
    with pool.some() as (clients,):
        with opened("hosfl", "two-part", five_keys, board()) as (there, address):
            clients.order(five(address, five_keys, tmp_path / "state", range(5)))
            saved = there.round(there.start())
            ledger, memory = there.ledger.content(), there.backend.memory.content()
            there.round(saved)  # of which the restored server knows nothing
            assert there.ledger.totals["down_setup"] == ledger["totals"]["down_setup"]
            for session in there.backend.sessions.present().values():
                there.backend.sessions.leave(session.client, session.number, STOPPING)
            there.ledger.restore(ledger)
            there.backend.memory = KnownVersions()
            there.backend.memory.restore(memory)
            state = there.round(there.round(saved))
        assert {clients.hear("left")[1] for _ in range(5)} == {OVER}
    reference = simulation(method_of("hosfl"), images(), clients_of(), batching=CASES["hosfl"].batching)
    agree(result(state), result(plain_run(reference, 3)), 0)
    assert there.ledger.totals["down_setup"] == 2 * ledger["totals"]["down_setup"]
