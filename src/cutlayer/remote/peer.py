"""The other server, where the training server and the fed server are two processes with two owners.

Both run the same program. Each holds the values of its own place, and of the other's only the shapes; the training
server commands the clients, and each server talks to them itself.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from cutlayer import tree
from cutlayer.errors import CutlayerError, WireError
from cutlayer.kinds import Place
from cutlayer.remote.messages import Arrived, Begin, Gone, Message, Rounds, Sent
from cutlayer.remote.trees import build, flatten
from cutlayer.tree import Tree

Role = Literal["server", "fed"]
SECONDS = 600.0  # that a value may take from one server to the other


class PeerLost(CutlayerError):
    """The other server is gone: both go on from the newest checkpoint that they have in common."""


class Peer:
    """A link to the other server, which tells and hears."""

    def __init__(self, here: Role) -> None:
        self.here = here
        self.notify: Callable[[Message | PeerLost], None] = lambda message: None  # of what a round waits for
        self.send: Callable[[Message, Sequence[Tensor]], None] | None = None
        self.hang_up: Callable[[], None] | None = None
        self._there = threading.Event()
        self.meeting = 0  # how often the two have met or parted
        self._heard: queue.SimpleQueue[Rounds | Begin | tuple[Sent, list[Tensor]] | PeerLost] = queue.SimpleQueue()

    @property
    def commands(self) -> bool:
        """Whether the server that is here commands the clients."""
        return self.here == "server"

    def connected(
        self, send: Callable[[Message, Sequence[Tensor]], None], hang_up: Callable[[], None] = lambda: None
    ) -> int:
        """The two have met; the number of this meeting."""
        self._heard = queue.SimpleQueue()
        self.meeting += 1
        self.send, self.hang_up = send, hang_up
        self._there.set()
        return self.meeting

    def gone(self, meeting: int, reason: str) -> None:
        """A meeting is over, if there is not another one by now."""
        if self.meeting == meeting and self.send is not None:
            self.send = None
            self._there.clear()
            self.meeting += 1
            self._heard.put(PeerLost(reason))
            self.notify(PeerLost(reason))

    def leave(self) -> None:
        """Say nothing more: the other side then closes the link."""
        if self.hang_up is not None:
            self.hang_up()

    def await_other(self) -> None:
        """Wait until the other server is there."""
        self._there.wait()

    def tell(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        send = self.send
        if send is None:
            raise PeerLost("the other server is gone")
        send(message, tensors)

    def took(self, message: Message, tensors: list[Tensor]) -> None:
        """Something came."""
        match message:
            case Arrived() | Gone():
                self.notify(message)
            case Rounds() | Begin():
                self._heard.put(message)
            case Sent():
                self._heard.put((message, tensors))
            case _:
                raise WireError(f"a {type(message).__name__} came where it does not belong")

    def rounds(self, mine: list[int]) -> int:
        """The newest round of which both have a checkpoint; 0 if there is none."""
        self.tell(Rounds(tuple(mine)))
        theirs = self._next(Rounds, SECONDS)
        return max({*mine} & {*theirs.rounds}, default=0)

    def begin(self, seconds: float) -> Begin:
        """The next round, as the training server says."""
        found: Begin = self._next(Begin, seconds)
        return found

    def value(self, token: int, number: int) -> tuple[Sent, list[Tensor]]:
        sent, tensors = self._next(tuple, SECONDS)
        if (sent.token, sent.number) != (token, number):
            raise PeerLost("the two servers have lost step with each other")
        return sent, tensors

    def _next(self, kind: type, seconds: float):  # type: ignore[no-untyped-def]
        end = time.monotonic() + seconds
        while True:
            try:
                found = self._heard.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise PeerLost(f"the other server said nothing for {seconds:g} seconds") from None
            if isinstance(found, PeerLost):
                raise found
            if isinstance(found, kind):
                return found
            if isinstance(found, Rounds):  # it has begun again, and so must this one
                raise PeerLost("the other server has started again")


class Apart:
    """The bridge of one attempt at a round between two processes."""

    def __init__(self, peer: Peer, token: int) -> None:
        self.peer, self.token, self._number = peer, token, 0

    def kept(self, place: Place, value: Tree) -> Tree:
        return value if place == self.peer.here else tree.shapes(value)

    def run(self, place: Place, fn: Callable[..., Any], values: list[Any]) -> Any:
        """Elsewhere only the shapes count; where a function brings values of its own, it is run on zeros."""
        if place == self.peer.here:
            return fn(*values)
        try:
            return fn(*values)
        except RuntimeError:
            return tree.shapes(fn(*(tree.zeros(v) for v in values)))

    def crossed(self, origin: Place, values: list[Tree]) -> list[Tree]:
        if origin == self.peer.here:
            self._send(tuple(values))
            return [tree.shapes(v) for v in values]
        return list(self._received(tuple(values)))

    def looked(self, place: Place, value: Tree) -> Tree:
        """Both see it: it is an aggregate."""
        if place == self.peer.here:
            self._send((value,))
            return value
        return self._received((value,))[0]

    def _send(self, values: tuple[Tree, ...]) -> None:
        self._number += 1
        flat = flatten(values)
        sent = Sent(token=self.token, number=self._number, tree=flat.skeleton, numbers=tuple(flat.numbers))
        self.peer.tell(sent, flat.tensors)

    def _received(self, expected: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """What the other server sent, of the shapes that the program says."""
        self._number += 1
        sent, tensors = self.peer.value(self.token, self._number)
        wanted = flatten(expected)
        forms, came = ([(a.dtype, a.shape) for a in some] for some in (wanted.tensors, tensors))
        if repr(sent.tree) != repr(wanted.skeleton) or forms != came or len(sent.numbers) != len(wanted.numbers):
            raise PeerLost("the other server sent something of another shape; both need the same configuration")
        values: tuple[Tree, ...] = build(sent.tree, iter(sent.numbers).__next__, iter(tensors).__next__)
        return values
