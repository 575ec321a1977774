"""Counts the TLS handshakes that fail, of which gRPC tells nothing.

gRPC tells when a handshake begins, but not whose, and when a stream opens. A connection over which no stream has come
in time has failed: its certificate is not accepted, it speaks no TLS, or it says nothing at all. Where the kernel shows
its table of connections (Linux), the log names the addresses.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from cutlayer.remote.server.far_ends import FarEnd, connections, thin_out

REMEMBERED = 120.0  # seconds for which a port of a peer is not used for another connection
OPENING_SECONDS = 5.0  # from the end of a handshake to the first stream
POLL_SECONDS = 1.0
ROOM_SECONDS = 0.05  # in which one address cannot take all connections

Failed = Callable[[int, Mapping[str, int]], None]


class Handshakes:
    """The handshakes of one server. `failed` is told how many have failed, and how many of each address if known."""

    def __init__(
        self,
        seconds: float = 10.0,  # that a handshake may take
        failed: Failed = lambda number, addresses: None,
        of_an_address: int | None = None,  # connections without a stream; any number by default
        clock: Callable[[], float] = time.monotonic,
        connected: Callable[[int], Iterator[FarEnd]] | None = None,
    ) -> None:
        self.port = 0
        self._seconds, self._failed, self._clock = seconds + OPENING_SECONDS, failed, clock
        self._connected, self._of_an_address = connected or connections, of_an_address
        self._begun: deque[float] = deque()  # when those handshakes began that may still succeed
        self._num_begun = self._num_opened = self._num_failed = 0  # of the connections whose time is over; of all; told
        self._streams: Counter[FarEnd] = Counter()  # that are open over each connection
        self._opened: dict[FarEnd, float] = {}  # connections with streams: when the last one began or ended
        self._seen: dict[FarEnd, float] = {}  # connections without a stream: since when
        self._named: dict[FarEnd, float] = {}  # those of them that were told of: when; the kernel shows them for long
        self._crowded = False  # whether an address may have too many connections
        self._lock = threading.Lock()

    def begun(self) -> None:
        """A handshake begins."""
        self._begun.append(self._clock())
        self._crowded = True

    def opened(self, peer: str) -> None:
        """A stream has come in over a connection, so its handshake has succeeded."""
        end = FarEnd.of_grpc(peer)
        with self._lock:
            self._num_opened += end not in self._opened
            self._opened[end] = self._clock()
            self._streams[end] += 1

    def closed(self, peer: str) -> None:
        """A stream has ended."""
        end = FarEnd.of_grpc(peer)
        with self._lock:
            self._opened[end] = self._clock()
            self._streams[end] -= 1

    def make_room(self) -> None:
        """Hang up on the connections that an address has too many."""
        if self._of_an_address is not None and self._crowded:
            self._crowded = False
            with self._lock:
                known = set(self._opened)
            thin_out(self.port, self._of_an_address, known)

    def check(self) -> None:
        """Tell of the handshakes that have failed since the last call."""
        now = self._clock()
        with self._lock:
            self._look(now)
            while self._begun and self._begun[0] <= now - self._seconds:
                self._begun.popleft()
                self._num_begun += 1
            # Streams over connections that are still young are counted as well, so this number may come late.
            new = max(0, self._num_begun - self._num_opened - self._num_failed)
            self._num_failed += new
            old = now - self._seconds + 2 * POLL_SECONDS  # what is seen is seen late
            late = [end for end, since in self._seen.items() if since <= old] if new else []
            self._named |= dict.fromkeys(late, now)
        if new:
            self._failed(new, Counter(end.address for end in late))

    def _look(self, now: float) -> None:
        """Note who is connected without a stream, as long as handshakes are under way."""
        self._streams += Counter()  # keeps what is above 0
        recent = now - REMEMBERED
        self._opened = {end: t for end, t in self._opened.items() if t > recent or end in self._streams}
        self._named = {end: t for end, t in self._named.items() if t > recent}
        if self._begun:
            self._seen = dict.fromkeys(self._connected(self.port), now) | self._seen
        known = self._opened.keys() | self._named.keys()
        self._seen = {end: t for end, t in self._seen.items() if t > recent and end not in known}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check every second inside the block, and make room more often."""
        over = threading.Event()

        def watch() -> None:
            checked = self._clock()
            while not over.wait(ROOM_SECONDS):
                self.make_room()
                if self._clock() - checked >= POLL_SECONDS:
                    self.check()
                    checked = self._clock()

        thread = threading.Thread(target=watch, name="handshakes", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
