"""A bad network for tests: two network namespaces joined by a link that delays, loses, limits or cuts.

The link is a process of its own that carries IP packets between two TUN devices. It makes the namespaces, and takes
them away when its standard input closes: so it also cleans up after a test that was killed.

Called as a script: python bad_network.py SEED CONGESTION, with one `Link` as a line of JSON for each change
"""

import ctypes
import fcntl
import json
import math
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

SERVER_IP, CLIENT_IP = "10.77.0.1", "10.77.0.2"  # never seen outside the two namespaces, so always the same
MTU = 1500
AT_ONCE = 64  # packets read from one side before the other has its turn
STOPS_WITHIN = 60.0  # seconds for the link to take everything away
HOLDS = "holds"  # what the link answers to a change
REFUSED = "cannot make a bad network here"
_CLONE_NEWNET = 0x40000000  # these four are the kernel's
_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000


@dataclass(frozen=True, kw_only=True)
class Link:
    """What happens to packets, the same in both directions."""

    loss: float = 0.0  # the probability that a packet is lost, independent of all others
    delay_ms: float = 0.0  # of a round trip; each way has half of it
    rate_mbit: float = math.inf  # IP packets, headers included, per direction
    queue_ms: float = 100.0  # a packet that would wait longer than this for its turn is dropped
    cut: bool = False  # nothing passes

    def __post_init__(self) -> None:
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss is {self.loss}; it is a probability, from 0 to 1")
        if self.delay_ms < 0:
            raise ValueError(f"delay_ms is {self.delay_ms}; it cannot be negative")
        for name in ("rate_mbit", "queue_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")


class OneWay:
    """The packets under way in one direction."""

    def __init__(self, link: Link, chance: random.Random) -> None:
        self.link = link
        self._chance = chance
        self._waiting: deque[tuple[float, bytes]] = deque()  # each with the time of its arrival
        self._free_at = 0.0  # when the last packet has been put on the line

    def change(self, link: Link) -> None:
        """Change the link; a cut also drops the packets under way."""
        self.link = link
        if link.cut:
            self._waiting.clear()
            self._free_at = 0.0

    def put(self, packet: bytes, now: float) -> None:
        """Send a packet on its way, unless the link is cut, its queue is full or the packet is to be lost."""
        starts = max(now, self._free_at)
        if self.link.cut or starts - now > self.link.queue_ms / 1e3:
            return
        self._free_at = starts + 8 * len(packet) / (self.link.rate_mbit * 1e6)
        if self._chance.random() < self.link.loss:
            return
        arrives = self._free_at + self.link.delay_ms / 2e3
        if self._waiting:
            arrives = max(arrives, self._waiting[-1][0])  # in order, also after the delay was made shorter
        self._waiting.append((arrives, packet))

    def arrived(self, now: float) -> Iterator[bytes]:
        """Remove and yield the packets that have arrived by now."""
        while self._waiting and self._waiting[0][0] <= now:
            yield self._waiting.popleft()[1]

    def next_arrival(self) -> float:
        return self._waiting[0][0] if self._waiting else math.inf


class BadNetwork:
    """A bad network under way, as a test uses it."""

    server_ip = SERVER_IP
    client_ip = CLIENT_IP

    def __init__(self, process: "subprocess.Popen[str]", link: Link) -> None:
        self.process = process
        self.link = link
        self.server, self.client = namespaces(process.pid)

    def server_command(self, command: Sequence[str]) -> list[str]:
        """The arguments that run a command at the server; the process started is the command itself."""
        return ["ip", "netns", "exec", self.server, *command]

    def client_command(self, command: Sequence[str]) -> list[str]:
        """The arguments that run a command at the client; the process started is the command itself."""
        return ["ip", "netns", "exec", self.client, *command]

    def server_socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket at the server that this process can use."""
        return inside(self.server, lambda: socket.socket(type=kind))

    def client_socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket at the client that this process can use."""
        return inside(self.client, lambda: socket.socket(type=kind))

    def set(self, **changes: Any) -> None:
        """Change the link; when this returns, the change holds."""
        self.link = replace(self.link, **changes)
        tell(self.process, self.link)


