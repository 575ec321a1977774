"""The backend for real devices: a round reaches them through their sessions with this server."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cutlayer.core.engine import Engine, Ids
from cutlayer.core.kinds import Place
from cutlayer.core.method import Method, TooFew
from cutlayer.core.program import Program
from cutlayer.core.servers import Bridge
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError
from cutlayer.remote.monitor.watch import NoWatcher, Watcher
from cutlayer.remote.protocol.messages import Begin
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.peer import NoPeer, Peer
from cutlayer.remote.server.remote import Remote
from cutlayer.remote.server.sessions import RoundId, Sessions
from cutlayer.remote.server.shape_engine import ShapeEngine
from cutlayer.remote.server.shape_runner import ShapeRunner
from cutlayer.runs.examination import Examination
from cutlayer.runs.rounds import Attempt

log = logging.getLogger("cutlayer")

MOST_REFUSED = 3  # attempts at a round that fail because answers were refused


@dataclass(kw_only=True)
class DeviceBackend:
    """Clients that are devices, each in a session with this server."""

    name = "grpc"

    method: Method
    sessions: Sessions
    sample: Arrays  # a few samples: what all samples look like
    examination: Examination | None = None  # of the model on the clients' own test samples
    gather: Callable[[int], Ids]  # waits until a round can begin, and returns the clients that are present
    engine: Engine  # that this server computes on
    device: str = "cpu"  # of this server's tensors
    deadline: float = 60.0  # seconds that a server waits for an answer
    on_begin: Callable[[int, Ids], None] = lambda round, ids: None  # called at each attempt
    watcher: Watcher = field(default_factory=NoWatcher)
    peer: Peer | NoPeer = field(default_factory=NoPeer)  # the other server

    def __post_init__(self) -> None:
        self.memory = KnownVersions()
        self._shapes = ShapeRunner(Program(self.method), self.sample)
        self._test_shapes = ShapeRunner(Program(self.examination), self.sample)
        self._shape_engine = ShapeEngine()
        self._begin: Begin | None = None
        self._refused = 0  # attempts at this round in which answers were refused

    @property
    def resolved(self) -> dict[str, str]:
        return {"server_engine": self.engine.name}

    @property
    def num_classes(self) -> int | None:
        return self.sample.num_classes

    def names(self) -> dict[int, str]:
        return {j: session.name for j, session in self.sessions.present().items()}

    def samples_of(self, client: int) -> Arrays:
        raise ConfigError(f"the samples of client {client} stay with it")

    def bridge(self) -> Bridge:
        return self.peer.bridge(0, self.engine.real)

    def drawn(self, round: int) -> dict[int, int] | None:
        self._begin = self.peer.begun(round)
        if self._begin is None:
            return None
        # A client joins the fed server before the training server, but it may have left again.
        end = time.monotonic() + self.deadline
        while not self._begin.samples.keys() <= self.sessions.present().keys() and time.monotonic() < end:
            time.sleep(0.05)
        return dict(self._begin.samples)

    def present(self, round: int) -> dict[int, int]:
        present = self.gather(round)
        return {j: session.samples for j, session in self.sessions.present().items() if j in present}

    def tests(self) -> dict[int, int]:
        """Return how many samples for testing each client holds that is present and has a batch of them."""
        return {j: session.tests for j, session in self.sessions.present().items() if session.tests > 1}

    @contextmanager
    def attempt(self, round: int, key: int, samples: Mapping[int, int], *, tests: bool = False) -> Iterator[Attempt]:
        this = RoundId.drawn(round, key, tests=tests)
        if self._begin is not None:
            this = this._replace(token=self._begin.token)
            self.memory.hold(self._begin.held)
        places: tuple[Place, Place] = ("server", "fed")
        engines = {place: self.engine if self.peer.has(place) else self._shape_engine for place in places}
        shapes = self._test_shapes if tests else self._shapes
        remote = Remote(
            sessions=self.sessions,
            program=shapes.program,
            shapes=shapes,
            kept=self.memory,
            round=this,
            ids=tuple(samples),
            deadline=self.deadline,
            num_classes=self.num_classes,
            device=self.device,
            watcher=self.watcher,
            peer=self.peer,
            engines=engines,
        )
        if self._begin is None:
            held = {j: self.memory.held(j) for j in samples}
            self.peer.tell(Begin(round=round, token=this.token, samples=dict(samples), held=held))
        if not tests:
            self.on_begin(round, tuple(samples))
        yield Attempt(remote, engines["server"], engines["fed"], self.peer.bridge(this.token, self.engine.real))
        remote.finish()

    def recover(self, error: BaseException, attempt: int) -> None:
        """Retry a round in which every client was lost, unless their answers keep being refused."""
        if attempt == 1:
            self._refused = 0
        if isinstance(error, AllClientsLost | TooFew):
            self.engine.forget()
            refusal = error.refusal if isinstance(error, AllClientsLost) else ""
            self._refused += bool(refusal)
            if refusal and self._refused == MOST_REFUSED:  # further attempts would fail alike
                raise ConfigError(
                    f"{error}, {self._refused} times; what they sent could not be used: {refusal}. Look at the "
                    "data and the learning rate; the rounds before are saved"
                ) from None
            log.warning("%s; it is tried again", error)
        else:
            self.engine = self.engine.recover(error, attempt)
            if self.memory.is_empty:  # otherwise clients may have kept values of the failed attempt
                return
        # Nobody knows which client keeps what of the failed attempt: all join again, and state it.
        for j, session in self.sessions.present().items():
            if session.noted:
                self.sessions.leave(j, session.number, "the round failed, and begins again")
