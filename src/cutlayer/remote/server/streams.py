"""The server's end of gRPC: a bidirectional stream for each client, whose certificate is checked first."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from cutlayer.errors import ConfigError, LinkError, UsageError, WireError
from cutlayer.remote.identity.certificates import Credentials, grpc_server_credentials, identity_of
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.server.ceilings import MOST_STREAMS, Ceilings, OpenStreams
from cutlayer.remote.server.handshakes import Handshakes
from cutlayer.remote.server.peer import NoPeer, Outbox, Peer
from cutlayer.remote.server.sessions import REPLACED, Answered, ClientSession, Sessions
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, Decoder, encode
from cutlayer.version import __version__

HELLO_SECONDS, READY_SECONDS = 10.0, 600.0  # a device may take long to load its data
GOODBYE_SECONDS = 5.0  # for a client to read the last message
CLIENT_HEADER = 2**20  # bytes of the longest header that a client may send
MORE_STREAMS = 64  # beyond one for each client: for those that are refused or replaced
IDLE_SECONDS = 20.0  # that a connection may last without a stream
UNSURE = "the server cannot tell whether this client may join; its own log says why"


@dataclass(frozen=True, kw_only=True)
class Admission:
    """What decides whether a client may join, and what a client that joins is told."""

    sessions: Sessions
    run: str  # the configuration, as TOML
    number_of: Callable[[str], int]  # of a client's name; LinkError if the client may not join
    check: Callable[[str, m.Ready], None]  # takes the client's name; LinkError if its data do not fit the run
    plugins: Mapping[str, str]
    watcher: Board
    secure: bool
    peer: Peer | NoPeer = field(default_factory=NoPeer)  # the other server
    most_bytes: int = 0  # of a delivery that the other server has told a client to send
    pending: dict[int, "ClientStream"] = field(default_factory=dict)  # each client's last stream that is not ready yet
    ceilings: Ceilings = field(default_factory=Ceilings)
    open_streams: OpenStreams = field(default_factory=OpenStreams)
    handshakes: Handshakes = field(default_factory=Handshakes)


def listen(address: str, credentials: Credentials | None, admission: Admission, most_clients: int) -> tuple[Any, int]:
    """Start a gRPC server and return it with its port; without credentials it is open to everybody."""
    import grpc

    ceilings = admission.ceilings
    server = grpc.server(
        ThreadPoolExecutor(max_workers=most_clients + MORE_STREAMS, thread_name_prefix="stream"),
        options=[
            *CHANNEL_OPTIONS,
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", ceilings.most_connections(most_clients)),
            ("grpc.server_handshake_timeout_ms", round(ceilings.handshake * 1000)),
            ("grpc.max_connection_idle_ms", round(IDLE_SECONDS * 1000)),
        ],
        maximum_concurrent_rpcs=most_clients + MORE_STREAMS,
    )
    handlers = {
        name: grpc.stream_stream_rpc_method_handler(partial(_opened, opener, admission))
        for name, opener in (("Join", _client_stream), ("Meet", _peer_stream))
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(m.SERVICE, handlers),))
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, grpc_server_credentials(credentials, admission.handshakes.begun))
    except RuntimeError:
        raise ConfigError(f"cannot listen on {address}: it is in use, or not an address of this machine") from None
    admission.handshakes.port = port
    server.start()
    return server, port


def _opened(
    opener: Callable[..., Iterator[bytes]], admission: Admission, requests: Iterator[bytes], context: Any
) -> Iterator[bytes]:
    """Return what goes to the other end of a stream, or abort the stream if it may not be opened."""
    import grpc

    peer = context.peer()
    admission.handshakes.opened(peer)
    if not context.add_callback(lambda: admission.handshakes.closed(peer)):
        admission.handshakes.closed(peer)
    try:
        stream = opener(admission, requests, context)
    except LinkError as error:
        admission.watcher.refused_connection(f"{peer}: {error}")
        context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
    except Exception as error:  # such as a damaged list of clients; what is wrong here is not for a client to know
        admission.watcher.refused_connection(f"{peer}: {error}")
        context.abort(grpc.StatusCode.UNAVAILABLE, UNSURE)
    return stream


def _client_stream(admission: Admission, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    if not admission.secure:
        return ClientStream(admission, requests, context, None).run()
    who = identity_of(context.auth_context())
    if who.role != "client":
        raise LinkError(f"{who.name!r} is the certificate of a server, not of a client")
    admission.number_of(who.name)
    return ClientStream(admission, requests, context, who.name).run()


def _peer_stream(admission: Admission, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
    if admission.secure and identity_of(context.auth_context()).name != "fed":
        raise LinkError("only the fed server may come in here")
    return admission.peer.stream(requests, context)


class ClientStream:
    """The stream of one client, from its Hello to the end of its session."""

    def __init__(self, admission: Admission, requests: Iterator[bytes], context: Any, name: str | None) -> None:
        self.admission, self.requests, self.context, self.name = admission, requests, context, name
        self.out = Outbox()
        self.session_number: int | None = None
        self.number = -1
        self.session: ClientSession | None = None
        self.returns = True  # whether the client may come back after its session
        self.decoder = Decoder(m.FromClient, lambda: self.session.most_bytes if self.session else 0, CLIENT_HEADER)
        self._timer = threading.Timer(0.0, lambda: None)
        if name is not None and (other := admission.open_streams.enter(name, self)):
            other.give_way(f"it has more than {MOST_STREAMS} streams at once; the oldest has to end")
        if not context.add_callback(self._gone):
            self._gone()

    def give_way(self, reason: str) -> None:
        """End at once: whoever opens too many streams is not waited for to read why."""
        self.admission.watcher.refused_connection(f"{self.name}: {reason}")
        self.context.cancel()

    def run(self) -> Iterator[bytes]:
        """Start to read what the client sends; yield what goes to it."""
        threading.Thread(target=self._listen, name="client stream", daemon=True).start()
        return chain.from_iterable(iter(self.out.get, None))

    def _listen(self) -> None:
        """Read everything that the client sends, until it leaves or breaks the protocol."""
        self._later(HELLO_SECONDS, lambda: self._deny(f"no greeting came within {HELLO_SECONDS:g} seconds"))
        try:
            for chunk in self.requests:
                if (come := self.decoder.feed(chunk)) is not None:
                    self._heard(*come)
            self.decoder.end()
            self._over("it closed the connection")
        except WireError as error:
            self._misbehaved(str(error))
        except LinkError as error:
            self._deny(str(error), final=True)
        except (UsageError, OSError, RuntimeError) as error:  # such as a damaged list of clients, or no more threads
            self._deny(str(error), told=UNSURE)
        except Exception as error:  # gRPC's own errors when a peer vanishes have no common class
            self._over(f"the connection broke: {type(error).__name__}")

    def _gone(self) -> None:
        self._timer.cancel()
        self.admission.open_streams.leave(self.name or "", self)
        self._over("the connection is gone")

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        """Replace the timer: do this later, unless the connection is gone before."""
        self._timer.cancel()
        self._timer = threading.Timer(seconds, action)
        self._timer.daemon = True
        self._timer.start()
        if not self.context.is_active():
            self._timer.cancel()

    def _heard(self, message: m.Message, tensors: Sequence[Tensor]) -> None:
        match message:
            case m.Hello() if self.session_number is None:
                self._greet(message)
            case m.Ready() if self.session is None and message.session == self.session_number:
                self._let_in(message)
            case m.Answer() | m.Refusal() if self.session is not None and message.session == self.session_number:
                if self.session.expects(message):  # late answers and duplicates are dropped
                    answered = Answered(self.number, message.session, message, tensors, self.decoder.size)
                    self.admission.sessions.take(answered)
            case m.Bye(reason):
                self._over(f"it left: {reason}")
            case _:
                raise WireError(f"a {type(message).__name__} came where it does not belong")

    def _greet(self, hello: m.Hello) -> None:
        if self.name is not None and hello.name != self.name:
            raise LinkError(f"the certificate is of {self.name!r}, but the client says that it is {hello.name!r}")
        self.name, self.number = hello.name, self.admission.number_of(hello.name)
        _check_version(hello)
        _check_plugins(hello.plugins, self.admission.plugins)
        self.session_number = self.admission.sessions.new_session()
        welcome = m.Welcome(session=self.session_number, client=self.number, run=self.admission.run)
        self._send(welcome)
        self._later(READY_SECONDS, lambda: self._deny(f"it was not ready within {READY_SECONDS:g} seconds"))
        other = self.admission.pending.pop(self.number, None)
        self.admission.pending[self.number] = self
        if other is not None:  # a client has one pending stream
            other._deny("the same client has come again")

    def _let_in(self, ready: m.Ready) -> None:
        self.admission.check(self.name or "", ready)
        self._was_pending()
        self._timer.cancel()
        self.session = ClientSession(
            client=self.number,
            name=self.name or "",
            number=ready.session,
            samples=ready.samples,
            tests=ready.tests,
            kept=ready.kept,
            transmit=self._send,
            close=self._farewell,
            largest=self.admission.most_bytes,
            commands=self.admission.peer.commands,
        )
        self.admission.watcher.joined(self.number, self.session.name, ready.samples)
        self.admission.sessions.join(self.session)

    def _send(self, message: m.Message, tensors: Sequence[Tensor] = ()) -> int:
        try:
            chunks = encode(message, tensors)
        except WireError as error:  # too long: the fewer samples a client has, the shorter
            self._lose(f"what it has to do cannot be sent to it: {error}")
            return 0
        self.out.put(chunks)
        return sum(map(len, chunks))

    def _lose(self, reason: str) -> None:
        """End the session for good."""
        if self.session is not None:
            self.admission.watcher.refused(self.number, reason)
            self.returns = False
            self.admission.sessions.leave(self.number, self.session.number, reason)

    def _farewell(self, reason: str) -> None:
        """Say why the session ends: after a Bye the client comes back, after anything else it does not."""
        if reason == OVER:
            self._end(m.Done(reason))
        elif reason == REPLACED or not self.returns or not self._is_listed():
            self._end(m.Denied(reason[:2000], final=True))
        else:
            self._end(m.Bye(reason[:2000]))

    def _is_listed(self) -> bool:
        """Return whether the client may come back, as far as the list can be read."""
        try:
            self.admission.number_of(self.name or "")
        except LinkError:
            return False
        except UsageError:
            pass
        return True

    def _was_pending(self) -> bool:
        """Note that the stream does not wait for its client to be ready any more; return whether it did."""
        pending = self.admission.pending
        return pending.get(self.number) is self and pending.pop(self.number, None) is self

    def _misbehaved(self, reason: str) -> None:
        if self.session is None:
            self._deny(reason)
        else:
            self.admission.watcher.refused(self.number, reason)
            self.admission.sessions.leave(self.number, self.session.number, f"refused: {reason}")

    def _deny(self, reason: str, final: bool = False, told: str = "") -> None:
        """Refuse the client; `told` is what it is told instead of the reason."""
        self._was_pending()
        self.admission.watcher.refused_connection(f"{self.name or self.context.peer()}: {reason}")
        self._end(m.Denied((told or reason)[:2000], final))

    def _end(self, words: m.Message) -> None:
        """Close the stream with these words, even if the client does not read."""
        self._send(words)
        self.out.put(None)
        self._later(GOODBYE_SECONDS, self.context.cancel)

    def _over(self, reason: str) -> None:
        if self.session is not None:
            self.admission.sessions.leave(self.number, self.session.number, reason)
        elif self._was_pending():
            self.admission.watcher.left_early(self.name or "", reason)
        self.out.put(None)


OVER = "the run is over"


def _check_version(hello: m.Hello) -> None:
    if hello.protocol != m.PROTOCOL:
        raise LinkError(
            f"the client speaks protocol {hello.protocol} (cutlayer {hello.version}) and this server {m.PROTOCOL} "
            f"(cutlayer {__version__}); install the same version on both"
        )


def _check_plugins(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Refuse a client whose plug-in files differ from the server's; their names may differ."""
    for name, digest in ours.items():
        if name in theirs and theirs[name] != digest:
            raise LinkError(f"the plugin {name} is not the same on both sides; copy the server's to the client")
        if digest not in theirs.values():
            raise LinkError(f"this run needs the plugin {name}; join with --plugin {name}")
    for name, digest in theirs.items():
        if digest not in ours.values():
            raise LinkError(f"the client has the plugin {name}, which this run does not use; leave it out")
