"""Who is connected to a port of this process, as the system tells; gRPC does not."""

import os
import socket
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

DESCRIPTORS = Path("/proc/self/fd")
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
MOST_OF_A_TABLE = 2**20  # bytes: a flood leaves many closed connections in it, and reading it must stay cheap
LISTENS = "0A"  # the state of a socket that listens


class FarEnd(NamedTuple):
    """The other end of a connection."""

    address: str
    port: int

    @classmethod
    def of_grpc(cls, peer: str) -> "FarEnd":
        """Read what gRPC calls a peer, such as ipv4:192.0.2.1:40920 or ipv6:%5B::1%5D:40920."""
        address, _, port = unquote(peer).partition(":")[2].rpartition(":")
        return cls(address.strip("[]"), int(port) if port.isdigit() else 0)

    @classmethod
    def of_socket(cls, one: socket.socket) -> "FarEnd":
        address, port, *_ = one.getpeername()
        return cls(_plain(ip_address(address)), port)

    @classmethod
    def of_kernel(cls, text: str) -> "FarEnd":
        """Read an entry of the kernel's table: words of four bytes in the machine's order, and the port."""
        address, _, port = text.partition(":")
        words = bytes.fromhex(address)
        packed = b"".join(socket.htonl(int.from_bytes(words[i : i + 4])).to_bytes(4) for i in range(0, len(words), 4))
        return cls(_plain(ip_address(packed)), int(port, 16))


def _plain(address: IPv4Address | IPv6Address) -> str:
    """Write an address of IPv4 as such, also if it came over IPv6."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def connections(port: int) -> Iterator[FarEnd]:
    """Yield who is or was just now connected to a port of this machine; nobody where the system does not tell."""
    for table in TABLES:
        try:
            with table.open("rb") as file:
                lines = file.read(MOST_OF_A_TABLE).decode("ascii", errors="replace").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 3 and fields[3] != LISTENS and fields[1].endswith(f":{port:04X}"):
                yield FarEnd.of_kernel(fields[2])


def thin_out(port: int, most: int, known: Container[FarEnd]) -> None:
    """Hang up on all but `most` connections of each address, beside those that are known.

    gRPC cannot refuse connections by address. It takes a socket that is shut down for one whose other end has hung up.
    """
    found: Counter[str] = Counter()
    for one in _sockets():
        with one, suppress(OSError):  # it listens, or has been closed by now
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                end = FarEnd.of_socket(one)
                found[end.address] += end not in known
                if found[end.address] > most and end not in known:
                    one.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """Yield a second handle of each socket of this process."""
    for descriptor in DESCRIPTORS.iterdir():
        with suppress(OSError):  # it is closed by now
            handle = os.dup(int(descriptor.name))
            try:
                yield socket.socket(fileno=handle)
            except OSError:  # no socket
                os.close(handle)
