"""Specifies which clients a server admits, and that harmful messages are refused and counted."""

import queue
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import psutil
import pytest
import torch
from device_pool import Pool, Served, shared
from test_grpc import opened
from test_grpc_faults import NAMES, RUN, devices, outcome, serving, simulated
from test_wire_fuzz import HARM, NOISE, SENT
from torch import Tensor

import cutlayer
from cutlayer.remote.device import client
from cutlayer.remote.device.session import Reply, Session, forms_of
from cutlayer.remote.device.stream import Stream, StreamEnded, channel_to
from cutlayer.remote.identity.authority import issue
from cutlayer.remote.identity.certificates import Credentials, Identity
from cutlayer.remote.identity.key_folder import read_ca, revoke
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.remote.monitor.status import Board, RunStatus
from cutlayer.remote.protocol.messages import (
    JOIN,
    PROTOCOL,
    Answer,
    FromClient,
    FromServer,
    Hello,
    Ready,
    TensorForm,
    Welcome,
    Work,
)
from cutlayer.remote.server import streams
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import OVER
from cutlayer.remote.tensors.wire import CHUNK, Decoder, encode
from cutlayer.runs import build


@pytest.fixture
def pool() -> Pool:
    return shared()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "ca"
    trial(folder, clients=",".join([*NAMES, "old"]))
    revoke(folder, ["old"])
    return folder


def hello(name: str) -> Hello:
    return Hello(protocol=PROTOCOL, version=cutlayer.__version__, name=name, plugins={})


# -- who may come in -------------------------------------------------------------------------------


@pytest.fixture
def board() -> Board:
    return Board(name="sfl_v1", method="sfl_v1", rounds=2)


@pytest.fixture
def fed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that any server's decoder is given."""
    sizes: list[int] = []
    feed = Decoder.feed

    def counted(self: Decoder, chunk: bytes) -> Any:
        sizes.append(len(chunk))
        return feed(self, chunk)

    monkeypatch.setattr(streams.Decoder, "feed", counted)
    return sizes


def signed(folder: Path, name: str, days: float = 1, ca: Path | None = None) -> Credentials:
    """A certificate that the CA of one folder signs, shown by one who trusts that of another."""
    pair = issue(read_ca(ca or folder), Identity.named(name), days)
    trusted = (folder / "ca.pem").read_bytes()
    ends = pair.certificate.not_valid_after_utc
    return Credentials(
        ca=trusted,
        certificate=pair.certificate_pem,
        key=pair.key_pem,
        name=name,
        role=Identity.named(name).role,
        expires=ends,
    )


def turned_away(address: str, credentials: Credentials | None, name: str) -> StreamEnded:
    """The reason that a refused client receives."""
    stream = Stream(address, "train", credentials)
    stream.say(hello(name))
    try:
        with pytest.raises(StreamEnded) as left:
            list(stream)
    finally:
        stream.close()
    return left.value


# What a client is told; the server's side is in gRPC's own log.
HUNG_UP = "it hung up at once; perhaps it does not accept this device's certificate, or wants one"
NOT_TRUSTED = "its certificate is not of the CA that this device trusts, or has expired"
PLAINTEXT = "it shows no certificate; perhaps it was started with --insecure"


