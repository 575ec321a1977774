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

from cutlayer.core import tree
from cutlayer.core.kinds import Place
from cutlayer.core.servers import Bridge
from cutlayer.core.tree import Tree
from cutlayer.errors import CutlayerError, WireError
from cutlayer.remote.protocol.messages import Begin, Gone, Message, Respondents, SavedRounds, Sent
from cutlayer.remote.tensors.trees import build, flatten

Role = Literal["server", "fed"]
SECONDS = 600.0  # that a value may take from one server to the other


class PeerLost(CutlayerError):
    """The other server is gone: both go on from the newest checkpoint that they have in common."""


class NoPeer:
    """Both servers are this process: there is nobody to tell."""

    apart = False
    commands = True
    link_number = 0

    def has(self, place: Place) -> bool:
        return True

    def tell(self, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        pass

    def begun(self, round: int, seconds: float) -> Begin | None:
        return None

    def bridge(self, token: int, real: Callable[[Tree], Tree]) -> Bridge:
        return Bridge()


class Peer:
    """A link to the other server, which tells and hears."""

    apart = True

    def __init__(self, here: Role) -> None:
        self.here = here
        self.notify: Callable[[Message | PeerLost], None] = lambda message: None  # of what a round waits for
        self.send: Callable[[Message, Sequence[Tensor]], None] | None = None
        self.hang_up: Callable[[], None] | None = None
        self._there = threading.Event()
        self.link_number = 0  # grows whenever the link comes up or goes down
        self._heard: queue.SimpleQueue[SavedRounds | Begin | tuple[Sent, list[Tensor]] | PeerLost] = queue.SimpleQueue()

    @property
    def commands(self) -> bool:
        """Whether the server that is here commands the clients."""
        return self.here == "server"

    def has(self, place: Place) -> bool:
        """Whether the values of a place are here."""
        return place == self.here

    def bridge(self, token: int, real: Callable[[Tree], Tree]) -> Bridge:
        return PeerBridge(self, token, real)

    def connected(
        self, send: Callable[[Message, Sequence[Tensor]], None], hang_up: Callable[[], None] = lambda: None
    ) -> int:
        """The link is up; its number."""
        self._heard = queue.SimpleQueue()
        self.link_number += 1
        self.send, self.hang_up = send, hang_up
        self._there.set()
        return self.link_number

    def gone(self, link_number: int, reason: str) -> None:
        """A link is down, if there is not another one by now."""
        if self.link_number == link_number and self.send is not None:
            self.send = None
            self._there.clear()
            self.link_number += 1
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
            case Respondents() | Gone():
                self.notify(message)
            case SavedRounds() | Begin():
                self._heard.put(message)
            case Sent():
                self._heard.put((message, tensors))
            case _:
                raise WireError(f"a {type(message).__name__} came where it does not belong")

    def rounds(self, mine: list[int]) -> int:
        """The newest round of which both have a checkpoint; 0 if there is none."""
        self.tell(SavedRounds(tuple(mine)))
        theirs = self._next(SavedRounds, SECONDS)
        return max({*mine} & {*theirs.rounds}, default=0)

    def begun(self, round: int, seconds: float) -> Begin | None:
        """The round as the training server has begun it, if that is the other one."""
        if self.commands:
            return None
        found: Begin = self._next(Begin, seconds)
        if found.round != round:
            raise PeerLost(f"the training server is at round {found.round + 1}, and this one at {round + 1}")
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
            if isinstance(found, SavedRounds):  # it has begun again, and so must this one
                raise PeerLost("the other server has started again")


class PeerBridge(Bridge):
    """The bridge of one attempt at a round between two processes."""

    def __init__(self, peer: Peer, token: int, real: Callable[[Tree], Tree]) -> None:
        self.peer, self.token, self._real, self._number = peer, token, real, 0

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
        flat = flatten(self._real(values))
        sent = Sent(token=self.token, number=self._number, tree=flat.skeleton, numbers=tuple(flat.numbers))
        self.peer.tell(sent, flat.tensors)

    def _received(self, expected: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """What the other server sent, of the shapes that the program says."""
        self._number += 1
        sent, tensors = self.peer.value(self.token, self._number)
        wanted = flatten(expected)
        forms, came = ([(a.dtype, a.shape) for a in some] for some in (wanted.tensors, tensors))
        if sent.tree != wanted.skeleton or forms != came or len(sent.numbers) != len(wanted.numbers):
            raise PeerLost("the other server sent something of another shape; both need the same configuration")
        values: tuple[Tree, ...] = build(sent.tree, iter(sent.numbers).__next__, iter(tensors).__next__)
        return values
