"""Attacks of those who have no certificate of the CA, or the wrong one, and of the network between the parties."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import psutil
import pytest
from device_pool import Devices, Process, Served, free_port, shared
from evil_server import EvilServer
from test_grpc_faults import RUN, outcome, serving, simulated
from test_grpc_strangers import hello, signed
from victims import NAMES, credentials, folder, keys_of

from cutlayer.remote.device.stream import Stream, StreamEnded
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.server.streams import OVER
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, encode

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("attacks of strangers")]

TWO = replace(RUN, rounds=2)
HUNG_UP = "it hung up at once"
NOT_TRUSTED = "its certificate is not of the CA that this device trusts"
PLAINTEXT = "it shows no certificate"


@dataclass
class Target:
    """A server that waits for its devices, and the devices."""

    order: Served
    server: Process
    devices: Process
    stranger: Path  # keys of a CA that nobody here trusts

    @property
    def address(self) -> str:
        return self.order.serving.listen


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    path, keys = tmp_path_factory.mktemp("strangers"), folder() / "keys"
    order = Served(run=TWO, folder=path / "served", serving=serving(keys, patience=300))
    with shared().some(2) as (server, devices):
        server.order(order)
        server.hear("open")
        yield Target(order, server, devices, keys_of(path / "stranger"))


def turned_away(address: str, own: Credentials | None, name: str) -> str:
    """Return what somebody hears who shows these credentials and says this name."""
    stream = Stream(address, "train", own)
    stream.say(hello(name))
    try:
        with pytest.raises(StreamEnded) as left:
            for message, _ in stream:
                raise AssertionError(f"it was told {message}")
    finally:
        stream.close()
    return str(left.value)


# -- at the server -------------------------------------------------------------------------------------------------


def test_a_stranger_wants_in_without_a_certificate(target: Target) -> None:
    only_ca = grpc.ssl_channel_credentials((folder() / "keys" / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "train.cutlayer.internal")]
    with (
        grpc.secure_channel(target.address, only_ca, options=options) as channel,
        pytest.raises(grpc.RpcError) as error,
    ):
        list(channel.stream_stream(m.JOIN)(iter([b"".join(encode(hello("ann")))])))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_stranger_wants_in_in_plaintext(target: Target) -> None:
    assert HUNG_UP in turned_away(target.address, None, "ann")


def test_a_stranger_wants_in_with_a_ca_of_its_own(target: Target) -> None:
    assert NOT_TRUSTED in turned_away(target.address, Credentials.load(target.stranger / "clients" / "ann"), "ann")


def test_a_stranger_wants_in_with_a_certificate_that_it_has_signed_itself(target: Target) -> None:
    forged = signed(folder() / "keys", "ann", ca=target.stranger)
    assert HUNG_UP in turned_away(target.address, forged, "ann")


def test_a_stranger_wants_in_with_a_certificate_that_has_expired(target: Target) -> None:
    assert HUNG_UP in turned_away(target.address, signed(folder() / "keys", "ann", days=-1), "ann")


def test_a_stranger_wants_in_under_a_name_that_is_not_on_the_list(target: Target) -> None:
    told = turned_away(target.address, signed(folder() / "keys", "mallory"), "mallory")
    assert "client 'mallory' is not in this server's list of clients" in told


def test_a_client_wants_to_pass_for_another(target: Target) -> None:
    told = turned_away(target.address, credentials("bob"), "ann")
    assert "the certificate is of 'bob', but the client says that it is 'ann'" in told


def test_a_fed_server_wants_to_pass_for_a_client(target: Target) -> None:
    assert "'fed' is the certificate of a server" in turned_away(target.address, credentials("fed"), "ann")


def test_a_client_wants_to_pass_for_the_fed_server(target: Target) -> None:
    own = credentials("bob")
    secrets = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", "train.cutlayer.internal")]
    with (
        grpc.secure_channel(target.address, secrets, options=options) as channel,
        pytest.raises(grpc.RpcError) as error,
    ):
        list(channel.stream_stream(m.MEET)(iter([b"".join(encode(m.SavedRounds(rounds=())))])))
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "only the fed server may come in here" in str(error.value.details())


NOISE: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(100_000),
    "a hello in the clear": b"".join(encode(hello("ann"))),
    "half a handshake": bytes.fromhex("16030100c8010000c4030300"),
}


@pytest.mark.parametrize("noise", NOISE)
def test_a_stranger_wants_a_server_to_crash_on_noise(noise: str, target: Target) -> None:
    host, port = target.address.rsplit(":", 1)
    for _ in range(20):
        with closing(socket.create_connection((host, int(port)))) as line, suppress(OSError):
            line.sendall(NOISE[noise])
    assert "is not in this server's list" in turned_away(target.address, signed(folder() / "keys", "mal"), "mal")


def test_a_stranger_wants_the_memory_of_a_server_by_noise(target: Target) -> None:
    process = psutil.Process(target.server.pid)
    before = process.memory_info().rss
    host, port = target.address.rsplit(":", 1)
    for _ in range(50):
        with closing(socket.create_connection((host, int(port)))) as line, suppress(OSError):
            line.sendall(bytes(2**20))
    assert process.memory_info().rss - before < 50 * 2**20


# -- at the device -------------------------------------------------------------------------------------------------


def joined(target: Target, server: EvilServer) -> str:
    """Return the last words of a device that was sent to a false server."""
    keys = folder() / "keys"
    target.devices.order(Devices(address=server.address, keys=keys, names=NAMES[:1], gives_up_after=0.2))
    _, words = target.devices.hear("left")
    server.close()
    assert not server.greeted
    return str(words)


def test_a_stranger_wants_to_pass_for_the_server_of_a_device(target: Target) -> None:
    false = Credentials.load(target.stranger / "train")
    assert NOT_TRUSTED in joined(target, EvilServer(false, TWO))


def test_a_stranger_wants_a_device_to_speak_in_plaintext(target: Target) -> None:
    assert PLAINTEXT in joined(target, EvilServer(None, TWO))


def test_a_fed_server_wants_to_pass_for_the_training_server(target: Target) -> None:
    assert "no connection to" in joined(target, EvilServer(credentials("fed"), TWO))


def test_a_client_wants_to_pass_for_the_training_server(target: Target) -> None:
    own = credentials("bob")
    assert "no connection to" in joined(target, EvilServer(replace(own, role="server"), TWO))


# -- between them --------------------------------------------------------------------------------------------------


@dataclass
class Tap:
    """A proxy that hears everything, and may change it."""

    to: str
    change: Callable[[bytes], bytes] = lambda raw: raw
    heard: list[bytes] = field(default_factory=list)
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")

    @contextmanager
    def open(self) -> Iterator["Tap"]:
        host, port = self.address.rsplit(":", 1)
        with closing(socket.create_server((host, int(port)))) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield self

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                host, port = self.to.rsplit(":", 1)
                far = socket.create_connection((host, int(port)))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=ends, daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while raw := source.recv(65536):
                self.heard.append(raw)
                sink.sendall(self.change(raw))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_the_network_wants_to_replay_what_it_has_heard(target: Target) -> None:
    with Tap(target.address).open() as tap:
        turned_away(tap.address, signed(folder() / "keys", "mal"), "mal")
    host, port = target.address.rsplit(":", 1)
    with closing(socket.create_connection((host, int(port)))) as line:
        line.settimeout(5)
        with suppress(OSError):
            line.sendall(b"".join(tap.heard))
            while line.recv(65536):
                pass
    assert "is not in this server's list" in turned_away(target.address, signed(folder() / "keys", "mal"), "mal")


class Flips:
    """Flips a bit of the first few longer packets, in handshakes, each of which ends its connection."""

    def __init__(self) -> None:
        self.left = 3

    def __call__(self, raw: bytes) -> bytes:
        if len(raw) < 300 or not self.left:
            return raw
        self.left -= 1
        return raw[:250] + bytes([raw[250] ^ 1]) + raw[251:]


def test_the_network_wants_to_read_and_to_change_what_is_sent_and_the_run_ends_with_the_numbers_of_loop(
    target: Target, tmp_path: Path
) -> None:
    """After all attacks of this file on the same server."""
    flips = Flips()
    with Tap(target.address, flips).open() as tap:
        keys = folder() / "keys"
        target.devices.order(Devices(address=target.address, keys=keys, names=NAMES[:2], state=tmp_path))
        target.devices.order(Devices(address=tap.address, keys=keys, names=NAMES[2:], state=tmp_path))
        status, _ = target.server.hear("served")
        assert sorted(target.devices.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    assert [c.state for c in status.clients.values()] == ["done"] * 3
    assert status.refused_connections >= 8 and not flips.left
    assert outcome(target.order.folder) == simulated(TWO, tmp_path / "simulated")
    everything = b"".join(tap.heard)
    assert len(everything) > 20_000
    for word in (b"digits", b"hello", b"welcome", b"CUT", b"client.forward", b"activations"):
        assert word not in everything