@pytest.mark.parametrize(
    ("who", "words", "why"),
    [
        ("wrong CA", NOT_TRUSTED, "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"),
        ("signed by another CA", HUNG_UP, "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate"),
        ("expired", HUNG_UP, "CERTIFICATE_VERIFY_FAILED: certificate has expired"),
        ("plaintext", HUNG_UP, "WRONG_VERSION_NUMBER"),
    ],
)
def test_nothing_is_read_from_those_who_fail_the_handshake(
    who: str,
    words: str,
    why: str,
    keys: Path,
    board: Board,
    fed_bytes: list[int],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = tmp_path / "other"
    trial(other, clients="ann")
    shown: dict[str, Callable[[], Credentials | None]] = {
        "wrong CA": lambda: Credentials.load(other / "clients" / "ann"),
        "signed by another CA": lambda: signed(keys, "ann", ca=other),
        "expired": lambda: signed(keys, "ann", days=-1),
        "plaintext": lambda: None,
    }
    with opened("sfl_v1", "two-part", keys, board) as (there, address):
        left = turned_away(address, shown[who](), "ann")
        assert str(left) == f"no connection to {address}: {words}"
        assert left.raw.startswith("failed to connect to all addresses; ")
        assert not there.backend.sessions.present()
    assert fed_bytes == []
    assert why in capfd.readouterr().err


def test_nothing_is_read_from_one_without_a_certificate(
    keys: Path, board: Board, fed_bytes: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    only_ca = grpc.ssl_channel_credentials((keys / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "train.cutlayer.internal")]
    with (
        opened("sfl_v1", "two-part", keys, board) as (_, address),
        grpc.secure_channel(address, only_ca, options=options) as channel,
        pytest.raises(grpc.RpcError) as error,
    ):
        list(channel.stream_stream(JOIN)(iter([b"CUT"])))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert fed_bytes == []
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in capfd.readouterr().err


def test_a_client_with_certificates_says_nothing_to_a_server_without_any(
    keys: Path, board: Board, fed_bytes: list[int]
) -> None:
    admission = streams.Admission(
        sessions=Sessions(),
        run="",
        number_of=lambda name: 0,
        check=lambda name, ready: None,
        plugins={},
        watcher=board,
        secure=False,
    )
    server, port = streams.listen("127.0.0.1:0", None, admission, 1)
    left = turned_away(f"127.0.0.1:{port}", Credentials.load(keys / "clients" / "ann"), "ann")
    server.stop(None).wait(2)
    assert str(left) == f"no connection to 127.0.0.1:{port}: {PLAINTEXT}"
    assert left.raw.startswith("failed to connect to all addresses; ")
    assert fed_bytes == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("old", "client 'old' was revoked; to take part again it needs a certificate under a new name"),
        (
            "mallory",
            "client 'mallory' is not in this server's list of clients; sign its request with `cutlayer keys sign` and "
            "copy the new clients.toml to the servers",
        ),
        ("fed", "'fed' is the certificate of a server, not of a client"),
    ],
)
def test_nothing_is_read_from_those_who_are_not_on_the_list(
    name: str, why: str, keys: Path, board: Board, fed_bytes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with opened("sfl_v1", "two-part", keys, board) as (_, address):
        left = turned_away(address, signed(keys, name), name)
    assert (str(left), left.again) == (f"refused by the server: {why}", False)
    assert fed_bytes == []
    assert board.snapshot().refused_connections == 1
    (refused,) = [record for record in caplog.records if record.getMessage().startswith("connection refused")]
    assert why in refused.getMessage()


def test_nobody_takes_the_name_of_another(keys: Path, board: Board, caplog: pytest.LogCaptureFixture) -> None:
    with opened("sfl_v1", "two-part", keys, board) as (there, address):
        left = turned_away(address, Credentials.load(keys / "clients" / "bob"), "ann")
        assert not there.backend.sessions.present()
    why = "the certificate is of 'bob', but the client says that it is 'ann'"
    assert (str(left), left.again) == (f"refused by the server: {why}", False)
    assert board.snapshot().refused_connections == 1


# -- what a client that may come in can do ---------------------------------------------------------

Twist = Callable[[Stream, Reply], None]
AT = 2  # the request that is answered otherwise: the second mini-batch of the first round


def take_part(address: str, keys: Path, twist: Twist) -> str:
    """Join as eve, who answers one request maliciously; return the server's last message."""
    stream = Stream(address, "train", Credentials.load(keys / "clients" / "eve"))
    stream.say(hello("eve"))
    stream.most = (2**20, 2**20)
    settings = DeviceSettings(data="digits")
    try:
        for message, tensors in stream:
            if isinstance(message, Welcome):
                session = Session(settings.ready(message), message.session)
                stream.say(client._ready(session.device, message.session))
            elif isinstance(message, Work):
                reply = session.work(message, tensors)
                assert reply is not None
                if message.number == AT:
                    twist(stream, reply)
                else:
                    stream.say(reply.message, reply.tensors)
    except StreamEnded as left:
        return str(left)
    finally:
        stream.close()
    return OVER


def with_eve(twist: Twist, pool: Pool, keys: Path, path: Path) -> tuple[dict[str, bytes], RunStatus, str]:
    """Run with a malicious eve; return what the run leaves, the final status, and the server's last message to her."""
    order = Served(run=replace(RUN, rounds=2), folder=path / "served", serving=serving(keys, patience=0.3))
    with pool.some(2) as (server, clients):
        server.order(order)
        server.hear("open")
        clients.order(devices(order, keys, path / "state", NAMES[:2]))
        words = take_part(order.serving.listen, keys, twist)
        status, _ = server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES[:2]) == [(name, OVER) for name in NAMES[:2]]
    return outcome(order.folder), status, words


