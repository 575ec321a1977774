"""Specifies what the bad network of the tests does to packets, and that it leaves nothing behind.

Called as a script, it is one end of a gRPC stream: python test_bad_network.py serve IP, or ask ADDRESS
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from bad_network import BadNetwork, Link, OneWay, bad_network
from scipy.stats import binom

NUM_PACKETS = 500
GRPC_BYTES = 200_000
PATIENCE = 60.0  # seconds after which a test that waits for something fails


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"not so after {PATIENCE} s"
        time.sleep(0.01)


# One direction, with a clock that the test sets


def arrivals(way: OneWay, times: list[float]) -> list[tuple[float, bytes]]:
    return [(at, packet) for at in times for packet in way.arrived(at)]


def test_each_way_has_half_of_the_delay() -> None:
    way = OneWay(Link(delay_ms=100), random.Random(0))
    way.put(b"a", 1.0)
    assert way.next_arrival() == 1.05
    assert arrivals(way, [1.0499, 1.05]) == [(1.05, b"a")]
    assert way.next_arrival() == float("inf")


def test_packets_wait_for_their_turn_and_a_full_queue_drops() -> None:
    way = OneWay(Link(rate_mbit=8, queue_ms=2), random.Random(0))
    for name in b"abcd":
        way.put(bytes([name]) * 1000, 0.0)  # each takes a millisecond; the fourth would wait for three
    assert [(at, packet[:1]) for at, packet in arrivals(way, [0.001, 0.002, 0.003, 0.004])] == [
        (0.001, b"a"),
        (0.002, b"b"),
        (0.003, b"c"),
    ]


def test_the_rate_limits_the_throughput() -> None:
    way = OneWay(Link(rate_mbit=10, queue_ms=10_000), random.Random(0))
    for _ in range(2500):
        way.put(bytes(1000), 0.0)  # 2.5 MB in all, which take 2 s at 10 Mbit/s
    assert len(arrivals(way, [1.0004])) == 1250
    assert len(arrivals(way, [1.9996])) == 1249
    assert way.next_arrival() == pytest.approx(2.0)


def test_a_shorter_delay_overtakes_nothing() -> None:
    way = OneWay(Link(delay_ms=200), random.Random(0))
    way.put(b"a", 0.0)
    way.change(Link())
    way.put(b"b", 0.0)
    assert arrivals(way, [0.0, 0.1]) == [(0.1, b"a"), (0.1, b"b")]


def test_a_cut_loses_what_is_under_way() -> None:
    way = OneWay(Link(delay_ms=200), random.Random(0))
    way.put(b"a", 0.0)
    way.change(Link(cut=True))
    way.put(b"b", 0.0)
    way.change(Link())
    way.put(b"c", 1.0)
    assert arrivals(way, [2.0]) == [(2.0, b"c")]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": 2}, "loss is 2; it is a probability, from 0 to 1"),
        ({"delay_ms": -1}, "delay_ms is -1; it cannot be negative"),
        ({"rate_mbit": 0}, "rate_mbit is 0; it must be positive"),
        ({"queue_ms": 0}, "queue_ms is 0; it must be positive"),
    ],
)
def test_impossible_links_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        Link(**wrong)  # type: ignore[arg-type]
    assert str(error.value) == message


# The whole network


@contextmanager
def connected(net: BadNetwork) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection: the client's and the server's."""
    with net.server_socket() as listening, net.client_socket() as client:
        listening.bind((net.server_ip, 0))
        listening.listen()
        client.settimeout(PATIENCE)
        client.connect(listening.getsockname())
        server, (address, _) = listening.accept()
        with server:
            assert address == net.client_ip
            server.settimeout(PATIENCE)
            yield client, server