@contextmanager
def bad_network(
    *,
    loss: float = 0.0,
    delay_ms: float = 0.0,
    rate_mbit: float = math.inf,
    queue_ms: float = 100.0,
    seed: int = 0,
    congestion: str = "reno",
) -> Iterator[BadNetwork]:
    """Two namespaces with such a link between them; the test is skipped where the machine does not allow it.

    What still runs in them at the end is killed. TCP's congestion control decides what losses cost and differs between
    machines; reno is on each of them, needs no special right, and suffers most.
    """
    link = Link(loss=loss, delay_ms=delay_ms, rate_mbit=rate_mbit, queue_ms=queue_ms)
    process = subprocess.Popen(
        [sys.executable, __file__, str(seed), congestion],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the test, which then closes the pipe
    )
    try:
        tell(process, link)
        yield BadNetwork(process, link)
    finally:
        process.communicate(timeout=STOPS_WITHIN)
    if process.returncode:
        raise RuntimeError(f"the link ended with status {process.returncode}; its standard error says why")


def tell(process: "subprocess.Popen[str]", link: Link) -> None:
    """Send the link's process a new link and wait until it holds."""
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):  # then there is no answer, or one that says why
        process.stdin.write(json.dumps(asdict(link)) + "\n")
        process.stdin.flush()
    answer = process.stdout.readline().strip()
    if answer.startswith(REFUSED):
        import pytest  # not at the top: the link's process needs none of it

        pytest.skip(answer)
    if answer != HOLDS:
        raise RuntimeError(f"the link answered {answer!r}; its standard error says why")


def namespaces(pid: int) -> tuple[str, str]:
    """The names of the two namespaces that the link of this process number makes: the server's and the client's."""
    return f"bad-network-{pid}-server", f"bad-network-{pid}-client"


def inside(namespace: str, make: Callable[[], T]) -> T:
    """Call `make` inside a namespace, in a thread, so that the calling thread stays in its own."""

    def go_and_make() -> T:
        with Path("/run/netns", namespace).open() as place:
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
        return make()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(go_and_make).result()


def ip(*arguments: str) -> str:
    """The output of the `ip` command."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def open_end(namespace: str) -> int:
    """Make a namespace with one end of the link in it, a TUN device: what is routed there can be read here."""
    ip("netns", "add", namespace)
    end = inside(namespace, lambda: os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    return end


def set_up_end(namespace: str, own: str, other: str, congestion: str) -> None:
    """Give an end its address, and its namespace a loopback and a congestion control."""
    ip("-n", namespace, "link", "set", "dev", "lo", "up")
    ip("-n", namespace, "link", "set", "dev", "wire", "mtu", str(MTU))
    ip("-n", namespace, "link", "set", "dev", "wire", "addrgenmode", "none")  # IPv6 would send packets by itself
    ip("-n", namespace, "address", "add", own, "peer", other, "dev", "wire")
    ip("-n", namespace, "link", "set", "dev", "wire", "up")
    inside(namespace, lambda: Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(congestion))


def remove(namespace: str) -> None:
    """Kill what still runs in a namespace and delete it; do nothing if there is none."""
    if not Path("/run/netns", namespace).exists():
        return
    for pid in ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", namespace)


def carry(ends: tuple[int, int], seed: int) -> None:
    """Carry packets between the two ends until standard input closes."""
    ways = {end: OneWay(Link(), random.Random(f"{seed} {way}")) for way, end in enumerate(ends)}
    opposite = {ends[0]: ends[1], ends[1]: ends[0]}
    events = select.poll()
    for source in (sys.stdin.fileno(), *ends):
        events.register(source, select.POLLIN)
    while True:
        pause = min(way.next_arrival() for way in ways.values()) - time.monotonic()
        for source, _ in events.poll(None if math.isinf(pause) else max(0.0, pause * 1e3)):
            if source in ways:
                read_some(source, ways[source])
            elif order := sys.stdin.readline():
                for way in ways.values():
                    way.change(Link(**json.loads(order)))
                print(HOLDS, flush=True)
            else:
                return
        for source, way in ways.items():
            for packet in way.arrived(time.monotonic()):
                os.write(opposite[source], packet)


def read_some(source: int, way: OneWay) -> None:
    """Put the packets that wait at an end on their way."""
    with suppress(BlockingIOError):
        for _ in range(AT_ONCE):
            way.put(os.read(source, 1 << 16), time.monotonic())


def main(seed: int, congestion: str) -> None:
    """Make the two namespaces, carry packets between them, and delete them."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    server, client = namespaces(os.getpid())
    with ExitStack() as at_the_end:
        at_the_end.callback(remove, server)
        at_the_end.callback(remove, client)
        try:
            ends = open_end(server), open_end(client)
        except OSError as error:
            print(f"{REFUSED}: {error}", flush=True)
            return
        set_up_end(server, SERVER_IP, CLIENT_IP, congestion)
        set_up_end(client, CLIENT_IP, SERVER_IP, congestion)
        carry(ends, seed)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
