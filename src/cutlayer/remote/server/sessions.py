"""A server's sessions with its clients: who is present, what was sent to them, and what has arrived.

Transports (gRPC streams, Ray actors) report clients that join, answer and leave; a round reads the inbox.
"""

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import msgspec
from torch import Tensor

from cutlayer.remote.protocol.messages import MOST_LISTS, Answer, Gone, KeptVersion, Message, Refusal, Respondents, Work
from cutlayer.remote.server.peer import PeerLost
from cutlayer.remote.server.queue import Request
from cutlayer.remote.tensors.wire import ALIGN

REPLACED = "another process has joined as the same client; stop one of the two"
MOST_UNREAD = 8  # answers that may arrive before they are asked for


class RoundId(NamedTuple):
    """One attempt at a round."""

    number: int
    key: int
    token: int
    tests: bool = False  # clients use the samples that they hold for testing

    @classmethod
    def drawn(cls, number: int, key: int, *, tests: bool = False) -> "RoundId":
        return cls(number, key, secrets.randbits(62), tests)


class Joined(NamedTuple):
    """A client has joined, for the first time or again."""

    client: int


class Answered(NamedTuple):
    """A client has answered; `size` is the number of bytes received."""

    client: int
    session: int
    answer: Answer | Refusal
    tensors: Sequence[Tensor]
    size: int = 0


class Lost(NamedTuple):
    """A client's session has ended."""

    client: int
    session: int
    reason: str


Event = Joined | Answered | Lost | Respondents | Gone | PeerLost  # the last three come from the other server


@dataclass(kw_only=True, eq=False)
class ClientSession:
    """A server's end of one session."""

    client: int
    name: str
    number: int
    samples: int
    tests: int = 0  # samples that the client holds for testing
    kept: tuple[KeptVersion, ...]
    transmit: Callable[[Message, Sequence[Tensor]], int]  # returns the number of bytes sent
    close: Callable[[str], None]  # takes the reason
    commands: bool = True  # whether this server commands the client, or the other one does
    largest: InitVar[int] = 0  # bytes that an answer may take before it is asked for
    asked: int | None = None  # number of the answer that is due, until it has come
    noted: bool = False  # whether a round has read the client's statement of what it keeps

    def __post_init__(self, largest: int) -> None:
        # Of the answers to the last two requests: a duplicate may arrive after the next request was sent.
        self._sizes = (largest, largest)
        self._numbers = itertools.count(1)
        self._unread = 0
        self._lists: dict[bytes, int] = {}

    @property
    def most_bytes(self) -> int:
        """The most bytes that an answer may take now."""
        return max(self._sizes)

    def expects(self, answer: Answer | Refusal) -> bool:
        """Return True once for the answer that is due. A server that does not command cannot know which one it is."""
        if not self.commands:
            self._unread += 1
            return self._unread <= MOST_UNREAD
        if answer.number != self.asked:
            return False
        self.asked = None
        return True

    def send(self, request: Request, round: RoundId, begins: bool, up: int = 0) -> tuple[int, int]:
        """Send a request; return the number that its answer will have, and the number of bytes sent."""
        if not self.commands:
            self._unread = 0
            return up, 0
        expected = [a for _, flat in request.expected for a in flat.tensors]
        self._sizes = (self._sizes[1], sum(a.nbytes + ALIGN for a in expected))
        if len(self._lists) >= MOST_LISTS:
            self._lists.clear()
        content = msgspec.msgpack.encode(request.commands)
        is_new = content not in self._lists
        name = self._lists.setdefault(content, len(self._lists))
        self.asked = next(self._numbers)
        work = Work(
            session=self.number,
            number=self.asked,
            round=round.number,
            key=round.key,
            token=round.token,
            begins=begins,
            tests=round.tests,
            list=name,
            commands=request.commands if is_new else None,
            numbers=request.numbers,
        )
        return work.number, self.transmit(work, request.tensors)


class Sessions:
    """The sessions of the clients that are present, and the inbox of a round."""

    def __init__(self, flush: Callable[[], None] = lambda: None) -> None:
        self.flush = flush  # for transports that send many requests at once
        self.met: set[int] = set()  # clients that have ever joined
        self._present: dict[int, ClientSession] = {}
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._numbers = itertools.count(secrets.randbits(40))

    def new_session(self) -> int:
        return next(self._numbers)

    def join(self, session: ClientSession) -> None:
        """Add a client's session; an older session of the same client ends."""
        with self._lock:
            old = self._present.get(session.client)
            self._present[session.client] = session
            self.met.add(session.client)
        if old is not None:
            old.close(REPLACED)
            self._inbox.put(Lost(session.client, old.number, "it has joined again"))
        self._inbox.put(Joined(session.client))

    def leave(self, client: int, number: int | None, reason: str) -> None:
        """End a client's session of this number, or any if None, unless the client has another session by now."""
        with self._lock:
            session = self._present.get(client)
            if session is None or number not in (None, session.number):
                return
            del self._present[client]
        session.close(reason)
        self._inbox.put(Lost(client, session.number, reason))

    def take(self, event: Event) -> None:
        """Put an event into the inbox."""
        self._inbox.put(event)

    def get(self, client: int) -> ClientSession | None:
        with self._lock:
            return self._present.get(client)

    def present(self) -> dict[int, ClientSession]:
        """Return the sessions of all clients that are present, ordered by the number of the client."""
        with self._lock:
            return dict(sorted(self._present.items()))

    def receive(self, seconds: float) -> Event | None:
        """Return the next event, or None after a timeout."""
        try:
            return self._inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