def saying(change: Callable[[Tensor, Tensor], list[Tensor]]) -> Twist:
    """Other activations and labels than those that were asked for."""
    return lambda stream, reply: stream.say(reply.message, change(*reply.tensors))


def with_nan(z: Tensor, y: Tensor) -> list[Tensor]:
    z = z.clone()
    z.view(-1)[7] = torch.nan
    return [z, y]


def with_label(label: int) -> Twist:
    return saying(lambda z, y: [z, torch.full_like(y, label)])


def in_another_session(stream: Stream, reply: Reply) -> None:
    other = msgspec.structs.replace(reply.message, session=reply.message.session + 1)
    stream.say(other, reply.tensors)


def leave(stream: Stream, reply: Reply) -> None:
    stream.close()


HARMFUL: dict[str, tuple[Twist, str]] = {
    "NaN": (saying(with_nan), "what came as activations is not finite"),
    "shape": (
        saying(lambda z, y: [z.flatten(1), y]),
        "the activations have the type float32 and the shape (8, 32), but float32 and (8, 2, 4, 4) were asked for",
    ),
    "type": (
        saying(lambda z, y: [z.bfloat16(), y]),
        "the activations have the type bfloat16 and the shape (8, 2, 4, 4), but float32 and (8, 2, 4, 4) were asked "
        "for",
    ),
    "label above": (with_label(10), "a label is 10, but there are the classes 0 to 9"),
    "label below": (with_label(-1), "a label is -1, but there are the classes 0 to 9"),
    "fewer": (saying(lambda z, y: [z]), "1 tensors and 0 numbers came, but 2 and 0 were asked for"),
    "too much": (
        saying(lambda z, y: [z.repeat(50, 1, 1, 1), y]),
        "a body of 51264 bytes is too long; at most 1120 are expected now",
    ),
    "another session": (in_another_session, "a Answer came where it does not belong"),
}


