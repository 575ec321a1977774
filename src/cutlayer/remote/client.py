"""A device's end of gRPC: it joins, works, and comes back by itself when the connection or the server is gone."""

import logging
import queue
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlayer
from cutlayer.errors import LinkError, WireError
from cutlayer.kinds import ACTIVATIONS
from cutlayer.remote.certificates import Credentials, secure_channel
from cutlayer.remote.messages import PROTOCOL, Bye, Denied, Done, FromServer, Hello, Packing, Ready, Welcome, Work
from cutlayer.remote.session import Device, Session, forms_of
from cutlayer.remote.streams import METHOD
from cutlayer.remote.wire import CHANNEL_OPTIONS, Decoder, encode

log = logging.getLogger("cutlayer")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts, doubled each time
MOST_BYTES = 2**40  # of one message from a server; memory is taken only for what comes


@dataclass(frozen=True, kw_only=True)
class Guest:
    """Who joins: its name and certificate, and how it makes itself ready for a run."""

    address: str
    name: str
    credentials: Credentials | None
    plugins: dict[str, str]
    ready: Callable[[Welcome], Device]  # a UsageError if it cannot or will not take part
    tells: Callable[[str], None] = log.info
    gives_up_after: float = float("inf")  # seconds without a server


class Left(Exception):
    """The stream has ended; `again` tells whether it is worth coming back."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


def stay(guest: Guest) -> str:
    """Take part until the run is over; the server's last words. LinkError if the server will not have this client."""
    pause, last_seen = FIRST_PAUSE, time.monotonic()
    while True:
        visit = Visit(guest)
        try:
            return visit.run()
        except Left as left:
            if not left.again:
                raise LinkError(str(left)) from None
            reason = str(left)
        finally:
            visit.close()
        if visit.worked:
            pause, last_seen = FIRST_PAUSE, time.monotonic()
        if time.monotonic() - last_seen > guest.gives_up_after:
            raise LinkError(f"no server at {guest.address} for {guest.gives_up_after:g} seconds: {reason}")
        guest.tells(f"{reason}; trying {guest.address} again in {pause:.1f} s")
        time.sleep(pause * random.uniform(0.5, 1.0))  # not all at once when a server comes back
        pause = min(2 * pause, LONGEST_PAUSE)


class Visit:
    """One stream to a server."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.worked = False  # whether the server had any use for it
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = _channel(guest)
        self._call: Any = None

    def run(self) -> str:
        import grpc

        self._say(self._hello())
        self._call = self._channel.stream_stream(METHOD)(iter(self._out.get, None))
        try:
            return self._follow(Decoder(FromServer, MOST_BYTES))
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            again = code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
            raise Left(_in_words(code.name, details, self.guest), again) from None
        except WireError as error:
            raise Left(f"the server sent something that cannot be used: {error}", True) from None

    def _follow(self, decoder: Decoder) -> str:
        session: Session | None = None
        packing: Packing = "raw"
        for chunk in self._call:
            come = decoder.feed(chunk)
            if come is None:
                continue
            match come[0]:
                case Welcome() as welcome:
                    session, packing = Session(self.guest.ready(welcome), welcome.session), welcome.packing
                    self._say(_ready(session))
                case Work() as work if session is not None:
                    self._work(session, work, come[1], packing)
                case Done(reason):
                    return reason
                case Denied(reason, final):
                    raise Left(f"the server refuses this client: {reason}", not final)
                case Bye(reason):
                    raise Left(f"the server says good-bye: {reason}", True)
                case message:
                    raise WireError(f"a {type(message).__name__} came where it does not belong")
        raise Left("the server closed the connection", True)

    def _work(self, session: Session, work: Work, tensors: list[Any], packing: Packing) -> None:
        reply = session.work(work, tensors)
        self.worked = True
        if reply is not None:
            # Only activations are packed: gradients, models and scalars travel as they are.
            how = [packing if kind == ACTIVATIONS.name and t.is_floating_point() else "raw"
                   for t, kind in zip(reply.tensors, reply.kinds, strict=True)]  # fmt: skip
            for chunk in encode(reply.message, reply.tensors, how):
                self._out.put(chunk)
        session.device.vault.save(work.round + 1)

    def _hello(self) -> Hello:
        guest = self.guest
        return Hello(
            protocol=PROTOCOL,
            version=cutlayer.__version__,
            name=guest.name,
            plugins=guest.plugins,
        )

    def _say(self, message: Hello | Ready | Bye) -> None:
        for chunk in encode(message):
            self._out.put(chunk)

    def close(self, reason: str = "") -> None:
        """Leave; with a reason the server is told it."""
        if reason:
            self._say(Bye(reason))
        self._out.put(None)
        if self._call is not None:
            self._call.cancel()
        self._channel.close()


def _channel(guest: Guest) -> Any:
    import grpc

    # A new channel each time: no back-off of its own, no stale connection.
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    if guest.credentials is None:
        return grpc.insecure_channel(guest.address, options=options)
    return secure_channel(guest.address, guest.credentials, "train", options)


def _in_words(code: str, details: str, guest: Guest) -> str:
    if code == "PERMISSION_DENIED":
        return f"the server refuses this client: {details}"
    if "handshake" in details.lower() or "ssl" in details.lower():
        return f"the server and this client do not trust each other's certificates ({details})"
    return f"no connection to {guest.address} ({details or code})"


def _ready(session: Session) -> Ready:
    device = session.device
    return Ready(
        session=session.number,
        samples=len(device.data),
        sample=forms_of(device.data),
        kept=device.vault.statement(),
    )
