"""Specifies that a server counts and logs the handshakes that fail, and keeps connections and descriptors in bounds."""

import queue
import resource
import select
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from device_pool import wait_for

from cutlayer.errors import ConfigError
from cutlayer.remote.device.stream import Stream
from cutlayer.remote.identity.certificates import Credentials, secure_channel
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import JOIN, PROTOCOL, Hello, Welcome
from cutlayer.remote.server import ceilings, far_ends, handshakes
from cutlayer.remote.server.ceilings import MOST_STREAMS, RESERVED, Ceilings, OpenStreams, raised_descriptors
from cutlayer.remote.server.far_ends import DESCRIPTORS, TABLES, FarEnd, connections, thin_out
from cutlayer.remote.server.handshakes import Handshakes
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import Admission, listen
from cutlayer.version import __version__

W = 10.0 + handshakes.OPENING_SECONDS  # seconds after which a handshake without a stream has failed
ANN, BOB, EVE = FarEnd("192.0.2.1", 1), FarEnd("192.0.2.2", 2), FarEnd("198.51.100.7", 3)


class Watch:
    """Handshakes with a clock and a table of connections by hand."""

    def __init__(self) -> None:
        self.now, self.table, self.told = 100.0, list[FarEnd](), list[tuple[int, Mapping[str, int]]]()
        self.handshakes = Handshakes(
            10.0,
            lambda *what: self.told.append(what),
            clock=lambda: self.now,
            connected=lambda port: iter(self.table),
        )

    def connect(self, end: FarEnd, stream: bool) -> None:
        self.table.append(end)
        self.handshakes.begun()
        self.handshakes.check()
        if stream:
            self.handshakes.opened(f"ipv4:{end.address}:{end.port}")

    def wait(self, seconds: float) -> list[tuple[int, Mapping[str, int]]]:
        """What is told from now on, until then."""
        self.told.clear()
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.handshakes.check()
        return self.told


def test_a_connection_over_which_no_stream_comes_has_failed() -> None:
    watch = Watch()
    watch.connect(ANN, stream=True)
    watch.connect(EVE, stream=False)
    watch.connect(EVE._replace(port=4), stream=False)
    watch.connect(BOB, stream=True)
    assert watch.wait(W - 1) == []
    assert watch.wait(1) == [(2, {EVE.address: 2})]
    assert watch.wait(300) == []  # though the kernel still shows them


def test_a_peer_that_stays_or_opens_more_streams_is_counted_once() -> None:
    watch = Watch()
    watch.connect(ANN, stream=True)
    for _ in range(3):
        watch.handshakes.opened(f"ipv4:{ANN.address}:{ANN.port}")
    watch.connect(EVE, stream=False)
    assert watch.wait(W) == [(1, {EVE.address: 1})]
    watch.table.remove(EVE)
    assert watch.wait(600) == []
    watch.connect(EVE._replace(port=5), stream=False)
    assert watch.wait(W) == [(1, {EVE.address: 1})]


def test_a_port_that_is_used_again_is_another_connection() -> None:
    watch = Watch()
    for _ in range(2):
        watch.connect(ANN, stream=True)
        watch.handshakes.closed(f"ipv4:{ANN.address}:{ANN.port}")
        watch.table.clear()
        assert watch.wait(300) == []
    watch.connect(EVE, stream=False)
    assert watch.wait(W) == [(1, {EVE.address: 1})]


