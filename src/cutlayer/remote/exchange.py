"""One `up`: letters go out to all clients at once, and answers come in until the last one or the deadline.

A client that is lost before it has been heard in this round may come back until the deadline, and is then asked again
from the beginning; one that was heard is lost for this round. Where the two servers are two processes, the one that the
values go to decides who has answered, and tells the other.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cutlayer.engines.base import Ids
from cutlayer.errors import CutlayerError, WireError
from cutlayer.kinds import Place
from cutlayer.remote.kept import Statements
from cutlayer.remote.messages import Arrived, Gone
from cutlayer.remote.office import Answered, Joined, Line, Lost, Office, PeerSaid, RoundId
from cutlayer.remote.peer import Peer, PeerLost
from cutlayer.remote.queue import Letter
from cutlayer.remote.watch import Watcher
from cutlayer.tree import Tree

AGREEMENT = 30.0  # seconds beyond the deadline that one server waits for the word of the other


class Deserted(CutlayerError):
    """Every client of a round is lost: the round did not happen. `refusal` is why one was refused, if any was."""

    def __init__(self, message: str, refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass
class Waiting:
    """A client that owes an answer."""

    letter: Letter
    session: int
    number: int
    since: float


@dataclass(kw_only=True)
class Exchange:
    """One attempt at a round: who was heard in it, and who is lost."""

    office: Office
    round: RoundId
    ids: Ids
    deadline: float
    kept: Statements
    read: Callable[[Letter, Answered], list[Tree]]  # the values of an answer; WireError if they cannot be used
    watcher: Watcher
    peer: Peer | None = None  # the other server, if it is a process of its own
    resend: Callable[[int], None] = lambda client: None  # parcels that went to a client which is back
    lost: set[int] = field(default_factory=set)
    heard: dict[int, int] = field(default_factory=dict)  # the sessions of those that were heard here in this round

    def __post_init__(self) -> None:
        self._held = {j: self.kept.held(j) for j in self.ids}  # when the round began
        self._number = 0
        self._meeting = None if self.peer is None else self.peer.meeting
        self._waiting: dict[int, Waiting] = {}
        self._came: dict[int, list[Tree]] = {}
        self._agreed: Ids | None = None
        self._early: dict[int, Answered] = {}
        self._refused = ""  # why a client was, if any was

    def has(self, j: int) -> bool:
        """Whether a client can still be asked; what only one of two servers knows does not count."""
        if j in self.lost or self.peer is not None or j not in self.heard:
            return j not in self.lost
        line = self.office.line(j)
        return line is not None and line.session == self.heard[j]

    def __call__(self, letters: Mapping[int, Letter], home: Place) -> tuple[Ids, dict[int, list[Tree]]]:
        """Who answered, and their values, if this is where they go."""
        self._number += 1
        self._waiting, self._came, self._agreed = {}, {}, None
        decides = self.peer is None or self.peer.here == home
        for j, letter in letters.items():
            self._post(j, letter)
        self.office.flush()
        end = time.monotonic() + self.deadline + (0 if decides else AGREEMENT)
        while (self._waiting if decides else self._agreed is None) and (left := end - time.monotonic()) > 0:
            self._happened(self.office.receive(left))
        answered = self._decided(letters, decides)
        self.lost |= letters.keys() - set(answered)
        if not set(self.ids) - self.lost:
            raise Deserted(f"round {self.round.number + 1}: every client is lost", self._refused)
        return answered, self._came

    def _decided(self, letters: Mapping[int, Letter], decides: bool) -> Ids:
        if not decides:
            if self._agreed is None:
                raise PeerLost("the other server has not said who answered")
            for j in letters.keys() - set(self._agreed):
                self._lose(j, "it did not answer the other server")
            for j in self._agreed:
                line = self.office.line(j)
                self.heard.setdefault(j, -1 if line is None else line.session)
            return self._agreed
        for j in tuple(self._waiting):
            self.watcher.slow(j)
            self._lose(j, f"it gave no answer within {self.deadline:g} seconds")
        answered = tuple(j for j in letters if j in self._came)
        if self.peer is not None:
            self.peer.tell(Arrived(token=self.round.token, number=self._number, ids=answered))
        return answered

    def _happened(self, event: object) -> None:
        match event:
            case Answered():
                self._answered(event)
            case Lost():
                self._gone(event)
            case Joined(client):
                self._back(client)
            case PeerSaid(Arrived(token, number, ids)) if (token, number) == (self.round.token, self._number):
                self._agreed = ids
            case PeerSaid(Gone(token, client)) if token == self.round.token:
                self._waiting.pop(client, None)
            case PeerSaid(PeerLost() as error) if self.peer is not None and self.peer.meeting != self._meeting:
                raise error

    def _post(self, j: int, letter: Letter) -> None:
        line, now = self.office.line(j), time.monotonic()
        if j in self.heard and (line is None or line.session != self.heard[j]):
            self._lose(j, "it was lost in the middle of the round")
        elif line is None:
            self._waiting[j] = Waiting(letter, -1, -1, now)  # it may be back before the deadline
        elif self._holds_the_same(j, line):
            number, size = line.send(letter, self.round, begins=j not in self.heard, up=self._number)
            self._waiting[j] = Waiting(letter, line.session, number, now)
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
            self._came[j] = self.read(asked.letter, event)
        except WireError as error:
            self._lose(j, str(error), refused=True)
            return
        self.heard[j] = event.session
        self.watcher.answered(j, event.size, time.monotonic() - asked.since)

    def _is_early(self, event: Answered) -> bool:
        """A client may be ahead of a server that does not command it: its delivery waits until it is asked for."""
        answer = event.answer
        follows = self.peer is not None and not self.peer.commands
        return follows and getattr(answer, "token", None) == self.round.token and answer.number > self._number

    def _gone(self, event: Lost) -> None:
        """One that has been heard in this round is lost; any other may come back until the deadline."""
        j = event.client
        if self.office.line(j) is None:  # it is not back already
            self.watcher.lost(j, event.reason)
        if j not in self.lost and self.heard.get(j) == event.session:
            self._lose(j, event.reason)

    def _back(self, j: int) -> None:
        """A client that has not been heard yet is asked again, if it holds what it held when the round began."""
        line, asked = self.office.line(j), self._waiting.get(j)
        if line is None or j not in self.ids or j in self.heard or (asked and asked.session == line.session):
            return
        self.resend(j)
        if asked is not None:
            del self._waiting[j]
            self._post(j, asked.letter)
            self.office.flush()

    def _holds_the_same(self, j: int, line: Line) -> bool:
        """Whether a client keeps what it kept when the round began; if not, it may stay for the next one."""
        if line.noted or (self.peer is not None and not self.peer.commands):
            return True
        stated = self.kept.fork()
        stated.joined(j, line.kept)
        line.noted = stated.held(j) == self._held[j]
        return line.noted

    def _lose(self, j: int, reason: str, *, refused: bool = False) -> None:
        """Nothing more is expected of the client; its session ends, so that it joins the next round afresh."""
        self._waiting.pop(j, None)
        self._refused = reason if refused else self._refused
        (self.watcher.refused if refused else self.watcher.lost)(j, reason)
        if self.peer is not None and self.peer.commands:
            self.peer.tell(Gone(token=self.round.token, client=j))
        line = self.office.line(j)
        if line is not None:
            self.office.leave(j, line.session, reason)
