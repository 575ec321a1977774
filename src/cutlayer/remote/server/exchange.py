"""One `up`: requests go out to all clients at once, and answers come in until the last one or the deadline.

A client that is lost before it has been heard in this round may come back until the deadline, and is then asked again
from the beginning; one that was heard is lost for this round. Where the two servers are two processes, the one that the
values go to decides who has answered, and tells the other.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cutlayer.core.engine import Ids
from cutlayer.core.kinds import Place
from cutlayer.core.tree import Tree
from cutlayer.errors import CutlayerError, WireError
from cutlayer.remote.monitor.watch import Watcher
from cutlayer.remote.protocol.messages import Answer, Gone, Respondents
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.peer import NoPeer, Peer, PeerLost
from cutlayer.remote.server.queue import Request
from cutlayer.remote.server.sessions import Answered, ClientSession, Joined, Lost, PeerSaid, RoundId, Sessions

AGREEMENT = 30.0  # seconds beyond the deadline that one server waits for the word of the other


class AllClientsLost(CutlayerError):
    """Every client of a round is lost: the round did not happen. `refusal` is why one was refused, if any was."""

    def __init__(self, message: str, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass
class Waiting:
    """A client that owes an answer."""

    request: Request
    session: int
    number: int
    since: float


@dataclass(kw_only=True)
class RoundExchange:
    """One attempt at a round: who was heard in it, and who is lost."""

    sessions: Sessions
    round: RoundId
    ids: Ids
    deadline: float
    kept: KnownVersions
    read: Callable[[Request, Answered], list[Tree]]  # the values of an answer; WireError if they cannot be used
    watcher: Watcher
    peer: Peer | NoPeer  # the other server
    resend: Callable[[int], None] = lambda client: None  # what the fed server sent to a client which is back
    lost: set[int] = field(default_factory=set)
    heard: dict[int, int] = field(default_factory=dict)  # the sessions of those that were heard here in this round

    def __post_init__(self) -> None:
        self._held = {j: self.kept.held(j) for j in self.ids}  # when the round began
        self._number = 0
        self._link_number = self.peer.link_number
        self._waiting: dict[int, Waiting] = {}
        self._came: dict[int, list[Tree]] = {}
        self._agreed: Ids | None = None
        self._early: dict[int, Answered] = {}
        self._refused = ""  # why a client was, if any was

    def has(self, j: int) -> bool:
        """Whether a client can still be asked; what only one of two servers knows does not count."""
        if j in self.lost or self.peer.apart or j not in self.heard:
            return j not in self.lost
        session = self.sessions.get(j)
        return session is not None and session.number == self.heard[j]

    def __call__(self, requests: Mapping[int, Request], home: Place) -> tuple[Ids, dict[int, list[Tree]]]:
        """Who answered, and their values, if this is where they go."""
        self._number += 1
        self._waiting, self._came, self._agreed = {}, {}, None
        decides = self.peer.has(home)
        for j, request in requests.items():
            self._ask(j, request)
        self.sessions.flush()
        end = time.monotonic() + self.deadline + (0 if decides else AGREEMENT)
        while (self._waiting if decides else self._agreed is None) and (left := end - time.monotonic()) > 0:
            self._happened(self.sessions.receive(left))
        answered = self._decided(requests, decides)
        self.lost |= requests.keys() - set(answered)
        if not set(self.ids) - self.lost:
            raise AllClientsLost(f"round {self.round.number + 1}: every client is lost", self._refused)
        return answered, self._came

    def _decided(self, requests: Mapping[int, Request], decides: bool) -> Ids:
        if not decides:
            if self._agreed is None:
                raise PeerLost("the other server has not said who answered")
            for j in requests.keys() - set(self._agreed):
                self._lose(j, "it did not answer the other server")
            for j in self._agreed:
                session = self.sessions.get(j)
                self.heard.setdefault(j, -1 if session is None else session.number)
            return self._agreed
        for j in tuple(self._waiting):
            self.watcher.slow(j)
            self._lose(j, f"it gave no answer within {self.deadline:g} seconds")
        answered = tuple(j for j in requests if j in self._came)
        self.peer.tell(Respondents(token=self.round.token, number=self._number, ids=answered))
        return answered

    def _happened(self, event: object) -> None:
        match event:
            case Answered():
                self._answered(event)
            case Lost():
                self._gone(event)
            case Joined(client):
                self._back(client)
            case PeerSaid(Respondents(token, number, ids)) if (token, number) == (self.round.token, self._number):
                self._agreed = ids
            case PeerSaid(Gone(token, client)) if token == self.round.token:
                self._waiting.pop(client, None)
            case PeerSaid(PeerLost() as error) if self.peer.link_number != self._link_number:
                raise error

    def _ask(self, j: int, request: Request) -> None:
        session, now = self.sessions.get(j), time.monotonic()
        if j in self.heard and (session is None or session.number != self.heard[j]):
            self._lose(j, "it was lost in the middle of the round")
        elif session is None:
            self._waiting[j] = Waiting(request, -1, -1, now)  # it may be back before the deadline
        elif self._holds_the_same(j, session):
            number, size = session.send(request, self.round, begins=j not in self.heard, up=self._number)
            self._waiting[j] = Waiting(request, session.number, number, now)
            self.watcher.asked(j, size)
            early = self._early.get(j)
            if early is not None and early.answer.number == self._number:
                self._answered(self._early.pop(j))

    def _answered(self, event: Answered) -> None:
        j, asked = event.client, self._waiting.get(event.client)
        if self._is_early(event):
            self._early[j] = event
            return
        if asked is None or (asked.session, asked.number) != (event.session, event.answer.number):
            return  # late, or twice
        del self._waiting[j]
        try:
            self._came[j] = self.read(asked.request, event)
        except WireError as error:
            self._lose(j, str(error), refused=True)
            return
        self.heard[j] = event.session
        self.watcher.answered(j, event.size, time.monotonic() - asked.since)

    def _is_early(self, event: Answered) -> bool:
        """A client may be ahead of a server that does not command it: its delivery waits until it is asked for."""
        answer = event.answer
        of_this_round = isinstance(answer, Answer) and answer.token == self.round.token
        return not self.peer.commands and of_this_round and answer.number > self._number

    def _gone(self, event: Lost) -> None:
        """One that has been heard in this round is lost; any other may come back until the deadline."""
        j = event.client
        if self.sessions.get(j) is None:  # it is not back already
            self.watcher.lost(j, event.reason)
        if j not in self.lost and self.heard.get(j) == event.session:
            self._lose(j, event.reason)

    def _back(self, j: int) -> None:
        """A client that has not been heard yet is asked again, if it holds what it held when the round began."""
        session, asked = self.sessions.get(j), self._waiting.get(j)
        if session is None or j not in self.ids or j in self.heard or (asked and asked.session == session.number):
            return
        self.resend(j)
        if asked is not None:
            del self._waiting[j]
            self._ask(j, asked.request)
            self.sessions.flush()

    def _holds_the_same(self, j: int, session: ClientSession) -> bool:
        """Whether a client keeps what it kept when the round began; if not, it may stay for the next one."""
        if session.noted or not self.peer.commands:
            return True
        stated = self.kept.fork()
        stated.joined(j, session.kept)
        session.noted = stated.held(j) == self._held[j]
        return session.noted

    def _lose(self, j: int, reason: str, *, refused: bool = False) -> None:
        """Nothing more is expected of the client; its session ends, so that it joins the next round afresh."""
        self._waiting.pop(j, None)
        self._refused = reason if refused else self._refused
        (self.watcher.refused if refused else self.watcher.lost)(j, reason)
        if self.peer.commands:
            self.peer.tell(Gone(token=self.round.token, client=j))
        session = self.sessions.get(j)
        if session is not None:
            self.sessions.leave(j, session.number, reason)
