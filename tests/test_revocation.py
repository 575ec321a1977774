"""Specifies that a client which is taken off the list is out within a round, and warnings of expiry while running."""

import logging
import queue
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from logging.handlers import QueueHandler
from pathlib import Path

import pytest
from device_pool import Pool, Served, shared, wait_for
from test_grpc_faults import NAMES, RUN, devices, serving
from test_grpc_strangers import signed

from cutlayer.remote.identity import key_folder
from cutlayer.remote.identity.register import Register
from cutlayer.remote.identity.repeating import repeating
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.server import guests as module
from cutlayer.remote.server.guests import Guests
from cutlayer.remote.server.serve import serve
from cutlayer.remote.server.sessions import ClientSession, Sessions
from cutlayer.runs.folder import Folder
from cutlayer.runs.stopping import Record

REVOKED = "client 'eve' was revoked; to take part again it needs a certificate under a new name"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "ca"
    trial(folder, clients=",".join(NAMES))
    return folder


@pytest.fixture
def keys(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "ca"))


@pytest.fixture
def pool() -> Pool:
    return shared()


class RevokesEve(Board):
    """Revokes a client as soon as two rounds are over."""

    keys: Path

    def round_ended(self, record: Record) -> None:
        super().round_ended(record)
        if record["round"] == 2:
            key_folder.revoke(self.keys, ["eve"])


def test_a_revoked_client_takes_part_in_no_further_round(pool: Pool, keys: Path, tmp_path: Path) -> None:
    order = Served(run=replace(RUN, rounds=5), folder=tmp_path / "served", serving=serving(keys, patience=0.3))
    board = RevokesEve(name="small", method="sfl_v1", rounds=5)
    board.keys = keys
    rounds: list[set[str]] = []
    began = board.round_began

    def note(round: int, ids: object) -> None:
        began(round, ids)  # type: ignore[arg-type]
        rounds.append({client.name for client in board.snapshot().clients.values() if client.state == "waiting"})

    board.round_began = note  # type: ignore[method-assign, assignment]
    with pool.some() as (clients,):

        def call(address: str) -> None:
            clients.order(devices(order, keys, tmp_path / "state"))

        serve(order.run, Folder(order.folder), order.serving, board, on_open=call)
        left = dict(clients.hear("left") for _ in NAMES)
    assert rounds == [{"ann", "bob", "eve"}] * 2 + [{"ann", "bob"}] * 3
    assert left["eve"] == f"LinkError: refused by the server: {REVOKED}"
    assert left["ann"] == left["bob"] == "the run is over"
    eve = board.snapshot().clients[2]
    assert (eve.state, eve.refusals, eve.reason) == ("refused", 1, REVOKED)
    assert board.snapshot().refused_connections == 0  # she does not come again


@pytest.fixture
def present() -> Sessions:
    """Two clients in sessions that do nothing."""
    sessions = Sessions()
    for number, name in enumerate(("ann", "eve")):
        session = ClientSession(
            client=number, name=name, number=number, samples=2, kept=(), transmit=lambda *_: 0, close=lambda _: None
        )
        sessions.join(session)
    return sessions


@pytest.fixture
def guests(tmp_path: Path, present: Sessions) -> Iterator[Guests]:
    path = tmp_path / "clients.toml"
    path.write_text(Register(clients={"ann": 0, "eve": 1}).as_toml())
    yield Guests(path=path, sessions=present, board=Board(name="r", method="m", rounds=1))


def names(guests: Guests) -> list[str]:
    guests.look()
    return [session.name for session in guests.sessions.present().values()]


def rewrite(guests: Guests, text: str) -> None:
    assert guests.path is not None
    guests.path.write_text(text)


def test_only_those_who_were_taken_off_the_list_leave(guests: Guests, caplog: pytest.LogCaptureFixture) -> None:
    assert names(guests) == ["ann", "eve"]
    rewrite(guests, Register(clients={"ann": 0, "dave": 2}, revoked={"eve": 1}).as_toml())
    assert names(guests) == ["ann"]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert f'client refused client="client 1" number=1 reason="{REVOKED}"' in caplog.messages[0]
    assert guests.board.snapshot().clients[1].refusals == 1
    assert names(guests) == ["ann"]
    assert guests.board.snapshot().clients[1].refusals == 1


def test_a_client_that_is_missing_or_has_another_number_leaves_as_well(guests: Guests) -> None:
    rewrite(guests, Register(clients={"eve": 1}).as_toml())
    assert names(guests) == ["eve"]
    rewrite(guests, Register(clients={"eve": 7}).as_toml())
    assert names(guests) == []
    reasons = [client.reason for client in guests.board.snapshot().clients.values()]
    assert "client 'ann' is not in this server's list of clients" in reasons[0]
    assert reasons[1] == "client 'eve' has the number 7 in the list by now, not 1"


def test_who_joins_during_a_revocation_leaves_at_the_next_look(guests: Guests, present: Sessions) -> None:
    rewrite(guests, Register(clients={"ann": 0}, revoked={"eve": 1}).as_toml())
    assert names(guests) == ["ann"]
    session = present.get(0)
    assert session is not None
    present.join(replace(session, client=1, name="eve", number=9))  # it was greeted before
    assert names(guests) == ["ann"]


def test_a_list_that_is_being_copied_ends_no_session(guests: Guests, caplog: pytest.LogCaptureFixture) -> None:
    guests.look()
    rewrite(guests, Register(clients={"ann": 0}).as_toml()[:14])
    assert names(guests) == names(guests) == ["ann", "eve"]
    assert len(caplog.messages) == 1 and "nobody new can join until then" in caplog.messages[0]
    assert guests.path is not None
    guests.path.unlink()
    assert names(guests) == names(guests) == ["ann", "eve"]
    assert len(caplog.messages) == 2 and "is not there" in caplog.messages[1]
    rewrite(guests, Register(clients={"ann": 0}, revoked={"eve": 1}).as_toml())
    assert names(guests) == ["ann"]


def test_the_list_is_read_again_during_a_round(guests: Guests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    with guests.watched():
        rewrite(guests, Register(clients={"ann": 0}, revoked={"eve": 1}).as_toml())
        wait_for(lambda: list(guests.sessions.present()) == [0])


def test_an_open_server_has_no_list(present: Sessions) -> None:
    guests = Guests(path=None, sessions=present, board=Board(name="r", method="m", rounds=1))
    assert names(guests) == ["ann", "eve"]


def test_expiry_is_warned_of_while_a_run_is_under_way(made: Path, caplog: pytest.LogCaptureFixture) -> None:
    ann = signed(made, "ann", days=15)
    ann.warn_of_expiry()
    assert caplog.messages == []
    soon = replace(ann, expires=datetime.now(UTC) + timedelta(days=13))
    heard: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    listener = QueueHandler(heard)
    logging.getLogger("cutlayer").addHandler(listener)
    try:
        with repeating(0.01, soon.warn_of_expiry):
            message = heard.get(timeout=60).getMessage()
    finally:
        logging.getLogger("cutlayer").removeHandler(listener)
    assert message.startswith(f"the certificate of ann expires on {soon.expires:%Y-%m-%d}; renew it: ")


def test_nothing_is_repeated_after_the_block() -> None:
    called = threading.Event()
    with repeating(0.001, called.set):
        assert called.wait(60)
    with repeating(3600, lambda: pytest.fail("it came at once")):
        pass
