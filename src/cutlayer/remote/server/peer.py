"""The other server, if the training server and the fed server are two processes with two owners.

Both run the same program. Each holds the values of its own place, and only the shapes of the other's. The training
server commands the clients; both servers exchange values with them directly. `NoPeer` stands for one process that is
both servers.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal, TypeVar

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.kinds import Place
from cutlayer.core.servers import Bridge
from cutlayer.core.tree import Tree
from cutlayer.errors import ConfigError, CutlayerError, LinkError, WireError
from cutlayer.remote.device.stream import channel_to
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.tensors.trees import build, flatten, sendable
from cutlayer.remote.tensors.wire import Decoder, encode
from cutlayer.runs.folder import Folder

log = logging.getLogger("cutlayer")

Outbox = queue.SimpleQueue[list[bytes] | None]  # None ends the stream
Kind = TypeVar("Kind")
SECONDS = 600.0  # that a value may take from one server to the other
ROUND_SECONDS = 24 * 3600.0  # that a fed server waits for the next round
PAUSE, PATIENCE = 1.0, 10.0  # seconds between attempts to connect, and for one attempt
GOODBYE_SECONDS = 5.0


class PeerLost(CutlayerError):
    """The other server is gone: both resume from the newest checkpoint that they have in common."""


Notice = m.Respondents | m.Gone | PeerLost  # what a round waits for
Heard = tuple[m.SavedRounds | m.Begin | m.Sent | PeerLost, list[Tensor]]


class NoPeer:
    """Both servers are this process: there is nobody to tell, and nothing to wait for."""

    apart = False
    commands = says_goodbye = True
    link_number = 0

    def has(self, place: Place) -> bool:
        return True

    def separate(self, place: Place) -> bool:
        return False

    def tell(self, message: m.Message, tensors: Sequence[Tensor] = ()) -> None:
        pass

    def begun(self, round: int) -> m.Begin | None:
        return None

    def bridge(self, token: int, real: Callable[[Tree], Tree]) -> Bridge:
        return Bridge()

    def agree(self, folder: Folder, overwrite: bool) -> bool:
        return overwrite

    def linked(self, credentials: Credentials | None) -> AbstractContextManager[None]:
        return nullcontext()

    def ending(self) -> None:
        pass

    def stream(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        raise LinkError("this server holds both roles; start it with --role train")


class Peer:
    """The link to the other server."""

    apart = True

    def __init__(self, here: Literal["server", "fed"], train: str | None = None) -> None:
        self.here, self._train = here, train  # a fed server knows the address of the training server
        self.commands = here == "server"  # whether this server commands the clients
        self.notify: Callable[[Notice], None] = lambda notice: None
        self.link_number = 0  # grows whenever the link comes up or goes down
        self._send: Callable[[m.Message, Sequence[Tensor]], None] | None = None
        self._hang_up: Callable[[], None] = lambda: None
        self._linked, self._over = threading.Event(), threading.Event()
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()

    def has(self, place: Place) -> bool:
        """Return whether the values of a place are in this process."""
        return place == self.here

    def separate(self, place: Place) -> bool:
        """Return whether clients exchange values with this place directly, and not with the server that commands."""
        return place == "fed"

    def bridge(self, token: int, real: Callable[[Tree], Tree]) -> Bridge:
        return PeerBridge(self, token, real)

    # -- the link ---------------------------------------------------------------------------------------------------

    @contextmanager
    def linked(self, credentials: Credentials | None) -> Iterator[None]:
        """At a fed server, keep a link to the training server inside the block, and reconnect whenever it breaks."""
        if self._train is None:
            yield
            return
        thread = threading.Thread(target=self._keep_linked, args=(credentials,), name="peer link", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._hang_up()
            thread.join(GOODBYE_SECONDS)  # the last messages are on their way

    def ending(self) -> None:
        """Note that the run is over: a link that breaks from now on is not made again."""
        self._over.set()

    @property
    def says_goodbye(self) -> bool:
        """Return whether a server is there that tells clients that the run is over: the one that commands them."""
        return self.commands or self._linked.is_set()

    def _keep_linked(self, credentials: Credentials | None) -> None:
        import grpc

        while not self._over.is_set():
            with channel_to(str(self._train), "train", credentials) as channel:
                try:
                    grpc.channel_ready_future(channel).result(PATIENCE)
                except grpc.FutureTimeoutError:
                    log.info("no training server at %s yet; trying again", self._train)
                    continue
                out = Outbox()
                self._follow(channel.stream_stream(m.MEET)(chain.from_iterable(iter(out.get, None))), out)
            self._over.wait(PAUSE)

    def stream(self, chunks: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """At the training server, serve the link that the fed server has opened; yield what goes to it."""
        out = Outbox()
        context.add_callback(lambda: out.put(None))
        threading.Thread(target=self._follow, args=(chunks, out), name="peer", daemon=True).start()
        return chain.from_iterable(iter(out.get, None))

    def _follow(self, chunks: Iterator[bytes], out: Outbox) -> None:
        """Read everything that the other server sends, until it is gone."""
        self._hang_up = lambda: out.put(None)
        link_number = self.connected(lambda message, tensors: out.put(encode(message, tensors)))
        decoder, reason = Decoder(m.FromPeer, m.MOST_BYTES), "the other server closed the connection"
        try:
            for chunk in chunks:
                if (come := decoder.feed(chunk)) is not None:
                    self.took(*come)
        except WireError as error:
            reason = f"the other server sent something that cannot be used: {error}"
        except Exception as error:  # gRPC's own errors when a peer vanishes have no common class
            reason = f"the connection to the other server broke: {type(error).__name__}"
        self.gone(link_number, reason)
        out.put(None)

    def connected(self, send: Callable[[m.Message, Sequence[Tensor]], None]) -> int:
        """Note that the link is up, and return its number."""
        self._heard = queue.SimpleQueue()
        self.link_number += 1
        self._send = send
        self._linked.set()
        return self.link_number

    def gone(self, link_number: int, reason: str) -> None:
        """Note that a link is down, unless there is another one by now."""
        if self.link_number == link_number and self._send is not None:
            self._send = None
            self._linked.clear()
            self.link_number += 1
            self._heard.put((PeerLost(reason), []))
            self.notify(PeerLost(reason))

    # -- messages ---------------------------------------------------------------------------------------------------

    def tell(self, message: m.Message, tensors: Sequence[Tensor] = ()) -> None:
        send = self._send
        if send is None:
            raise PeerLost("the other server is gone")
        send(message, tensors)

    def took(self, message: m.Message, tensors: list[Tensor]) -> None:
        """Take a message from the other server."""
        match message:
            case m.Respondents() | m.Gone():
                self.notify(message)
            case m.SavedRounds() | m.Begin() | m.Sent():
                self._heard.put((message, tensors))
            case _:
                raise WireError(f"a {type(message).__name__} came where it does not belong")

    def agree(self, folder: Folder, overwrite: bool) -> bool:
        """Delete the checkpoints after the newest round that both servers have; return whether the run starts anew."""
        with folder.guarded() as hold:
            if folder.path.exists():
                hold()  # nothing is deleted where another process trains
            self._linked.wait()
            mine = folder.store.rounds()
            own = [] if overwrite else mine
            self.tell(m.SavedRounds(tuple(own)))
            theirs, _ = self.wait_for(m.SavedRounds)
            newest = max({*own} & {*theirs.rounds}, default=0)
            if max(own, default=0) > newest + 1:  # no crash leaves them further apart
                raise ConfigError(
                    f"{folder.path} is at round {max(own)}, but the other server has none after {newest}; put its "
                    "folder back, or begin again with --overwrite on both"
                )
            for round_ in mine:
                if round_ > newest:
                    folder.store.path(round_).unlink()
            return newest == 0

    def begun(self, round: int) -> m.Begin | None:
        """At the fed server, wait for the training server to begin a round."""
        if self.commands:
            return None
        begin, _ = self.wait_for(m.Begin, ROUND_SECONDS)
        if begin.round != round:
            raise PeerLost(f"the training server is at round {begin.round + 1}, and this one at {round + 1}")
        return begin

    def wait_for(self, kind: type[Kind], seconds: float = SECONDS) -> tuple[Kind, list[Tensor]]:
        """Wait for the next message of this kind, and return it with its tensors."""
        end = time.monotonic() + seconds
        while True:
            try:
                message, tensors = self._heard.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise PeerLost(f"the other server said nothing for {seconds:g} seconds") from None
            if isinstance(message, PeerLost):
                raise message
            if isinstance(message, kind):
                return message, tensors
            if isinstance(message, m.SavedRounds):  # it resumes from a checkpoint, and so must this one
                raise PeerLost("the other server has started again")


class PeerBridge(Bridge):
    """The bridge between two servers in two processes, for one attempt at a round."""

    def __init__(self, peer: Peer, token: int, real: Callable[[Tree], Tree]) -> None:
        self.peer, self.token, self._real, self._number = peer, token, real, 0

    def kept(self, place: Place, value: Tree) -> Tree:
        return value if self.peer.has(place) else tree.shapes(value)

    def run(self, place: Place, fn: Callable[..., Any], values: list[Any]) -> Any:
        """Run a function; if it fails on shapes because it brings values of its own, run it on zeros."""
        try:
            return fn(*values)
        except RuntimeError:
            if self.peer.has(place):
                raise
            return tree.shapes(fn(*(tree.zeros(v) for v in values)))

    def crossed(self, origin: Place, values: list[Tree]) -> list[Tree]:
        """Send values to the other server, or wait for its values, whose shapes must be those of the program."""
        self._number += 1
        if self.peer.has(origin):
            self.peer.tell(*sendable(self.token, self._number, self._real(tuple(values))))
            return [tree.shapes(v) for v in values]
        sent, tensors = self.peer.wait_for(m.Sent)
        if (sent.token, sent.number) != (self.token, self._number):
            raise PeerLost("the two servers have lost step with each other")
        wanted = flatten(tuple(values))
        forms, came = ([(a.dtype, a.shape) for a in some] for some in (wanted.tensors, tensors))
        if sent.tree != wanted.skeleton or forms != came or len(sent.numbers) != len(wanted.numbers):
            raise PeerLost("the other server sent something of another shape; both need the same configuration")
        return list(build(sent.tree, iter(sent.numbers).__next__, iter(tensors).__next__))

    def looked(self, place: Place, value: Tree) -> Tree:
        """Show a value to both servers; it is an aggregate."""
        (other,) = self.crossed(place, [value])
        return value if self.peer.has(place) else other
