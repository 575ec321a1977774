"""Specifies what the owner of a device and whoever runs a server read: who leaves, who is missing, and why."""

import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_grpc_faults import RUN
from test_seeing import Hands

from cutlayer.cli.commands import main
from cutlayer.errors import ConfigError, DataError
from cutlayer.remote.device import client
from cutlayer.remote.device.journal import Journal
from cutlayer.remote.device.stream import StreamEnded
from cutlayer.remote.device.terms import Allowance
from cutlayer.remote.identity.register import Register
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import Welcome
from cutlayer.remote.server import serve as module
from cutlayer.remote.server.peer import NoPeer, Peer
from cutlayer.remote.server.serve import RunServer, Serving, samples_of, serve
from cutlayer.remote.server.sessions import ClientSession, Sessions
from cutlayer.remote.server.streams import OVER, Admission, listen
from cutlayer.runs import config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder

TWO = replace(RUN, clients=2, rounds=2)
USED_UP = "this device has already played round 1 once, its limit; join with --attempts N to allow more"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    caplog.set_level(logging.INFO, "cutlayer")


def board(run: Run) -> Board:
    return Board(name=run.name, method=run.method.name, rounds=run.rounds)


def joined(address: str, name: str, ready: Callable[[Welcome], Any]) -> str:
    """Take part without certificates; return the last words, or the error."""
    options = client.JoinOptions(
        address=address, name=name, credentials=None, plugins={}, ready=ready, gives_up_after=0.5
    )
    try:
        return client.stay(options)
    except Exception as error:
        return str(error)


def served(run: Run, folder: Path, *devices: DeviceSettings) -> list[str]:
    """Serve a run to these devices; return how each of them has ended."""
    ends = [""] * len(devices)

    def join(address: str, number: int) -> None:
        ends[number] = joined(address, str(number), devices[number].ready)

    threads: list[threading.Thread] = []

    def call(address: str) -> None:
        for number in range(len(devices)):
            threads.append(threading.Thread(target=join, args=(address, number), daemon=True))
            threads[-1].start()

    try:
        serve(run, Folder(folder), Serving(listen="127.0.0.1:0", patience=0.3), board(run), on_open=call)
    finally:
        for thread in threads:
            thread.join(60)
    return ends


def device(path: Path, run: Run, number: int, **limits: Any) -> DeviceSettings:
    file = path / f"{run.name}.toml"
    file.write_text(config.dumps(run), encoding="utf-8")
    return DeviceSettings(data="digits", config=file, state=path / str(number), allowance=Allowance(**limits))


# -- a device that refuses -------------------------------------------------------------------------------------------


def test_a_device_whose_attempts_are_used_up_leaves_with_its_own_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for out, expected in (("a", [OVER, OVER]), ("b", [USED_UP, OVER])):
        caplog.clear()
        own = device(tmp_path, TWO, 0, attempts=1), device(tmp_path, TWO, 1, attempts=2)
        assert served(TWO, tmp_path / out, *own) == expected
    refused = f'client refused client=0 number=0 reason="it refuses: the round: {USED_UP}"'
    begins = "round 2 begins with 1 of 2 clients"
    again = "round 1 is played again with this device's data (attempt 2 of 2); rounds after it are not reported"
    found = [m for m in caplog.messages if m.startswith(("client refused", "round 2 begins", "round 1 is"))]
    assert sorted(found) == sorted([refused, begins, again])


def test_a_server_that_every_device_refuses_says_why_they_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = replace(TWO, clients=1, rounds=1)
    with pytest.raises(ConfigError) as failed:
        served(run, tmp_path / "out", device(tmp_path, run, 0, round_seconds=1e-9, attempts=9))
    assert str(failed.value) == (
        "round 1: every client is lost, 3 times; the devices refused to go on: it refuses: the work: this device works "
        "at most 1e-09 seconds in a round. Ask their owners, who set the run file and the limits of each device; the "
        "rounds before are saved"
    )