@pytest.fixture(scope="module")
def without_eve(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run leaves if eve disconnects at that request."""
    return with_eve(leave, shared(), keys, tmp_path_factory.mktemp("lost"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARMFUL)
def test_a_harmful_answer_is_refused_and_counted_and_its_sender_lost(
    harm: str, pool: Pool, keys: Path, tmp_path: Path, without_eve: dict[str, bytes]
) -> None:
    twist, why = HARMFUL[harm]
    left, status, words = with_eve(twist, pool, keys, tmp_path)
    eve = status.clients[2]
    assert (eve.state, eve.refusals, eve.reason, eve.round_trips) == ("refused", 1, why, 1)
    assert words in (f"the server ended the session: {why}", f"the server ended the session: refused: {why}")
    assert [(c.state, c.refusals) for c in status.clients.values()][:2] == [("done", 0)] * 2
    assert left == without_eve


def twice(stream: Stream, reply: Reply) -> None:
    stream.say(reply.message, reply.tensors)
    stream.say(reply.message, reply.tensors)


def again_after_the_next_letter(stream: Stream, reply: Reply) -> None:
    """That request asks for the client's layers, which take less room than this answer."""
    stream.say(reply.message, reply.tensors)
    time.sleep(0.5)
    stream.say(reply.message, reply.tensors)


def an_old_one_first(stream: Stream, reply: Reply) -> None:
    old = msgspec.structs.replace(reply.message, number=AT - 1)
    stream.say(old, [torch.zeros_like(a) for a in reply.tensors])
    stream.say(reply.message, reply.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("twist", [twice, again_after_the_next_letter, an_old_one_first])
def test_answers_that_are_late_or_come_twice_change_nothing(
    twist: Twist, pool: Pool, keys: Path, tmp_path: Path
) -> None:
    left, status, words = with_eve(twist, pool, keys, tmp_path)
    assert left == simulated(replace(RUN, rounds=2), tmp_path / "simulated")
    assert [(c.state, c.refusals, c.round_trips) for c in status.clients.values()] == [("done", 0, 6)] * 3
    assert words == OVER


# -- noise -----------------------------------------------------------------------------------------

MUTATIONS = NOISE + HARM
MOST_GROWTH = 20 * 2**20
MOST_THREADS = 40
SECONDS = 60.0  # for a server to end a stream
LEFT = ("closed", "welcome", "it closed the connection")


def in_chunks(raw: bytes) -> list[bytes]:
    return [raw[i : i + CHUNK] for i in range(0, len(raw), CHUNK)]


class Noise:
    """Streams of one client over one connection, each with one message that is not what it should be."""

    def __init__(self, channel: grpc.Channel, forms: tuple[TensorForm, ...]) -> None:
        self._channel, self._forms = channel, forms
        self._rng = random.Random(0)

    def __call__(self, number: int) -> tuple[str, str]:
        """The name of the mutation, and what the server says in the end."""
        mutation = MUTATIONS[number % len(MUTATIONS)]
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call, decoder = (
            self._channel.stream_stream(JOIN)(iter(out.get, None), timeout=SECONDS),
            Decoder(FromServer, 0),
        )
        raw = self._rng.choice(SENT[FromClient])
        if number % 2:
            raw = self._let_in(call, decoder, out) if self._rng.random() < 0.5 else raw
        for chunk in in_chunks(mutation(self._rng, raw, self._rng.choice(SENT[FromClient]))):
            out.put(chunk)
        out.put(None)
        said = [message for chunk in call if (come := decoder.feed(chunk)) for message in (come[0],)]
        return mutation.__name__, str(getattr(said[-1], "reason", "welcome")) if said else "closed"

    def _let_in(self, call: Any, decoder: Decoder, out: "queue.SimpleQueue[bytes | None]") -> bytes:
        """Join, and give the bytes of an answer that would be of this session."""
        out.put(b"".join(encode(hello("eve"))))
        welcome = decoder.feed(next(call))
        assert welcome is not None and isinstance(welcome[0], Welcome)
        session = welcome[0].session
        out.put(b"".join(encode(Ready(session=session, samples=100, sample=self._forms, kept=()))))
        answer = Answer(session=session, number=1, token=0, seconds=0.5, numbers=(1, 2.5))
        return b"".join(encode(answer, [torch.ones(3, 5)]))


@pytest.mark.slow
def test_two_thousand_mutated_messages_do_a_server_no_harm(pool: Pool, keys: Path, tmp_path: Path) -> None:
    run = replace(RUN, rounds=1)
    order = Served(run=run, folder=tmp_path / "served", serving=serving(keys))
    forms = forms_of(build.dealt(run).data)
    seen: Counter[tuple[str, str]] = Counter()
    with pool.some(2) as (server, clients):
        server.order(order)
        server.hear("open")
        process = psutil.Process(server.pid)
        with channel_to(order.serving.listen, "train", Credentials.load(keys / "clients" / "eve")) as channel:
            noise = Noise(channel, forms)
            for number in range(2000):
                if number == 200:
                    before = process.memory_info().rss
                mutation, reason = noise(number)
                assert reason
                seen[mutation, reason] += 1
        assert process.memory_info().rss - before < MOST_GROWTH
        assert process.num_threads() < MOST_THREADS
        clients.order(devices(order, keys, tmp_path / "state"))
        status, _ = server.hear("served")
        assert sorted(clients.hear("left") for _ in NAMES) == [(name, OVER) for name in NAMES]
    assert outcome(order.folder) == simulated(run, tmp_path / "simulated")
    # Whoever leaves in the middle of a message has left; all others are told what is wrong, and counted.
    told = {(name, reason): n for (name, reason), n in seen.items() if reason not in LEFT}
    assert {name for name, _ in told} >= {mutation.__name__ for mutation in MUTATIONS} - {"truncate"}
    assert sum(told.values()) > 1800
    assert status.refused_connections + status.clients[2].refusals == sum(told.values())
    assert [c.state for c in status.clients.values()] == ["done"] * 3
