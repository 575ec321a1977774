"""How much of a server strangers and single clients may take."""

import logging
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from cutlayer.core.checks import check_positive
from cutlayer.errors import ConfigError
from cutlayer.remote.server.far_ends import DESCRIPTORS

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger("cutlayer")

RESERVED = 200  # descriptors for checkpoints, logs, metrics and libraries
MOST_DESCRIPTORS = 2**20  # that are asked for; some systems allow a process a thousand times as many
FEWEST_CONNECTIONS = 1000  # by default, however few clients a run has
MOST_STREAMS = 4  # of one certificate at once
OF_EACH_CLIENT = 4  # connections, by default: a device that has lost its network may leave some behind


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The most that a server gives to those who connect."""

    connections: int | None = None  # at once, with and without a certificate; by default from the number of clients
    of_an_address: int | None = None  # connections at once without a certificate; any number by default
    handshake: float = 10.0  # seconds that a connection has to show its certificate
    steps: int = 100_000  # of one client in a round, by the number of samples that it claims

    def __post_init__(self) -> None:
        check_positive("handshake", self.handshake)
        for name in ("connections", "of_an_address", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; at least 1 must be allowed")
        if self.of_an_address is not None and not DESCRIPTORS.exists():
            raise ConfigError(
                "this system does not tell who is connected; limit connections by address in its firewall"
            )

    def most_connections(self, num_clients: int) -> int:
        """Return how many connections to allow, so that some descriptors are left for the server's own files."""
        wanted = self.connections or max(FEWEST_CONNECTIONS, OF_EACH_CLIENT * num_clients)
        descriptors = raised_descriptors()
        if descriptors is None or wanted + RESERVED <= descriptors:
            return wanted
        left = descriptors - RESERVED
        if left < num_clients:
            raise ConfigError(
                f"this process may open {descriptors} files, too few for {num_clients} clients and {RESERVED} files of "
                "its own; raise the limit with `ulimit -n`, or LimitNOFILE= in the unit"
            )
        if self.connections is not None:
            log.warning(
                "%d connections are allowed instead of %d, because this process may open %d files; raise the limit "
                "with `ulimit -n`, or LimitNOFILE= in the unit",
                left,
                wanted,
                descriptors,
            )
        return left


def raised_descriptors() -> int | None:
    """Raise the number of files that this process may open as far as it may, and return it; None if unknown."""
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return None if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # the system's own limit is below the process's
        return soft
    return most


class Opened(Protocol):
    """A stream of a client."""

    session: Any  # None until the client has one

    def give_way(self, reason: str) -> None:
        """End at once."""


class OpenStreams:
    """The streams of each certificate.

    The oldest one without a session makes room for a newer one, in case a device has lost it and is back.
    """

    def __init__(self) -> None:
        self._streams: dict[str, list[Opened]] = {}
        self._lock = threading.Lock()

    def enter(self, name: str, stream: Opened) -> Opened | None:
        """Add a stream; return another one of the same name if that one must end."""
        with self._lock:
            streams = self._streams.setdefault(name, [])
            streams.append(stream)
            if len(streams) <= MOST_STREAMS:
                return None
            oldest = next((other for other in streams if other.session is None), streams[0])
            streams.remove(oldest)
            return oldest

    def leave(self, name: str, stream: Opened) -> None:
        """Remove a stream that has ended."""
        with self._lock:
            streams = self._streams.get(name, [])
            if stream in streams:
                streams.remove(stream)
            if not streams:
                self._streams.pop(name, None)