def test_a_device_names_its_own_refusal_and_not_the_servers_words(caplog: pytest.LogCaptureFixture) -> None:
    own = "this device refuses: the work: this device works at most 5 seconds a day"
    after(caplog, StreamEnded("the server ended the session: it refuses: ...", True), refusal=own)
    assert caplog.messages[0].startswith(f"{own}; trying 127.0.0.1:1 again in ")


def after(caplog: pytest.LogCaptureFixture, *ends: StreamEnded, refusal: str = "") -> None:
    """Stay at a server whose sessions end in these ways, until the run is over."""
    left = iter(ends)

    class Connection:
        worked = False

        def __init__(self, *_: Any) -> None:
            self.refusal = refusal

        def run(self) -> str:
            end = next(left, None)
            if end is not None:
                raise end
            return OVER

        def close(self, reason: str = "") -> None:
            pass

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client, "ServerConnection", Connection)
        assert joined("127.0.0.1:1", "ann", lambda welcome: None) == OVER


def test_the_raw_text_of_a_failed_connection_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    end = StreamEnded("no connection to 127.0.0.1:1: it shows no certificate", True, "failed to connect: SSL_ERROR_SSL")
    after(caplog, *[end] * 3)
    assert [m for m in caplog.messages if "SSL_ERROR_SSL" in m] == ["gRPC says: failed to connect: SSL_ERROR_SSL"]
    assert len(caplog.messages) == 4


# -- data and runs are looked at before any server is ----------------------------------------------------------------

