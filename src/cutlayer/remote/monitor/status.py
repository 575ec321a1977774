"""What goes on at a server of real devices: written as it happens, read by the table, the metrics and the log."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cutlayer.remote.monitor.logs import event, printable
from cutlayer.runs.training import Record

State = Literal["away", "joined", "training", "waiting", "slow", "lost", "refused", "done"]
STATES: tuple[State, ...] = get_args(State)
HERE: frozenset[State] = frozenset({"joined", "training", "waiting", "slow"})  # has a session

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class ClientStatus:
    """How a client fares; its texts are safe to show."""

    number: int
    name: str
    state: State = "away"
    samples: int = 0
    step: int = 0  # answers given this round
    bytes_up: int = 0  # real bytes on the wire
    bytes_down: int = 0
    round_trips: int = 0
    lag: float | None = None  # seconds since it was last asked for something that it has not answered
    last_seconds: float = 0.0  # its last answer took
    refusals: int = 0
    rejoined: int = 0
    reason: str = ""  # of the last refusal or loss


@dataclass(kw_only=True, slots=True)
class RunStatus:
    """How a run fares."""

    name: str
    method: str
    rounds: int
    listening: str = ""
    waiting: str = ""  # for whom, if a round cannot begin
    round: int = 0  # from 1 on; 0 before the first
    step: int = 0  # the most answers that a client has given this round
    started: float = field(default_factory=time.time)  # Unix time
    elapsed: float = 0.0  # seconds
    rounds_ended: int = 0  # since this server started
    round_seconds: float | None = None  # of the last round that ended
    record: Record = field(default_factory=dict)  # of that round
    accuracy: float | None = None  # when it was last measured
    refused_connections: int = 0
    clients: dict[int, ClientStatus] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        return self.record.get("loss")

    @property
    def bytes_up(self) -> int:
        return sum(client.bytes_up for client in self.clients.values())

    @property
    def bytes_down(self) -> int:
        return sum(client.bytes_down for client in self.clients.values())


class Board:
    """Where the serving code writes what happens, from any thread; what is worth a line is logged as well."""

    def __init__(
        self,
        *,
        name: str,
        method: str,
        rounds: int,
        listening: str = "",
        expected: Mapping[int, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = RunStatus(name=name, method=method, rounds=rounds, listening=listening)
        self._lock, self._clock = threading.Lock(), clock
        self._began = self._round_began = clock()
        self._ended: float | None = None
        self._met: set[int] = set()  # have joined at least once
        self._asked: dict[int, float] = {}  # when those were who have not answered
        for number, client in (expected or {}).items():
            self._client(number).name = printable(client)

    def snapshot(self) -> RunStatus:
        """A copy, all of it of one moment."""
        with self._lock:
            now = self._clock()
            lags = {number: now - asked for number, asked in self._asked.items()}
            clients = {n: replace(c, lag=lags.get(n)) for n, c in sorted(self._run.clients.items())}
            elapsed = (now if self._ended is None else self._ended) - self._began
            return replace(self._run, elapsed=elapsed, record=dict(self._run.record), clients=clients)

    def opened(self, address: str) -> None:
        """The server listens."""
        with self._lock:
            self._run.listening = address
        event(log, logging.INFO, "listening", address=address)

    def waiting(self, words: str) -> None:
        """A round cannot begin yet; told once."""
        with self._lock:
            if self._run.waiting == words:
                return
            self._run.waiting = words
        if words:
            event(log, logging.INFO, words)

    def joined(self, number: int, name: str, samples: int) -> None:
        """A client has a session, its first or a new one."""
        with self._lock:
            client = self._client(number)
            again = number in self._met
            self._met.add(number)
            self._asked.pop(number, None)
            client.name, client.samples, client.state = printable(name), samples, "joined"
            client.rejoined += again
        self._tell(client, logging.INFO, "client joined again" if again else "client joined", samples=samples)

    def asked(self, number: int, num_bytes: int) -> None:
        """A message went to a client that it has to answer."""
        with self._lock:
            client = self._client(number)
            client.bytes_down += num_bytes
            if client.state in HERE:
                client.state = "training"
                self._asked[number] = self._clock()

    def told(self, number: int, num_bytes: int) -> None:
        """A message went to a client that wants no answer."""
        with self._lock:
            self._client(number).bytes_down += num_bytes

    def answered(self, number: int, num_bytes: int, seconds: float) -> None:
        """Its answer came, so long after the question."""
        with self._lock:
            client = self._client(number)
            client.bytes_up += num_bytes
            client.round_trips += 1
            client.step += 1
            client.last_seconds = seconds
            self._run.step = max(self._run.step, client.step)
            self._asked.pop(number, None)
            if client.state in HERE:
                client.state = "waiting"

    def slow(self, number: int) -> None:
        """A client has missed its deadline."""
        with self._lock:
            client = self._client(number)
            if client.state not in HERE - {"slow"}:
                return
            client.state = "slow"
            lag = self._clock() - self._asked[number] if number in self._asked else None
        self._tell(client, logging.WARNING, "client too slow", lag=lag)

    def lost(self, number: int, reason: str) -> None:
        """A session broke; if the client was refused just before, that is why."""
        with self._lock:
            client = self._client(number)
            if client.state in ("lost", "refused", "done"):
                return
            self._part(client, "lost", reason)
        self._tell(client, logging.WARNING, "client lost", reason=reason)

    def refused(self, number: int, reason: str) -> None:
        """A client sent what cannot be used, and its session ends."""
        with self._lock:
            client = self._client(number)
            client.refusals += 1
            self._part(client, "refused", reason)
        self._tell(client, logging.WARNING, "client refused", reason=reason)

    def left(self, number: int) -> None:
        """A client said goodbye."""
        with self._lock:
            client = self._client(number)
            if client.state not in HERE:
                return
            self._part(client, "away")
        self._tell(client, logging.INFO, "client left")

    def refused_connection(self, reason: str) -> None:
        """Somebody who is no client of this run was sent away."""
        with self._lock:
            self._run.refused_connections += 1
        event(log, logging.WARNING, "connection refused", reason=reason)

    def round_began(self, round: int, ids: Iterable[int]) -> None:
        """A round, from 1 on, begins with these clients; others who are here stand by."""
        drawn = set(ids)
        with self._lock:
            self._run.round, self._run.step = round, 0
            self._round_began = self._clock()
            for number in drawn:
                self._client(number)
            for number, client in self._run.clients.items():
                client.step = 0
                if client.state in HERE:
                    client.state = "waiting" if number in drawn else "joined"

    def round_ended(self, record: Record) -> None:
        """A round is committed, with these measurements."""
        with self._lock:
            run = self._run
            run.rounds_ended += 1
            run.round_seconds = self._clock() - self._round_began
            run.record, run.accuracy = dict(record), record.get("test_accuracy", run.accuracy)
            told = {"round": run.round, "rounds": run.rounds, "loss": run.loss, "accuracy": run.accuracy}
            told |= {"bytes_up": run.bytes_up, "bytes_down": run.bytes_down, "seconds": run.round_seconds}
        event(log, logging.INFO, "round ended", **told)

    def ended(self) -> None:
        """The run is over; who is still here is done."""
        with self._lock:
            self._ended = self._clock()
            for client in self._run.clients.values():
                if client.state in HERE:
                    self._part(client, "done")
            told = {"rounds": self._run.rounds_ended, "seconds": self._ended - self._began}
        event(log, logging.INFO, "run ended", **told)

    def _client(self, number: int) -> ClientStatus:
        return self._run.clients.setdefault(number, ClientStatus(number=number, name=f"client {number}"))

    def _part(self, client: ClientStatus, state: State, reason: str | None = None) -> None:
        """From a client that is asked for nothing any more."""
        client.state = state
        client.reason = client.reason if reason is None else printable(reason)
        self._asked.pop(client.number, None)

    def _tell(self, client: ClientStatus, level: int, message: str, **fields: Any) -> None:
        """Outside the lock: a log may be slow."""
        event(log, level, message, client=client.name, number=client.number, **fields)
