"""Specifies what strangers can do to a server by connections alone: nothing that an honest device would notice."""

import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from device_pool import wait_for
from test_grpc_cli import SECONDS, Party
from test_grpc_faults import RUN, outcome, simulated

SILENT = 1100
TWO = replace(RUN, clients=2, rounds=60)

pytestmark = pytest.mark.slow


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Enough for the strangers' ends, which are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3 * SILENT:
        pytest.skip(f"this machine allows a process {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limited(arguments: Sequence[str], descriptors: int) -> list[str]:
    """The command, in a process that may have so many descriptors."""
    return ["bash", "-c", f'ulimit -n {descriptors} && exec "$@"', "--", *arguments]


def say_nothing(address: str, number: int, stack: ExitStack) -> None:
    """Connect so many times."""
    host, _, port = address.rpartition(":")
    for _ in range(number):
        stack.enter_context(socket.create_connection((host, int(port)), SECONDS))


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_silent_connections_neither_end_a_server_nor_keep_devices_out(
    many_descriptors: None, stack: ExitStack, tmp_path: Path
) -> None:
    party = Party(TWO, tmp_path, stack)
    server = party.command(limited(party.serve("--handshake", "2", "--log-file", str(tmp_path / "log.json")), 1024))
    wait_for(lambda: listens(party.address))
    say_nothing(party.address, SILENT, stack)
    clients = [party.command(party.join(name)) for name in ("ann", "bob")]
    wait_for(lambda: party.folder.metrics.exists() and len(party.folder.history()) >= 2, SECONDS)
    say_nothing(party.address, SILENT, stack)
    code, words = server.end()
    assert code == 0, words
    assert [client.end()[0] for client in clients] == [0, 0]
    assert outcome(party.folder.path) == simulated(TWO, tmp_path / "simulated")
