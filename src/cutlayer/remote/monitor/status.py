"""The status of a server of real devices: written as things happen, read by the table, the metrics and the log."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from cutlayer.core.text import printable
from cutlayer.remote.monitor.logs import event
from cutlayer.runs.stopping import Record

State = Literal["away", "joined", "training", "waiting", "slow", "lost", "refused", "done"]
STATES: tuple[State, ...] = get_args(State)
MOST_REFUSALS, REFUSALS_SECONDS = 100, 60.0  # that are logged in this time: nobody fills the disk from outside
HERE: frozenset[State] = frozenset({"joined", "training", "waiting", "slow"})  # has a session

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class ClientStatus:
    """The status of one client; its texts are safe to print."""

    number: int
    name: str
    state: State = "away"
    samples: int = 0
    step: int = 0  # answers given this round
    bytes_up: int = 0  # real bytes on the wire
    bytes_down: int = 0
    round_trips: int = 0
    lag: float | None = None  # seconds since a request that it has not answered yet
    last_seconds: float = 0.0  # that its last answer took
    refusals: int = 0
    rejoined: int = 0
    reason: str = ""  # of the last refusal or loss


@dataclass(kw_only=True, slots=True)
class RunStatus:
    """The status of a run."""

    name: str
    method: str
    rounds: int
    listening: str = ""
    waiting: str = ""  # whom a round waits for before it can begin
    round: int = 0  # from 1 on; 0 before the first
    step: int = 0  # the most answers that a client has given this round
    elapsed: float = 0.0  # seconds
    rounds_ended: int = 0  # since this server started
    round_seconds: float | None = None  # of the last round that ended
    loss: float | None = None  # of that round
    accuracy: float | None = None  # when it was last measured
    guarded: int = 0  # updates that were dropped since this server started
    refused_connections: int = 0
    failed_handshakes: int = 0
    clients: dict[int, ClientStatus] = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        return sum(client.bytes_up for client in self.clients.values())

    @property
    def bytes_down(self) -> int:
        return sum(client.bytes_down for client in self.clients.values())


class Board:
    """The status of a run, updated by the server's threads; events that matter to a reader are logged as well."""

    def __init__(
        self,
        *,
        name: str,
        method: str,
        rounds: int,
        expected: Mapping[int, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = RunStatus(name=name, method=method, rounds=rounds)
        self._lock, self._clock = threading.Lock(), clock
        self._began = self._round_began = clock()
        self._ended: float | None = None
        self._refusals: deque[float] = deque(maxlen=MOST_REFUSALS)  # when the last ones were logged
        self._not_logged = 0  # refusals since then
        self._met: set[int] = set()  # clients that have joined at least once
        self._asked: dict[int, float] = {}  # when each client that owes an answer was asked
        for number, client in (expected or {}).items():
            self._client(number).name = printable(client)

    def snapshot(self) -> RunStatus:
        """Return a consistent copy."""
        with self._lock:
            now = self._clock()
            lags = {number: now - asked for number, asked in self._asked.items()}
            clients = {n: replace(c, lag=lags.get(n)) for n, c in sorted(self._run.clients.items())}
            elapsed = (now if self._ended is None else self._ended) - self._began
            return replace(self._run, elapsed=elapsed, clients=clients)

    def opened(self, address: str) -> None:
        """The server listens."""
        with self._lock:
            self._run.listening = address
        event(log, logging.INFO, "listening", address=address)

    def waiting(self, words: str) -> None:
        """A round cannot begin yet; logged once."""
        with self._lock:
            if self._run.waiting == words:
                return
            self._run.waiting = words
        if words:
            event(log, logging.INFO, words)

    def joined(self, number: int, name: str, samples: int) -> None:
        """A client has opened a session."""
        with self._locked(number) as client:
            again = number in self._met
            self._met.add(number)
            self._asked.pop(number, None)
            client.name, client.samples, client.state = printable(name), samples, "joined"
            client.rejoined += again
        self._tell(client, logging.INFO, "client joined again" if again else "client joined", samples=samples)

    def asked(self, number: int, num_bytes: int) -> None:
        """A request went to a client."""
        with self._locked(number) as client:
            client.bytes_down += num_bytes
            if client.state in HERE:
                client.state = "training"
                self._asked[number] = self._clock()

    def sent(self, number: int, num_bytes: int) -> None:
        """A message that needs no answer went to a client."""
        with self._locked(number) as client:
            client.bytes_down += num_bytes

    def answered(self, number: int, num_bytes: int, seconds: float) -> None:
        """A client's answer came, this long after the request."""
        with self._locked(number) as client:
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
        with self._locked(number) as client:
            if client.state not in HERE - {"slow"}:
                return
            client.state = "slow"
            lag = self._clock() - self._asked[number] if number in self._asked else None
        self._tell(client, logging.WARNING, "client too slow", lag=lag)

    def lost(self, number: int, reason: str) -> None:
        """A session broke; a client that was refused just before stays refused."""
        self._leave(number, "lost", HERE | {"away"}, "client lost", reason=reason)

    def refused(self, number: int, reason: str) -> None:
        """A client sent something unusable, so its session ends."""
        self._leave(number, "refused", frozenset(STATES), "client refused", reason=reason)

    def left(self, number: int) -> None:
        """A client said goodbye."""
        self._leave(number, "away", HERE, "client left")

    def refused_connection(self, reason: str) -> None:
        """The server turned away somebody who is not a client of this run; a flood is only counted."""
        with self._lock:
            self._run.refused_connections += 1
        self._tell_stranger("connection refused", reason=reason)

    def left_early(self, name: str, reason: str) -> None:
        """A client left before it was ready: it cannot take part, or does not want to."""
        self._tell_stranger("client left before it was ready", client=printable(name), reason=reason)

    def _tell_stranger(self, message: str, **fields: Any) -> None:
        """Log an event that anybody may cause from outside, unless there were many of late."""
        with self._lock:
            now = self._clock()
            if len(self._refusals) == MOST_REFUSALS and now - self._refusals[0] < REFUSALS_SECONDS:
                self._not_logged += 1
                return
            self._refusals.append(now)
            missing = {"not_logged": self._not_logged} if self._not_logged else {}
            self._not_logged = 0
        event(log, logging.WARNING, message, **fields, **missing)

    def failed_handshakes(self, number: int, addresses: Mapping[str, int]) -> None:
        """So many connections have shown no certificate in time, or none that is accepted."""
        with self._lock:
            self._run.failed_handshakes += number
        known = {"addresses": addresses} if addresses else {}
        event(log, logging.WARNING, "handshakes failed", number=number, **known)

    def round_began(self, round: int, ids: Iterable[int]) -> None:
        """A round, counted from 1, begins with these clients; the others that have a session stand by."""
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
            run.guarded += record.get("guarded", 0)
            run.round_seconds = self._clock() - self._round_began
            tested = record.get("test_accuracy", record.get("federated_accuracy", run.accuracy))
            run.loss, run.accuracy = record.get("loss"), tested
            facts = {"round": run.round, "rounds": run.rounds, "loss": run.loss, "accuracy": run.accuracy}
            facts |= {"bytes_up": run.bytes_up, "bytes_down": run.bytes_down, "seconds": run.round_seconds}
        event(log, logging.INFO, "round ended", **facts)

    def ended(self) -> None:
        """The run is over; clients that still have a session are done."""
        with self._lock:
            self._ended = self._clock()
            for client in self._run.clients.values():
                if client.state in HERE:
                    client.state = "done"
            self._asked.clear()
            facts = {"rounds": self._run.rounds_ended, "seconds": self._ended - self._began}
        event(log, logging.INFO, "run ended", **facts)

    @contextmanager
    def _locked(self, number: int) -> Iterator[ClientStatus]:
        with self._lock:
            yield self._client(number)

    def _client(self, number: int) -> ClientStatus:
        return self._run.clients.setdefault(number, ClientStatus(number=number, name=f"client {number}"))

    def _leave(self, number: int, state: State, before: frozenset[State], message: str, **reason: str) -> None:
        """End the session of a client that was in one of these states, and with it the wait for its answer."""
        with self._locked(number) as client:
            if client.state not in before:
                return
            client.state, client.reason = state, printable(reason.get("reason", client.reason))
            client.refusals += state == "refused"
            self._asked.pop(number, None)
        self._tell(client, logging.WARNING if reason else logging.INFO, message, **reason)

    def _tell(self, client: ClientStatus, level: int, message: str, **fields: Any) -> None:
        """Log an event of a client; called without the lock, as a log may be slow."""
        event(log, level, message, client=client.name, number=client.number, **fields)
