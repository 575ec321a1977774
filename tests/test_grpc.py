"""Specifies gRPC: every method over real streams with mutual TLS gives the loop engine's numbers, bytes and trips."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from conftest import CODECS, SEED, images, run
from device_pool import Devices, Pool, Process, Served, free_port, shared, wait_for
from test_codecs_agree import outcome as with_codecs
from test_engines_agree import CASES, ONE_OF_EACH, Outcome, must_agree, on_loop
from test_remote import method_of
from torch import Tensor

from cutlayer.core.batches import Batching
from cutlayer.engines.loop import Loop
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.identity.register import Register
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import Message, Work
from cutlayer.remote.server import streams
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.serve import Serving
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import OVER, Admission, listen
from cutlayer.remote.tensors.wire import encode
from cutlayer.runs.codecs import coders
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.run import execute

FEW = ["fedavg", "sfl_v1", "smofi", "hosfl"]
CLIENTS = 5


@pytest.fixture
def pool() -> Pool:
    return shared()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ca"
    trial(folder, clients=str(CLIENTS))
    return folder


Gather = Callable[[Sessions, int], tuple[int, ...]]
Opened = tuple[Rounds, str]


def everybody(sessions: Sessions, _: int) -> tuple[int, ...]:
    wait_for(lambda: len(sessions.present()) == CLIENTS)
    return tuple(sessions.present())


@contextmanager
def opened(
    case: str, shape: str, keys: Path, board: Board, gather: Gather = everybody, codecs: str = ""
) -> Iterator[Opened]:
    """A server of one of the cases, and its address."""
    method, sessions = method_of(case, shape), Sessions()
    own = coders(CODECS[codecs], method.model, images().take([0, 1]).x) if codecs else {}
    register = Register.read(keys / "train" / "clients.toml")
    admission = Admission(
        sessions=sessions,
        run="/".join(filter(None, (case, shape, codecs))),
        number_of=register.number,
        check=lambda name, ready: None,
        plugins={},
        watcher=board,
        secure=True,
    )
    server, port = listen("127.0.0.1:0", Credentials.load(keys / "train"), admission, CLIENTS)

    devices = DeviceBackend(
        method=method,
        coders=own,
        sessions=sessions,
        sample=images().take([0, 1]),
        engine=Loop(),
        deadline=30,
        gather=partial(gather, sessions),
        watcher=board,
    )
    there = Rounds(method, devices, batching=CASES[case].batching, seed=SEED)
    try:
        yield there, f"127.0.0.1:{port}"
    finally:
        for session in sessions.present().values():
            sessions.leave(session.client, session.number, OVER)
        server.stop(2).wait(2)


def remotely(
    case: str, shape: str, keys: Path, process: Process, board: Board, rounds: int = 2, codecs: str = ""
) -> Outcome:
    names = [f"client-{i + 1}" for i in range(CLIENTS)]
    with opened(case, shape, keys, board, codecs=codecs) as (there, address):
        process.order(Devices(address=address, keys=keys, names=names, case=True))
        outcome = Outcome(run(there, rounds), there.ledger)  # type: ignore[arg-type]
    assert sorted(process.hear("left") for _ in names) == [(name, OVER) for name in names]
    return outcome


def board_of(case: str) -> Board:
    return Board(name=case, method=CASES[case].name, rounds=2)


def check(case: str, shape: str, keys: Path, pool: Pool) -> None:
    with pool.some() as (process,):
        found = remotely(case, shape, keys, process, board_of(case))
    must_agree(found, on_loop(case, "momentum", shape, torch.float64), 0.0)


@pytest.mark.parametrize("case", FEW)
def test_streams_give_the_loop_engines_numbers(case: str, keys: Path, pool: Pool) -> None:
    check(case, "two-part", keys, pool)


def test_streams_carry_codes(keys: Path, pool: Pool) -> None:
    with pool.some() as (process,):
        found = remotely("smofi", "two-part", keys, process, board_of("smofi"), rounds=3, codecs="sparse")
    must_agree(found, with_codecs("smofi", "sparse", "loop"), 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "shape"),  # the variants send the same messages, which test_remote decodes for each of them
    [
        *((c, "two-part") for c in ONE_OF_EACH.values() if c not in FEW),
        *((c, "u-shaped") for c in ("sfl_v1", "mergesfl", "sfl_v1 random layers")),
    ],
)
def test_streams_give_the_loop_engines_numbers_for_every_method(case: str, shape: str, keys: Path, pool: Pool) -> None:
    check(case, shape, keys, pool)


# -- the lazy queue --------------------------------------------------------------------------------

STEPS = (3, 5, 2, 5, 1)  # mini-batches of the clients in a round


@pytest.mark.parametrize(
    ("case", "shape", "trips"),
    [
        ("fedavg", "two-part", [1] * CLIENTS),
        ("sfl_v1", "two-part", [steps + 1 for steps in STEPS]),  # one a mini-batch, and the model at the end
        ("sfl_v1", "u-shaped", [2 * steps + 1 for steps in STEPS]),
        ("hosfl", "two-part", [2] * CLIENTS),  # its round is one mini-batch
    ],
)
def test_round_trips(case: str, shape: str, trips: list[int], keys: Path, pool: Pool) -> None:
    board = board_of(case)
    with pool.some() as (process,):
        outcome = remotely(case, shape, keys, process, board, rounds=1)
    assert [c.round_trips for c in board.snapshot().clients.values()] == trips
    assert [outcome.ledger.trips[j] for j in range(CLIENTS)] == trips


def test_a_list_of_commands_that_repeats_is_sent_once(keys: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Work] = []

    def noted(message: Message, tensors: Sequence[Tensor] = ()) -> list[bytes]:
        if isinstance(message, Work):
            sent.append(message)
        return encode(message, tensors)

    monkeypatch.setattr(streams, "encode", noted)
    with pool.some() as (process,):
        remotely("smofi", "two-part", keys, process, board_of("smofi"))
    by_session = {session: [w for w in sent if w.session == session] for session in {w.session for w in sent}}
    counts = sorted((len(works), sum(w.commands is not None for w in works)) for works in by_session.values())
    assert counts == [(6, 3), (10, 5), (14, 7), (22, 9), (22, 9)]  # requests, and those with a list
    assert [w for w in sent if w.round == 1 and w.commands is not None] == []


# -- many clients ----------------------------------------------------------------------------------

MANY = 100


@pytest.mark.slow
def test_a_hundred_clients_complete_rounds(pool: Pool, tmp_path: Path) -> None:
    trial(tmp_path / "ca", clients=str(MANY))
    run = Run(
        name="many",
        clients=MANY,
        partition=Choice("iid"),
        model=Choice("cnn", {"width": 4}),
        batching=Batching(size=4, steps=3),
        rounds=5,
        engine="loop",
    )
    order = Served(
        run=run,
        folder=tmp_path / "served",
        serving=Serving(listen=f"127.0.0.1:{free_port()}", keys=tmp_path / "ca" / "train"),
    )
    names = [f"client-{i + 1:03}" for i in range(MANY)]
    with pool.some(3) as (server, *clients):
        server.order(order)
        server.hear("open")
        for process, some in zip(clients, (names[:50], names[50:]), strict=True):
            process.order(Devices(address=order.serving.listen, keys=tmp_path / "ca", names=some))
        status, _ = server.hear("served", seconds=300)
        assert sorted(process.hear("left") for process in clients for _ in names[:50]) == [(n, OVER) for n in names]
        memory = psutil.Process(server.pid).memory_info().rss
    execute(run, Folder(tmp_path / "simulated"))
    served, simulated = Folder(order.folder), Folder(tmp_path / "simulated")
    assert served.metrics.read_bytes() == simulated.metrics.read_bytes()
    assert served.model.read_bytes() == simulated.model.read_bytes()
    assert {(c.state, c.round_trips, c.rejoined) for c in status.clients.values()} == {("done", 20, 0)}
    assert memory < 2**30