def received(end: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    return b"".join(iter(lambda: end.recv(1 << 16), b""))


def transfer(net: BadNetwork, data: bytes) -> bytes:
    """What arrives at the server when the client sends this."""
    with connected(net) as (client, server), ThreadPoolExecutor() as other:
        arrived: Future[bytes] = other.submit(received, server)
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        return arrived.result()


@contextmanager
def udp(net: BadNetwork) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A UDP socket of the client, connected to one of the server."""
    with net.client_socket(socket.SOCK_DGRAM) as client, net.server_socket(socket.SOCK_DGRAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # room for all packets of a test
        server.bind((net.server_ip, 0))
        server.settimeout(PATIENCE)
        client.connect(server.getsockname())
        yield client, server


def survivors(seed: int) -> list[int]:
    """Which of many UDP packets arrive where one in ten is lost."""

    def take(end: socket.socket) -> list[int]:
        return [int(packet) for packet in iter(lambda: end.recv(100), b"end")]

    with (
        # So slow that the receiver keeps up, and no packet is dropped for want of room.
        bad_network(loss=0.1, rate_mbit=1, queue_ms=60_000, seed=seed) as net,
        udp(net) as (client, server),
        ThreadPoolExecutor() as other,
    ):
        arrived = other.submit(take, server)
        for number in range(NUM_PACKETS):
            client.send(b"%d" % number)
        while not arrived.done():  # any of these may be lost too
            client.send(b"end")
            time.sleep(0.01)
        return arrived.result()


def test_a_delay_holds_packets_back() -> None:
    with bad_network(delay_ms=3_600_000) as slow, bad_network() as fast, udp(slow) as held, udp(fast) as free:
        held[0].send(b"first")
        free[0].send(b"second")
        assert free[1].recv(100) == b"second"
        held[1].setblocking(False)
        with pytest.raises(BlockingIOError):  # sent first, but half an hour away
            held[1].recv(100)


def test_losses_are_as_many_as_chance_allows_and_belong_to_the_seed() -> None:
    first, again, other = survivors(1), survivors(1), survivors(2)
    least, most = binom.interval(1 - 1e-9, NUM_PACKETS, 0.9)
    assert least <= len(first) <= most
    assert first == sorted(first) == again
    assert first != other


@pytest.mark.slow
def test_a_transfer_through_losses_arrives_whole() -> None:
    data = random.Random(0).randbytes(1_000_000)
    with bad_network(loss=0.02, delay_ms=100, rate_mbit=10) as net:
        assert transfer(net, data) == data


def test_a_connection_outlives_a_cut() -> None:
    with bad_network() as net, connected(net) as (client, server):
        client.sendall(b"before")
        assert server.recv(100) == b"before"
        net.set(cut=True)
        client.sendall(b"during")
        server.settimeout(0.4)  # TCP tries again after 0.2 s
        with pytest.raises(TimeoutError):
            server.recv(100)
        net.set(cut=False)
        server.settimeout(PATIENCE)
        assert server.recv(100) == b"during"


def test_two_networks_do_not_meet() -> None:
    with bad_network() as one, bad_network() as other:
        with connected(one), connected(other):
            one.set(cut=True)
            assert transfer(other, b"through") == b"through"
        assert {one.server, one.client}.isdisjoint({other.server, other.client})


# What is left behind: nothing


def is_there(namespace: str) -> bool:
    return Path("/run/netns", namespace).exists()


def has_ended(pid: str) -> bool:
    """Whether a process has ended, or is a zombie."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_failed_test_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), bad_network() as net:
        left_running = subprocess.Popen(net.client_command(["sleep", "600"]))
        assert is_there(net.server) and is_there(net.client)
        wait_until(lambda: Path(f"/proc/{left_running.pid}/comm").read_text() == "sleep\n")
        1 / 0  # noqa: B018
    assert left_running.wait() == -signal.SIGKILL
    assert net.process.returncode == 0
    assert not is_there(net.server) and not is_there(net.client)


HELD = """
import sys
from bad_network import bad_network
with bad_network() as net:
    print(net.process.pid, net.server, net.client, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("blow", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_interpreter_leaves_nothing(blow: signal.Signals) -> None:
    with bad_network():
        pass  # or the test is skipped
    held = subprocess.Popen(
        [sys.executable, "-c", HELD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    with held:
        assert held.stdout
        pid, *names = held.stdout.readline().split()
        assert all(map(is_there, names)) and not has_ended(pid)
        os.kill(held.pid, blow)
    assert held.returncode == -blow
    wait_until(lambda: not any(map(is_there, names)) and has_ended(pid))


def test_a_machine_that_does_not_allow_it_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception) as skipped, bad_network():
        pass
    assert str(skipped.value) == "cannot make a bad network here: [Errno 2] No such file or directory: 'ip'"


# gRPC through it


def serve(ip: str) -> None:
    """Answer each message with itself reversed; say the address on standard output, end with standard input."""
    import grpc  # not at the top: the other tests do without

    def reverse(messages: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        return (message[::-1] for message in messages)

    service = grpc.method_handlers_generic_handler("bad", {"Reverse": grpc.stream_stream_rpc_method_handler(reverse)})
    server = grpc.server(ThreadPoolExecutor(max_workers=1), handlers=[service])
    print(f"{ip}:{server.add_insecure_port(f'{ip}:0')}", flush=True)
    server.start()
    sys.stdin.read()


def ask(address: str) -> None:
    """Send a long message, and say whether the answer is right."""
    import grpc

    message = random.Random(0).randbytes(GRPC_BYTES)
    with grpc.insecure_channel(address) as channel:
        (answer,) = channel.stream_stream("/bad/Reverse")(iter([message]), timeout=PATIENCE, wait_for_ready=True)
    print(answer == message[::-1])


@pytest.mark.slow
def test_a_grpc_stream_passes_both_ways() -> None:
    pytest.importorskip("grpc")
    with bad_network(loss=0.02, delay_ms=100, rate_mbit=10) as net:
        command = net.server_command([sys.executable, __file__, "serve", net.server_ip])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout
            address = server.stdout.readline().strip()
            command = net.client_command([sys.executable, __file__, "ask", address])
            client = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert client.stdout == "True\n", client.stderr


if __name__ == "__main__":
    {"serve": serve, "ask": ask}[sys.argv[1]](sys.argv[2])