def test_far_ends_read_alike_from_grpc_and_from_the_kernel() -> None:
    assert FarEnd.of_grpc("ipv4:192.0.2.1:40920") == FarEnd("192.0.2.1", 40920)
    assert FarEnd.of_grpc("ipv6:%5B::1%5D:40920") == FarEnd("::1", 40920)
    assert FarEnd.of_grpc("unix:/run/some") == FarEnd("/run/some".rpartition(":")[0], 0)


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_tells_who_is_connected(
    family: socket.AddressFamily, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(far_ends, "MOST_OF_A_TABLE", 2**30)  # other tests may have left a long one
    if not TABLES[0].exists():
        pytest.skip("this system shows no table of connections")
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        server.listen()
        port = server.getsockname()[1]
        assert list(connections(port)) == []
        with socket.create_connection((host, port)) as client:
            assert set(connections(port)) == {FarEnd(host, client.getsockname()[1])}


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="this system does not tell a process its descriptors")
def test_an_address_has_no_more_connections_than_it_may(tmp_path: Path) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        theirs, ours = list[socket.socket](), list[socket.socket]()
        for source in [*["127.0.0.1"] * 5, *["127.0.0.2"] * 3]:
            theirs.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), None, (source, 0))))
            ours.append(stack.enter_context(server.accept()[0]))
        stack.enter_context((tmp_path / "file").open("w"))  # no socket
        before = len(list(DESCRIPTORS.iterdir()))
        known = {FarEnd("127.0.0.1", theirs[0].getsockname()[1])}
        thin_out(port, 3, known)
        gone = select.select(theirs, [], [], 1.0)[0]
        assert [sock.getsockname()[0] for sock in gone] == ["127.0.0.1"]
        assert gone[0] is not theirs[0]
        thin_out(port + 1, 0, ())  # somebody else's
        assert len(list(DESCRIPTORS.iterdir())) == before
        assert select.select(theirs, [], [], 0)[0] == gone


# -- a server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ca"
    trial(folder, clients="ann,bob")
    trial(folder.with_name("other"), clients="ann")
    return folder


@contextmanager
def listening(keys: Path, limits: Ceilings, **more: Any) -> Iterator[tuple[Board, str]]:
    """A server of ann and bob, whose admission may be another one."""
    board, opened = Board(name="run", method="sfl_v1", rounds=1), ExitStack()
    watch = Handshakes(limits.handshake, board.failed_handshakes, limits.of_an_address)
    usual = {"sessions": Sessions(), "number_of": ["ann", "bob"].index, "check": lambda name, ready: None}
    admission = Admission(
        **usual | more, run="", plugins={}, watcher=board, secure=True, ceilings=limits, handshakes=watch
    )
    server, port = listen("127.0.0.1:0", Credentials.load(keys / "train"), admission, 2)
    with opened, watch.watched():
        yield board, f"127.0.0.1:{port}"
    server.stop(None).wait(5)


def joining(address: str, keys: Path, name: str) -> Stream:
    """The stream of a client that has said hello."""
    stream = Stream(address, "train", Credentials.load(keys / "clients" / name))
    stream.say(Hello(protocol=PROTOCOL, version=__version__, name=name, plugins={}))
    return stream


def failed(board: Board) -> int:
    return board.snapshot().failed_handshakes


def test_strangers_are_counted_and_logged_with_their_addresses(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshakes, "OPENING_SECONDS", 0.5)
    monkeypatch.setattr(handshakes, "POLL_SECONDS", 0.1)
    wrong = Credentials.load(keys.with_name("other") / "clients" / "ann")
    with listening(keys, Ceilings(handshake=0.5)) as (board, address):
        host, _, port = address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(3)]
        with secure_channel(address, Credentials.load(keys / "clients" / "ann"), "train") as channel:
            list(channel.stream_stream(JOIN)(iter([])))
            wait_for(lambda: failed(board) == 3)
        assert [s.recv(1) for s in silent] == [b""] * 3  # the server has hung up
        with secure_channel(address, wrong, "train") as channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream(JOIN)(iter([b""])))
        wait_for(lambda: failed(board) > 3)
    told = [record for record in caplog.records if record.getMessage().startswith("handshakes failed")]
    assert told
    if TABLES[0].exists():
        assert '"127.0.0.1"' in told[0].getMessage()


