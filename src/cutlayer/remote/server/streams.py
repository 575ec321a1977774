"""The server's end of gRPC: one bidirectional stream a client, let in by its certificate before anything is read."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from cutlayer.errors import ConfigError, LinkError, WireError
from cutlayer.remote.identity.certificates import Credentials, grpc_server_credentials, identity_of
from cutlayer.remote.protocol.messages import (
    MOST_BYTES,
    PROTOCOL,
    SERVICE,
    Answer,
    Bye,
    Denied,
    Done,
    FromClient,
    FromPeer,
    Hello,
    Message,
    Packing,
    Ready,
    Refusal,
    Welcome,
)
from cutlayer.remote.server.peer import NoPeer, Peer
from cutlayer.remote.server.sessions import REPLACED, Answered, ClientSession, Sessions
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, Decoder, encode
from cutlayer.version import __version__

log = logging.getLogger("cutlayer")

HELLO_SECONDS, READY_SECONDS = 30.0, 600.0  # a device may have much to load
GOODBYE_SECONDS = 5.0  # for a client to hear a farewell
CLIENT_HEADER = 2**20  # bytes of the longest header that a client needs
MORE_STREAMS = 64  # beyond one for each client: those that are being refused, or replaced


class JoinWatcher(Protocol):
    """Told of clients that join or are refused."""

    def joined(self, number: int, name: str, samples: int) -> None: ...

    def refused(self, number: int, reason: str) -> None: ...

    def refused_connection(self, reason: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What decides whether a client may join, and what it is told when it does."""

    sessions: Sessions
    run: str  # the configuration, as TOML
    number_of: Callable[[str], int]  # of a client's name; LinkError if it may not come in
    check: Callable[[Ready], None]  # LinkError if its data do not fit the run
    plugins: Mapping[str, str]
    watcher: JoinWatcher
    secure: bool
    packing: Packing = "raw"
    peer: Peer | NoPeer = field(default_factory=NoPeer)  # the other server
    most_bytes: int = 0  # of what a client delivers when another server has told it to
    pending: dict[int, "ClientStream"] = field(
        default_factory=dict
    )  # the last stream of each client that is not ready yet, by number


def listen(address: str, credentials: Credentials | None, admission: Admission, most_clients: int) -> tuple[Any, int]:
    """A running gRPC server and its port; without credentials it is open to everybody who can reach it."""
    import grpc

    server = grpc.server(
        ThreadPoolExecutor(max_workers=most_clients + MORE_STREAMS, thread_name_prefix="stream"),
        options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)],
        maximum_concurrent_rpcs=most_clients + MORE_STREAMS,
    )
    join = grpc.stream_stream_rpc_method_handler(lambda requests, context: _stream(admission, requests, context))
    meet = grpc.stream_stream_rpc_method_handler(lambda requests, context: _peer_stream(admission, requests, context))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Join": join, "Meet": meet}),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, grpc_server_credentials(credentials))
    except RuntimeError:
        port = 0
    if not port:
        raise ConfigError(f"cannot listen on {address}: it is in use, or not an address of this machine")
    server.start()
    return server, port


