"""A device's side of gRPC: it joins a run, works, and reconnects when the connection or the server is gone."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from cutlayer.core.text import printable
from cutlayer.errors import DataError, LinkError, UsageError
from cutlayer.remote.device.journal import Journal
from cutlayer.remote.device.session import ClientDevice, Reply, Session, forms_of
from cutlayer.remote.device.stream import MOST_WORDS, FedStream, Stream, StreamEnded
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.protocol.messages import MOST_BYTES, PROTOCOL, Done, Hello, Ready, Refusal, Welcome, Work
from cutlayer.remote.tensors.wire import MOST_HEADER
from cutlayer.version import __version__

log = logging.getLogger("cutlayer")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0  # seconds between attempts, doubled each time


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Which servers a device joins, under which name and certificate, and how it prepares for a run."""

    address: str
    fed: str | None = None  # the fed server, if it is a separate process
    name: str
    credentials: Credentials | None
    plugins: dict[str, str]
    ready: Callable[[Welcome], ClientDevice]  # raises a UsageError if the device cannot or will not take part
    gives_up_after: float = float("inf")  # seconds without a server


def stay(options: JoinOptions) -> str:
    """Take part until the run is over; return the server's last words. LinkError if the server refuses this client."""
    pause, last_seen, raw = FIRST_PAUSE, time.monotonic(), ""
    journal = Journal(options.name)
    while True:
        connection = ServerConnection(options, journal)
        try:
            return connection.run()
        except KeyboardInterrupt:
            connection.close("it was stopped")
            raise
        except UsageError as error:
            connection.close(_told(error))
            raise
        except StreamEnded as left:
            if not left.again:
                raise LinkError(str(left)) from None
            reason = connection.refusal or str(left)
            if left.raw and not raw:
                raw = left.raw
                log.info("gRPC says: %s", raw)
        finally:
            connection.close()
        if connection.worked:
            pause, last_seen = FIRST_PAUSE, time.monotonic()
        if time.monotonic() - last_seen > options.gives_up_after:
            raise LinkError(f"no server at {options.address} for {options.gives_up_after:g} seconds: {reason}")
        log.info("%s; trying %s again in %.1f s", reason, options.address, pause)
        time.sleep(pause * random.uniform(0.5, 1.0))  # so that not all reconnect at once
        pause = min(2 * pause, LONGEST_PAUSE)


class ServerConnection:
    """One session with the server, and with the fed server if that is separate."""

    def __init__(self, options: JoinOptions, journal: Journal) -> None:
        self.options, self.journal = options, journal
        self.worked = False  # whether the server has sent any work
        self.refusal = ""  # why the device has refused its last work
        self._hello = Hello(protocol=PROTOCOL, version=__version__, name=options.name, plugins=options.plugins)
        self._train = Stream(options.address, "train", options.credentials)
        self._fed: FedStream | None = None

    def run(self) -> str:
        self._train.say(self._hello)
        session: Session | None = None
        for message, tensors in self._train:
            match message:
                case Welcome() if session is None:
                    session = self._begun(message)
                    self._train.say(_ready(session.device, message.session))
                    self.journal.joined(session.device)
                case Work() if session is not None:
                    sent = self._answer(session.work(message, tensors))
                    session.device.store.save(message.round + 1)
                    self.journal.worked(session.device, message.round, sent)
                case Done(reason):
                    return printable(reason, MOST_WORDS)
                case _:
                    raise StreamEnded(f"the server sent a {type(message).__name__}, which does not belong there", True)
        raise StreamEnded("the server closed the connection", True)

    def _begun(self, welcome: Welcome) -> Session:
        device = self.options.ready(welcome)
        most = (MOST_BYTES, MOST_HEADER) if device.terms is None else device.terms.most
        self._train.most = most
        if self.options.fed is None:
            return Session(device, welcome.session)
        self._fed = FedStream(self.options.fed, self.options.credentials, self._train.close)
        other = self._fed.opened(self._hello)
        if (other.run, other.client) != (welcome.run, welcome.client):
            raise LinkError("the two servers do not serve the same run, or do not agree on who this client is")
        self._fed.most = most
        self._fed.follow(_ready(device, other.session))
        return Session(device, welcome.session, self._fed.value)

    def _answer(self, reply: Reply | None) -> int:
        """Send a reply, if there is one; return its bytes."""
        self.worked, self.refusal = True, ""
        if reply is None:
            return 0
        if reply.to_fed and self._fed is not None:
            return self._fed.send(reply)
        sent = self._train.say(reply.message, reply.tensors)
        if isinstance(reply.message, Refusal):
            self.refusal = f"this device refuses: {reply.message.where}: {reply.message.reason}"
            if reply.is_last:
                raise LinkError(reply.message.reason)
        return sent

    def close(self, reason: str = "") -> None:
        """Leave both servers; if there is a reason, tell the training server."""
        self._train.close(reason)
        if self._fed is not None:
            self._fed.close()


def _told(error: UsageError) -> str:
    """Return what a server is told when this device leaves: nothing about its samples and files."""
    match error:
        case LinkError():
            return str(error)[:MOST_WORDS]
        case DataError():
            return "its own data do not fit this run; its log says why"
    return "it cannot take part in this run, or does not agree to it; its log says why"


def _ready(device: ClientDevice, session: int) -> Ready:
    return Ready(
        session=session,
        samples=len(device.data),
        tests=0 if device.tests is None else len(device.tests),
        sample=forms_of(device.data),
        kept=device.store.statement(),
    )
