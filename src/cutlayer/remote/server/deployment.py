"""The backend for real devices: a round reaches them through their sessions with this server."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cutlayer.core.codec import Coder
from cutlayer.core.engine import Engine, Ids
from cutlayer.core.guard import AllDropped
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.method import Method, TooFew, needs_of
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
from cutlayer.remote.server.waits import Waits
from cutlayer.runs.examination import Examination
from cutlayer.runs.rounds import Attempt

log = logging.getLogger("cutlayer")

ALONE_SECONDS = 1.0
MOST_REFUSED = 3  # attempts at a round that fail because answers were refused
FEWEST_WEIGHED = 3  # clients in a round of which one may be too heavy
LOOK_AT_DATA = "what they sent could not be used: {}. Look at the data and the learning rate"
ASK_OWNERS = "the devices refused to go on: {}. Ask their owners, who set the run file and the limits of each device"


@dataclass(kw_only=True)
class DeviceBackend:
    """Clients that are devices, each in a session with this server."""

    name = "grpc"

    method: Method
    coders: Mapping[Kind, Coder] = field(default_factory=dict)
    sessions: Sessions
    sample: Arrays  # a few samples: what all samples look like
    examination: Examination | None = None  # of the model on the clients' own test samples
    gather: Callable[[int], Ids]  # waits until a round can begin, and returns the clients that are present
    engine: Engine  # that this server computes on
    device: str = "cpu"  # of this server's tensors
    deadline: float = 60.0  # seconds that a server waits for an answer
    on_begin: Callable[[int, Ids], None] = lambda round, ids: None  # called at each attempt
    waits: Waits = field(default_factory=Waits)
    watcher: Watcher = field(default_factory=NoWatcher)
    peer: Peer | NoPeer = field(default_factory=NoPeer)  # the other server

    def __post_init__(self) -> None:
        self.memory = KnownVersions()
        self._shapes = ShapeRunner(Program(self.method, self.coders), self.sample)
        self._test_shapes = ShapeRunner(Program(self.examination), self.sample)
        self._shape_engine = ShapeEngine()
        self._begin: Begin | None = None
        self._refused = 0  # attempts at this round in which answers were refused and nobody else was left
        self._round = -1  # that clients were last asked for
        self._failed: set[int] = set()  # clients that were refused or silent in earlier attempts at this round
        self._remote: Remote | None = None  # of the last attempt
        self._heavy: set[int] = set()  # clients that a warning has named

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
        """Return the clients that are present, without those that failed in this round, unless too few are left."""
        if round != self._round:
            self._round, self._failed = round, set()
        here = self.gather(round)
        present = {j: session.samples for j, session in self.sessions.present().items() if j in here}
        others = self._others(present)
        return {j: present[j] for j in others} if others else present

    def _others(self, present: Iterable[int]) -> tuple[int, ...]:
        """Return those of these clients that have not failed in this round; nobody if they are too few for it."""
        others = tuple(j for j in present if j not in self._failed)
        return others if len(others) >= needs_of(self.method).fewest_clients else ()

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
            waits=self.waits,
        )
        if self._begin is None:
            held = {j: self.memory.held(j) for j in samples}
            self.peer.tell(Begin(round=round, token=this.token, samples=dict(samples), held=held))
        if not tests:
            self._remote = remote
            self.on_begin(round, tuple(samples))
            self._tell_heavy(samples)
        yield Attempt(remote, engines["server"], engines["fed"], self.peer.bridge(this.token, self.engine.real))
        remote.finish()

    def _tell_heavy(self, samples: Mapping[int, int]) -> None:
        """Warn once of a client that says that it has more samples than all others of a round together."""
        for j, num in samples.items():
            if len(samples) >= FEWEST_WEIGHED and 2 * num > sum(samples.values()) and j not in self._heavy:
                self._heavy.add(j)
                log.warning(
                    "client %s says that it has %d of the %d samples of this round, so it weighs more than all others "
                    "together; most_weight limits that, and agg = 'uniform' weighs all alike",
                    self.names().get(j, j),
                    num,
                    sum(samples.values()),
                )

    def recover(self, error: BaseException, attempt: int) -> None:
        """Retry a round in which every client was lost, unless the answers of all that there are keep being refused."""
        if attempt == 1:
            self._refused = 0
        if isinstance(error, AllClientsLost | AllDropped | TooFew):
            self.engine.forget()
            refusal = "" if isinstance(error, TooFew) else error.refusal
            self._failed |= self._lost() | (error.clients if isinstance(error, AllDropped) else set())
            refused = bool(refusal) and not self._others(self.sessions.met)
            self._refused += refused
            if refused and self._refused == MOST_REFUSED:  # further attempts would fail alike
                by_clients = isinstance(error, AllClientsLost) and error.by_clients
                advice = ASK_OWNERS if by_clients else LOOK_AT_DATA
                raise ConfigError(
                    f"{error}, {self._refused} times; {advice.format(refusal)}; the rounds before are saved"
                ) from None
            log.warning("%s; it is tried again", error)
            if refusal and not refused and not self._others(self.sessions.present()):
                time.sleep(ALONE_SECONDS)  # only clients that were refused are here, and others may come back
        else:
            self.engine = self.engine.recover(error, attempt)
            if self.memory.is_empty:  # otherwise clients may have kept values of the failed attempt
                return
        # Nobody knows which client keeps what of the failed attempt: all join again, and state it.
        for j, session in self.sessions.present().items():
            if session.noted:
                self.sessions.leave(j, session.number, "the round failed, and begins again")

    def _lost(self) -> set[int]:
        """Return the clients that were lost in the last attempt."""
        remote = self._remote
        return set() if remote is None else set(remote.ids) - set(remote.alive(remote.ids))