def _stream(admission: Admission, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """One client's stream: what is yielded goes to it."""
    import grpc

    try:
        name = _certified(admission, context)
    except LinkError as error:
        admission.watcher.refused_connection(f"{context.peer()}: {error}")
        context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
    return ClientStream(admission, requests, context, name).run()


def _peer_stream(admission: Admission, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    """The stream of the fed server."""
    import grpc

    peer = admission.peer
    try:
        if isinstance(peer, NoPeer):
            raise LinkError("this server holds both roles; start it with --role train")
        if admission.secure and identity_of(context.auth_context()).name != "fed":
            raise LinkError("only the fed server may come in here")
    except LinkError as error:
        admission.watcher.refused_connection(f"{context.peer()}: {error}")
        context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
    out: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
    context.add_callback(lambda: out.put(None))
    threading.Thread(target=follow_peer, args=(peer, requests, out), name="peer", daemon=True).start()
    while (chunks := out.get()) is not None:
        yield from chunks


def follow_peer(peer: Peer, chunks: Iterator[bytes], out: "queue.SimpleQueue[list[bytes] | None]") -> None:
    """Everything that the other server says, until it is gone."""
    link_number = peer.connected(lambda message, tensors: out.put(encode(message, tensors)), lambda: out.put(None))
    decoder, reason = Decoder(FromPeer, MOST_BYTES), "the other server closed the connection"
    try:
        for chunk in chunks:
            come = decoder.feed(chunk)
            if come is not None:
                peer.took(*come)
    except WireError as error:
        reason = f"the other server sent something that cannot be used: {error}"
    except Exception as error:  # gRPC's own errors when a peer vanishes have no common class
        reason = f"the connection to the other server broke: {type(error).__name__}"
    peer.gone(link_number, reason)
    out.put(None)


def _certified(admission: Admission, context: Any) -> str | None:
    """The name in the certificate, of one who may come in; None where there are no certificates."""
    if not admission.secure:
        return None
    who = identity_of(context.auth_context())
    if who.role != "client":
        raise LinkError(f"{who.name!r} is the certificate of a server, not of a client")
    admission.number_of(who.name)
    return who.name


class ClientStream:
    """The stream of one client, from its Hello to the end of its session."""

    def __init__(self, admission: Admission, requests: Iterator[bytes], context: Any, name: str | None) -> None:
        self.admission, self.requests, self.context, self.name = admission, requests, context, name
        self.out: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        self.size = 0  # bytes of the message that is coming
        self.session_number: int | None = None
        self.number = -1
        self.session: ClientSession | None = None
        most = lambda: 0 if self.session is None else self.session.most_bytes  # noqa: E731
        self.decoder = Decoder(FromClient, most, CLIENT_HEADER)
        self._patience = threading.Timer(0.0, lambda: None)
        context.add_callback(self._gone)

    def run(self) -> Iterator[bytes]:
        threading.Thread(target=self._listen, name="client stream", daemon=True).start()
        while (chunks := self.out.get()) is not None:
            yield from chunks

    def _listen(self) -> None:
        """Everything that the client says, until it leaves or says something that cannot be."""
        self._wait(HELLO_SECONDS, "no greeting came within {:g} seconds")
        try:
            for chunk in self.requests:
                self.size += len(chunk)
                come = self.decoder.feed(chunk)
                if come is not None:
                    self._heard(*come)
                    self.size = 0
            self.decoder.end()
            self._over("it closed the connection")
        except WireError as error:
            self._misbehaved(str(error))
        except LinkError as error:
            self._deny(str(error), final=True)
        except Exception as error:  # gRPC's own errors when a peer vanishes have no common class
            self._over(f"the connection broke: {type(error).__name__}")

    def _gone(self) -> None:
        self._patience.cancel()
        self._over("the connection is gone")

    def _wait(self, seconds: float, complaint: str) -> None:
        """Turn the client away if nothing comes of it."""
        self._later(seconds, lambda: self._deny(complaint.format(seconds)))

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do this instead of what was to be done later, unless the connection is gone before."""
        self._patience.cancel()
        self._patience = threading.Timer(seconds, action)
        self._patience.daemon = True
        self._patience.start()
        if not self.context.is_active():
            self._patience.cancel()

    def _heard(self, message: Message, tensors: Sequence[Tensor]) -> None:
        match message:
            case Hello() if self.session_number is None:
                self._greet(message)
            case Ready() if self.session is None and message.session == self.session_number:
                self._let_in(message)
            case Answer() | Refusal() if self.session is not None and message.session == self.session_number:
                if self.session.expects(message):  # what is late, or comes twice, goes no further
                    self.admission.sessions.take(
                        Answered(self.session.client, self.session.number, message, tensors, self.size)
                    )
            case Bye(reason):
                self._over(f"it left: {reason}")
            case _:
                raise WireError(f"a {type(message).__name__} came where it does not belong")

    def _greet(self, hello: Hello) -> None:
        if self.name is not None and hello.name != self.name:
            raise LinkError(f"the certificate is of {self.name!r}, but the client says that it is {hello.name!r}")
        self.name, self.number = hello.name, self.admission.number_of(hello.name)
        _check_version(hello)
        _check_plugins(hello.plugins, self.admission.plugins)
        self.session_number = self.admission.sessions.new_session()
        welcome = Welcome(
            session=self.session_number, client=self.number, run=self.admission.run, packing=self.admission.packing
        )
        self.out.put(encode(welcome))
        self._wait(READY_SECONDS, "it was not ready within {:g} seconds")
        other = self.admission.pending.pop(self.number, None)
        self.admission.pending[self.number] = self
        if other is not None and other.session is None:  # a client has one pending stream
            other._deny("the same client has come again")

    def _let_in(self, ready: Ready) -> None:
        self.admission.check(ready)
        self._patience.cancel()
        name = self.name or ""
        self.session = ClientSession(
            client=self.number,
            name=name,
            number=ready.session,
            samples=ready.samples,
            kept=ready.kept,
            transmit=self._send,
            close=self._farewell,
            largest=self.admission.most_bytes,
            commands=self.admission.peer.commands,
        )
        self.admission.watcher.joined(self.number, name, ready.samples)
        self.admission.sessions.join(self.session)

    def _send(self, work: Message, tensors: Sequence[Tensor]) -> int:
        chunks = encode(work, tensors)
        self.out.put(chunks)
        return sum(map(len, chunks))

    def _farewell(self, reason: str) -> None:
        """After a Bye the client comes back; any other word is for good."""
        words = {OVER: Done(reason), REPLACED: Denied(reason, final=True)}.get(reason, Bye(reason[:2000]))
        self.out.put(encode(words))
        self._end()

    def _misbehaved(self, reason: str) -> None:
        if self.session is None:
            self._deny(reason)
        else:
            self.admission.watcher.refused(self.session.client, reason)
            self.admission.sessions.leave(self.session.client, self.session.number, f"refused: {reason}")

    def _deny(self, reason: str, final: bool = False) -> None:
        self.admission.watcher.refused_connection(f"{self.name or self.context.peer()}: {reason}")
        self.out.put(encode(Denied(reason[:2000], final)))
        self._end()

    def _end(self) -> None:
        """Close the stream, also of a client that does not listen."""
        self.out.put(None)
        self._later(GOODBYE_SECONDS, self.context.cancel)

    def _over(self, reason: str) -> None:
        if self.session is not None:
            self.admission.sessions.leave(self.session.client, self.session.number, reason)
        self.out.put(None)


OVER = "the run is over"


def _check_version(hello: Hello) -> None:
    if hello.protocol != PROTOCOL:
        raise LinkError(
            f"the client speaks protocol {hello.protocol} (cutlayer {hello.version}) and this server {PROTOCOL} "
            f"(cutlayer {__version__}); install the same version on both"
        )


def _check_plugins(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Both sides need the same files, under whatever names."""
    for name, digest in ours.items():
        if name in theirs and theirs[name] != digest:
            raise LinkError(f"the plugin {name} is not the same on both sides; copy the server's to the client")
        if digest not in theirs.values():
            raise LinkError(f"this run needs the plugin {name}; join with --plugin {name}")
    for name, digest in theirs.items():
        if digest not in ours.values():
            raise LinkError(f"the client has the plugin {name}, which this run does not use; leave it out")
