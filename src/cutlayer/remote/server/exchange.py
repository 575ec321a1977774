"""One `up`: requests go out to all clients at once, and answers come in until the last one or the deadline.

A client that disconnects before its first answer of the round may reconnect until the deadline, and is then asked again
from the beginning. After its first answer it is lost for this round. With two servers in two processes, the one that
the values go to decides who has answered, and tells the other.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from cutlayer.core.engine import Ids
from cutlayer.core.kinds import Place
from cutlayer.core.tree import Tree
from cutlayer.errors import CutlayerError, WireError
from cutlayer.remote.monitor.watch import NoWatcher, Watcher
from cutlayer.remote.protocol.messages import Answer, Gone, Respondents
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.peer import NoPeer, Peer, PeerLost
from cutlayer.remote.server.queue import Request
from cutlayer.remote.server.sessions import Answered, ClientSession, Joined, Lost, RoundId, Sessions
from cutlayer.remote.server.waits import Wait, Waits
from cutlayer.remote.tensors.trees import sendable

AGREEMENT = 30.0  # seconds beyond the deadline that one server waits for the other to say who answered
MOST_QUOTED = 3  # different refusals


class AllClientsLost(CutlayerError):
    """Every client of a round is lost. `refusal` says why answers were refused, or why clients refused to give any."""

    def __init__(self, message: str, refusal: str = "", by_clients: bool = False) -> None:
        super().__init__(message)
        self.refusal, self.by_clients = refusal, by_clients


class ItRefuses(WireError):
    """A client has not done its work: it says where it stopped, and why."""


class FedValues:
    """The values that a separate fed server sends to clients directly in one attempt at a round.

    The training server never sees them, but both servers number them alike.
    """

    def __init__(self, sessions: Sessions, token: int) -> None:
        self.sessions, self.token = sessions, token
        self._values: dict[int, list[Tree]] = {}
        self._num_sent: dict[int, int] = {}  # by the number of the session

    def add(self, client: int, value: Tree) -> int:
        """Add a value for a client and return its number."""
        values = self._values.setdefault(client, [])
        values.append(value)
        return len(values)

    def send(self, client: int) -> int:
        """Send a client the values that it has not got in its current session, and return the bytes sent."""
        session, values = self.sessions.get(client), self._values.get(client, [])
        if session is None:
            return 0
        first = self._num_sent.get(session.number, 0)
        self._num_sent[session.number] = len(values)
        messages = (sendable(self.token, first + k, value) for k, value in enumerate(values[first:], start=1))
        return sum(session.transmit(message, tensors) for message, tensors in messages)


@dataclass
class Waiting:
    """A client that has not answered yet."""

    request: Request
    session: int
    number: int
    since: float


@dataclass(kw_only=True)
class RoundExchange:
    """One attempt at a round: asks the clients and tracks who has answered and who is lost."""

    sessions: Sessions
    round: RoundId
    ids: Ids
    deadline: float  # seconds that `up` waits
    kept: KnownVersions
    waits: Waits = field(default_factory=Waits)
    watcher: Watcher = field(default_factory=NoWatcher)
    peer: Peer | NoPeer = field(default_factory=NoPeer)  # the other server

    def __post_init__(self) -> None:
        for j, session in self.sessions.present().items():
            if j in self.ids and not session.noted and self.peer.commands:
                self.kept.joined(j, session.kept)
                session.noted = True
        self.lost: set[int] = set()
        self.heard: dict[int, int] = {}  # the session in which each client answered here in this round
        self.fed_values = FedValues(self.sessions, self.round.token)
        self._round_end = self.waits.round_end()
        self._pace: float | None = None
        self._held = {j: self.kept.held(j) for j in self.ids}  # at the beginning of the round
        self._number = 0  # of the last `up`
        self._link_number = self.peer.link_number
        self._waiting: dict[int, Waiting] = {}
        self._came: dict[int, list[Tree]] = {}
        self._agreed: Ids | None = None
        self._early: dict[int, Answered] = {}
        # Why answers cannot be used, and whether the client itself says so; an error would hold on to this round.
        self._refused: dict[str, bool] = {}

    def read(self, request: Request, event: Answered) -> list[Tree]:
        """Return the values of an answer; raise WireError if they cannot be used."""
        raise NotImplementedError

    def alive(self, ids: Ids) -> Ids:
        """Return the clients that can still be asked; what only one of two servers knows does not count."""
        present = {(j, session.number) for j, session in self.sessions.present().items()}
        gone = set() if self.peer.apart else {j for j, _ in self.heard.items() - present}
        return tuple(j for j in ids if j not in self.lost | gone)

    def ask(self, requests: Mapping[int, Request], home: Place) -> tuple[Ids, dict[int, list[Tree]]]:
        """Send the requests; return who answered, and their values if this process holds the place they go to."""
        self._waiting, self._came, self._agreed = {}, {}, None
        for j, request in requests.items():
            self._ask(j, request)
        self.sessions.flush()
        answered = self._decided(requests) if self.peer.has(home) else self._told(requests)
        self.lost |= requests.keys() - set(answered)
        if not set(self.ids) - self.lost:
            raise self._all_lost()
        return answered, self._came

    def _all_lost(self) -> AllClientsLost:
        refusals, by_clients = "; ".join(list(self._refused)[:MOST_QUOTED]), all(self._refused.values())
        return AllClientsLost(f"round {self.round.number + 1}: every client is lost", refusals, by_clients)

    def _decided(self, requests: Mapping[int, Request]) -> Ids:
        """Wait for these clients, and decide who has answered."""
        wait = Wait(
            waits=self.waits,
            asked=len(requests),
            deadline=self.deadline,
            round_end=self._round_end,
            others=bool(set(self.alive(self.ids)) - requests.keys()),
            pace=self._pace,
        )
        while self._waiting and (left := wait.left(len(self._came))) > 0:
            self._happened(self.sessions.receive(left))
        self._pace = wait.next_pace
        for j in tuple(self._waiting):
            self.watcher.slow(j)
            self._lose(j, wait.why)
        answered = tuple(j for j in requests if j in self._came)
        self.peer.tell(Respondents(token=self.round.token, number=self._number, ids=answered))
        return answered

    def _told(self, requests: Mapping[int, Request]) -> Ids:
        """Wait for the other server to say who has answered."""
        end = time.monotonic() + self.deadline + AGREEMENT
        while self._agreed is None and (left := end - time.monotonic()) > 0:
            self._happened(self.sessions.receive(left))
        if self._agreed is None:
            raise PeerLost("the other server has not said who answered")
        for j in requests.keys() - set(self._agreed):
            self._lose(j, "it did not answer the other server")
        for j in self._agreed:
            session = self.sessions.get(j)
            self.heard.setdefault(j, -1 if session is None else session.number)
        return self._agreed

    def _happened(self, event: object) -> None:
        match event:
            case Answered():
                self._answered(event)
            case Lost():
                self._gone(event)
            case Joined(client):
                self._back(client)
            case Respondents(token, number, ids) if (token, number) == (self.round.token, self._number):
                self._agreed = ids
            case Gone(token, client) if token == self.round.token:
                self._waiting.pop(client, None)
            case PeerLost() if self.peer.link_number != self._link_number:
                raise event

    def _ask(self, j: int, request: Request) -> None:
        session, now = self.sessions.get(j), time.monotonic()
        if j in self.heard and (session is None or session.number != self.heard[j]):
            self._lose(j, "it was lost in the middle of the round")
        elif session is None:
            self._waiting[j] = Waiting(request, -1, -1, now)  # it may reconnect before the deadline
        elif self._holds_the_same(j, session):
            number, size = session.send(request, self.round, begins=j not in self.heard, up=self._number)
            self._waiting[j] = Waiting(request, session.number, number, now)
            self.watcher.asked(j, size)
            if j in self._early:
                self._answered(self._early.pop(j))

    def _answered(self, event: Answered) -> None:
        j, answer, asked = event.client, event.answer, self._waiting.get(event.client)
        of_this_round = isinstance(answer, Answer) and answer.token == self.round.token
        if not self.peer.commands and of_this_round and answer.number > self._number:
            self._early[j] = event  # the server that commands is ahead of this one
            return
        if asked is None or (asked.session, asked.number) != (event.session, answer.number):
            return  # late, or a duplicate
        del self._waiting[j]
        try:
            self._came[j] = self.read(asked.request, event)
        except WireError as error:
            self._refused[str(error)] = isinstance(error, ItRefuses)
            self._lose(j, str(error), refused=True)
            return
        self.heard[j] = event.session
        self.watcher.answered(j, event.size, time.monotonic() - asked.since)

    def _gone(self, event: Lost) -> None:
        """Lose a client that has answered in this round; any other may reconnect until the deadline."""
        j = event.client
        if self.sessions.get(j) is None:  # it has not reconnected already
            self.watcher.lost(j, event.reason)
        if j not in self.lost and self.heard.get(j) == event.session:
            self._lose(j, event.reason)

    def _back(self, j: int) -> None:
        """Ask a client again that has reconnected before its first answer of the round."""
        session, asked = self.sessions.get(j), self._waiting.get(j)
        if session is None or j not in self.ids or j in self.heard or (asked and asked.session == session.number):
            return
        if not self.peer.commands:
            self.fed_values.send(j)
        if asked is not None:
            del self._waiting[j]
            self._ask(j, asked.request)
            self.sessions.flush()

    def _holds_the_same(self, j: int, session: ClientSession) -> bool:
        """Return whether a client keeps what it kept when the round began; if not, it waits for the next round."""
        if not session.noted and self.peer.commands:
            session.noted = self.kept.believed(j, session.kept) == self._held[j]
        return session.noted or not self.peer.commands

    def _lose(self, j: int, reason: str, *, refused: bool = False) -> None:
        """Expect nothing more of a client and end its session, so that it joins the next round anew."""
        self._waiting.pop(j, None)
        (self.watcher.refused if refused else self.watcher.lost)(j, reason)
        if self.peer.commands:
            self.peer.tell(Gone(token=self.round.token, client=j))
        self.sessions.leave(j, None, reason)