WARD = """
clients = 2
model = "cnn"
cut = "conv1"
[sample]
shape = [1, 8, 8]
classes = 10
"""
X, Y = np.zeros((40, 1, 8, 8), "float32"), np.arange(40) % 10
UNFIT: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "shape": ({"x": X[..., :7], "y": Y}, [], "inputs have the shape (1, 8, 7), but a sample here has (1, 8, 8)"),
    "NaN": ({"x": X + np.nan, "y": Y}, [], "40 of 40 samples have inputs that are NaN or infinite"),
    "labels": ({"x": X, "y": Y + 5}, [], "20 of 40 labels are out of range"),
    "no data": ({}, [], "File is not a zip file"),
    "no data, whatever the run is": ({}, ["--any-run"], "File is not a zip file"),
    "no configuration": ({"x": X, "y": Y}, ["--config", "none.toml"], "there is no configuration file none.toml"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_what_cannot_take_part_connects_to_nobody(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("cutlayer.cli.join"), "stop_on_sigterm", lambda: None)
    monkeypatch.setattr(client, "stay", lambda options: pytest.fail("it connects"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")
    arrays, options, words = UNFIT[case]
    Path("ward.toml").write_text(WARD)
    Path("scans.npz").write_text("this is no archive")
    if arrays:
        np.savez("scans.npz", **arrays)
    with pytest.raises(SystemExit) as ended:
        main(["join", "127.0.0.1:1", "--data", "scans.npz", "--insecure", *(options or ["--config", "ward.toml"])])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_columns_that_a_run_may_name_are_no_mistake_before_it_is_known(tmp_path: Path) -> None:
    np.savez(tmp_path / "scans.npz", pixels=X, finding=Y)
    DeviceSettings(data=str(tmp_path / "scans.npz")).check()


def test_a_server_is_told_that_a_device_left_because_of_its_data_and_nothing_about_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def ready(welcome: Welcome) -> Any:
        raise DataError("secret.npz: 3 labels are out of range")

    admission = Admission(
        sessions=Sessions(),
        run="",
        number_of=lambda name: 0,
        check=lambda name, ready: None,
        plugins={},
        watcher=board(TWO),
        secure=False,
    )
    server, port = listen("127.0.0.1:0", None, admission, 1)
    for _ in range(2):
        assert joined(f"127.0.0.1:{port}", "ann", ready) == "secret.npz: 3 labels are out of range"
    server.stop(None).wait(5)
    told = (
        "client left before it was ready client=ann "
        'reason="it left: its own data do not fit this run; its log says why"'
    )
    assert caplog.messages == [told] * 2


# -- what a device prints ----------------------------------------------------------------------------------------------


def test_a_device_prints_what_leaves_in_this_run_with_its_codecs(caplog: pytest.LogCaptureFixture) -> None:
    run = replace(TWO, codecs={"activations": "int8"})
    for shaped in (run, replace(run, head="head")):
        DeviceSettings(data="digits").ready(Welcome(session=1, client=0, run=config.dumps(shaped)))
    found = [m for m in caplog.messages if m.startswith("what leaves this device")]
    assert found == [
        "what leaves this device: activations (int8), labels, model",
        "what leaves this device: activations (int8), gradients, scalars, model",
    ]


def test_a_device_logs_its_progress_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, one = Hands(), DeviceSettings(data="digits").ready(Welcome(session=1, client=1, run=config.dumps(TWO)))
    caplog.clear()
    journal = Journal("ann", clock)
    journal.joined(one)
    for round in range(2):
        for _ in range(59):
            journal.worked(one, round, 1024)
            clock.now += 1
    assert caplog.messages == [
        "joined as ann, number 1 in a run of 2 clients and 2 rounds; waiting for a round",
        "round 1 of 2; 1.0 KiB have left this device",
        "round 2 of 2; 61.0 KiB have left this device",
    ]


# -- what a server prints ----------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunServer]:
    """A server whose list has ann and bob, of whom ann is there."""
    (tmp_path / "clients.toml").write_text(Register(clients={"ann": 0, "bob": 1}).as_toml())
    made = RunServer(TWO, Serving(keys=tmp_path, patience=0.1, least=1), board(TWO), samples_of(TWO, None, None))
    come(made.sessions, 0, "ann")
    yield made


def come(sessions: Sessions, number: int, name: str) -> None:
    sessions.join(
        ClientSession(
            client=number, name=name, number=number, samples=2, kept=(), transmit=lambda *_: 0, close=lambda _: None
        )
    )


def test_a_server_names_who_is_missing_and_how_long_it_waits(
    server: RunServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    assert server.gather(0) == (0,)
    assert caplog.messages == [
        "waiting for 1 of 2 clients for up to 0.1 s; not here: bob",
        "round 1 begins with 1 of 2 clients; not here: bob",
    ]


def test_a_server_that_needs_all_clients_waits_without_a_limit(
    server: RunServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.serving = replace(server.serving, least=None)
    monkeypatch.setattr(
        server.board, "waiting", lambda words: (words and come(server.sessions, 1, "bob"), said.append(words))
    )
    said: list[str] = []
    assert server.gather(0) == (0, 1)
    assert said == ["waiting for 1 of 2 clients without a limit; not here: bob", ""]


def test_a_server_says_that_it_continues_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = replace(TWO, clients=1, rounds=1)
    for rounds in (1, 2):
        longer = replace(run, rounds=rounds)
        assert served(longer, tmp_path / "out", device(tmp_path, longer, 0)) == [OVER]
    assert [m for m in caplog.messages if "continuing" in m] == [f"continuing {tmp_path / 'out'} after round 1 of 2"]


def test_a_fed_server_is_there_for_as_long_as_the_training_server(
    server: RunServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training server tells lost clients that the run is over, so it alone needs to wait for them."""
    server.sessions.leave(0, None, "lost")
    server.serving = replace(server.serving, linger=1e6)
    server.peer = peer = Peer("fed", "127.0.0.1:1")
    link = peer.connected(lambda message, tensors: None)
    monkeypatch.setattr("time.sleep", lambda _: peer.gone(link, "it has ended"))
    server.done()
    peer._keep_linked(None)  # the link is not made again
    assert Peer("server").says_goodbye and NoPeer().says_goodbye


def test_keys_of_the_fed_server_suggest_its_role(tmp_path: Path) -> None:
    from cutlayer.remote.identity.trial import trial

    trial(tmp_path / "keys", clients="ann")
    serving = Serving(keys=tmp_path / "keys" / "fed")
    server = RunServer(TWO, serving, board(TWO), samples_of(TWO, None, None))
    with pytest.raises(ConfigError) as refused, server.open():
        pass
    assert str(refused.value) == (
        f"{serving.keys} holds the keys of 'fed'; this server needs those of 'train', or start it with --role fed"
    )