def test_connections_beyond_the_ceiling_are_closed_at_once(keys: Path) -> None:
    with listening(keys, Ceilings(connections=20, handshake=600.0)) as (_, address), ExitStack() as stack:
        host, _, port = address.rpartition(":")
        strangers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(50)]
        # The others stay until their handshakes have to be over, which is long after this test.
        wait_for(lambda: len(select.select(strangers, [], [], 0)[0]) == 30)


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="this system does not tell a process its descriptors")
def test_one_address_cannot_take_all_connections(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "POLL_SECONDS", 0.1)
    limits = Ceilings(connections=20, of_an_address=5, handshake=600.0)
    with listening(keys, limits) as (_, address), ExitStack() as stack:
        host, _, port = address.rpartition(":")
        eve = [
            stack.enter_context(socket.create_connection((host, int(port)), None, ("127.0.0.2", 0))) for _ in range(20)
        ]
        wait_for(lambda: len(select.select(eve, [], [], 0)[0]) == 15)
        stream = joining(address, keys, "ann")
        assert isinstance(next(iter(stream))[0], Welcome)
        stream.close()


def test_one_certificate_with_many_silent_streams_keeps_nobody_out(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(keys, Ceilings()) as (board, address), ExitStack() as stack:
        bob = Credentials.load(keys / "clients" / "bob")
        silence, calls = queue.SimpleQueue[bytes | None](), list[Any]()
        for _ in range(30):
            own = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(secure_channel(address, bob, "train", own))
            calls += [channel.stream_stream(JOIN)(iter(silence.get, None)) for _ in range(10)]
        wait_for(lambda: board.snapshot().refused_connections > 20)
        stream = joining(address, keys, "ann")
        message, _ = next(iter(stream))
        assert isinstance(message, Welcome)
        stream.close()
        for _ in calls:
            silence.put(None)
    assert "bob: it has more than 4 streams at once; the oldest has to end" in caplog.text


# -- what is allowed -----------------------------------------------------------------------------------------------


@dataclass
class OneStream:
    """A stream that only has a session or has none."""

    session: object = None

    def give_way(self, reason: str) -> None:
        raise NotImplementedError


def test_the_oldest_stream_without_a_session_makes_room() -> None:
    streams, first = OpenStreams(), OneStream(session="of bob")
    others = [OneStream() for _ in range(MOST_STREAMS)]
    assert [streams.enter("bob", one) for one in [first, *others]] == [None] * MOST_STREAMS + [others[0]]
    assert streams.enter("ann", OneStream()) is None
    streams.leave("bob", first)
    assert streams.enter("bob", OneStream()) is None
    streams.leave("bob", first)  # has left already
    assert streams.enter("bob", OneStream()) is others[1]


@pytest.mark.parametrize(
    ("descriptors", "asked", "allowed"),
    [
        (None, None, 1000),  # of a system that does not tell
        (10_000, None, 1000),
        (10_000, 50, 50),
        (1024, None, 1024 - RESERVED),
        (1024, 900, 1024 - RESERVED),
    ],
)
def test_some_descriptors_are_left_for_files(
    descriptors: int | None, asked: int | None, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "raised_descriptors", lambda: descriptors)
    assert Ceilings(connections=asked).most_connections(10) == allowed


def test_a_run_with_more_clients_has_room_for_more_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "raised_descriptors", lambda: None)
    assert Ceilings().most_connections(5000) == 20_000


def test_too_few_descriptors_are_told_of_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "raised_descriptors", lambda: 256)
    words = "this process may open 256 files, too few for 100 clients and 200 files of its own; raise the limit"
    with pytest.raises(ConfigError, match=words):
        Ceilings().most_connections(100)


def test_the_limit_of_descriptors_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        most = raised_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        assert most is not None and most >= min(soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("wrong", [{"connections": 0}, {"handshake": 0.0}, {"steps": 0}])
def test_ceilings_that_let_nobody_in(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Ceilings(**wrong)
