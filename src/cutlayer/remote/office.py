"""Where a server meets its clients: who is present, what is under way to them, and what has come in.

Transports (gRPC streams, Ray actors) tell the office of clients that join, answer and go; a round reads its inbox.
"""

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from cutlayer.remote.answers import num_bytes
from cutlayer.remote.messages import Answer, Kept, Message, Refusal, Work
from cutlayer.remote.queue import Letter

REPLACED = "another process has joined as the same client; stop one of the two"
MOST_LISTS = 1000  # that a client remembers
MOST_UNREAD = 8  # answers that may come before they are asked for


class RoundId(NamedTuple):
    """One attempt at a round."""

    number: int
    key: int
    token: int

    @classmethod
    def drawn(cls, number: int, key: int) -> "RoundId":
        return cls(number, key, secrets.randbits(62))


class Joined(NamedTuple):
    """A client is there, perhaps again."""

    client: int


class Answered(NamedTuple):
    """A client has answered; `size` is what came over the wire."""

    client: int
    session: int
    answer: Answer | Refusal
    tensors: Sequence[Tensor]
    size: int = 0


class Lost(NamedTuple):
    """A client's session is over."""

    client: int
    session: int
    reason: str


class PeerSaid(NamedTuple):
    """The other server has said something that a round waits for, or is gone."""

    message: object


Event = Joined | Answered | Lost | PeerSaid
Send = Callable[[Message, Sequence[Tensor]], int]  # gives the bytes that go over the wire
Close = Callable[[str], None]


class Line:
    """A server's end of one session."""

    def __init__(
        self,
        *,
        client: int,
        name: str,
        session: int,
        samples: int,
        kept: Sequence[Kept],
        send: Send,
        close: Close,
        commands: bool = True,  # whether this server commands the client, or another one
        most_bytes: int = 0,  # of an answer that then comes before it is asked for
    ) -> None:
        self.client, self.name, self.session, self.samples, self.kept = client, name, session, samples, tuple(kept)
        # Of the answers to the last two letters: one that comes twice may come after the next letter has gone.
        self._sizes = (most_bytes, most_bytes)
        self.asked: int | None = None  # the number of that answer, until it has come
        self.noted = False  # whether a round has heard what it keeps
        self._send, self.close, self._commands = send, close, commands
        self._numbers = itertools.count(1)
        self._unread = 0
        self._lists: dict[bytes, int] = {}

    @property
    def most_bytes(self) -> int:
        """The most that an answer may take now."""
        return max(self._sizes)

    def deliver(self, message: Message, tensors: Sequence[Tensor]) -> int:
        """Send something that is no letter; the bytes that went."""
        return self._send(message, tensors)

    def expects(self, answer: Answer | Refusal) -> bool:
        """Whether this is the answer that was asked for, once. A server that does not command cannot know yet."""
        if not self._commands:
            self._unread += 1
            return self._unread <= MOST_UNREAD
        if answer.number != self.asked:
            return False
        self.asked = None
        return True

    def send(self, letter: Letter, round: RoundId, begins: bool, up: int = 0) -> tuple[int, int]:
        """Send a letter; the number that its answer will have, and the bytes that went."""
        if not self._commands:
            self._unread = 0
            return up, 0
        self._sizes = (self._sizes[1], num_bytes(letter))
        if len(self._lists) >= MOST_LISTS:
            self._lists.clear()
        content = msgspec.msgpack.encode(letter.commands)
        is_new = content not in self._lists
        name = self._lists.setdefault(content, len(self._lists))
        self.asked = next(self._numbers)
        work = Work(
            session=self.session,
            number=self.asked,
            round=round.number,
            key=round.key,
            token=round.token,
            begins=begins,
            list=name,
            commands=letter.commands if is_new else None,
            numbers=letter.numbers,
        )
        return work.number, self._send(work, letter.tensors)


class Office:
    """The clients that are present, by number."""

    def __init__(self, flush: Callable[[], None] = lambda: None) -> None:
        self.flush = flush  # for transports that send many letters at once
        self.met: set[int] = set()  # clients that were ever here
        self._lines: dict[int, Line] = {}
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sessions = itertools.count(secrets.randbits(40))

    def new_session(self) -> int:
        return next(self._sessions)

    def join(self, line: Line) -> None:
        """A client takes its place; an older session of the same client is over."""
        with self._lock:
            old = self._lines.get(line.client)
            self._lines[line.client] = line
            self.met.add(line.client)
        if old is not None:
            old.close(REPLACED)
            self._inbox.put(Lost(line.client, old.session, "it has joined again"))
        self._inbox.put(Joined(line.client))

    def leave(self, client: int, session: int, reason: str) -> None:
        """A session is over, if it is not another one by now."""
        with self._lock:
            line = self._lines.get(client)
            if line is None or line.session != session:
                return
            del self._lines[client]
        line.close(reason)
        self._inbox.put(Lost(client, session, reason))

    def take(self, event: Answered | PeerSaid) -> None:
        self._inbox.put(event)

    def line(self, client: int) -> Line | None:
        with self._lock:
            return self._lines.get(client)

    def lines(self) -> dict[int, Line]:
        """Everybody who is present, by number."""
        with self._lock:
            return dict(sorted(self._lines.items()))

    def receive(self, seconds: float) -> Event | None:
        """The next thing that happens, or None if nothing does for so long."""
        try:
            return self._inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
