"""A tensor there and back over gRPC, in plain text and with mutual TLS, against a plain TCP echo of the same bytes.

Both ends are processes of this machine. gRPC is used as a deployment uses it: a stream in both directions, messages
encoded and decoded, so that each end has a tensor in memory of its own; the echo too receives into fresh memory.
"""

import multiprocessing
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import grpc
import torch
from tables import Row, options, show
from torch import Tensor

from cutlayer.remote.identity.certificates import Credentials, grpc_server_credentials, secure_channel
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.protocol.messages import Answer, FromClient, FromServer, Work
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, Decoder, encode

HOST = "127.0.0.1"
KB, MB = 2**10, 2**20
BARS = {("plain text", 8 * MB): 3.0, ("mutual TLS", MB): 6.0, ("mutual TLS", 8 * MB): 4.0}
TURNS = {64 * KB: 200, MB: 100, 8 * MB: 40, 64 * MB: 5}  # of each size, after a tenth of them to warm up
MOST = 2**30

Exchange = Callable[[Tensor], Tensor]


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        keys = Path(name)
        trial(keys, clients="ann")
        here, there = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(target=serve, args=(there, keys), daemon=True)
        other.start()
        exchanges = connect(here.recv(), keys)
        turns = {64 * KB: 3, MB: 3} if args.quick else TURNS
        seconds = {size: measure(exchanges, size, number) for size, number in turns.items()}
        other.kill()
        other.join()
    show([row(size, way, taken) for size, taken in seconds.items() for way in taken if way != "TCP"], args.json)


def measure(exchanges: dict[str, Exchange], size: int, turns: int) -> dict[str, float]:
    """The medians of all ways, which take turns; what comes back is what was sent."""
    sent = torch.arange(size // 4, dtype=torch.int32)
    seconds: dict[str, list[float]] = {way: [] for way in exchanges}
    warm_up = -(-turns // 10)
    for turn in range(warm_up + turns):
        for way, exchange in exchanges.items():
            began = perf_counter()
            got = exchange(sent)
            taken = perf_counter() - began
            assert torch.equal(got, sent)
            if turn >= warm_up:
                seconds[way].append(taken)
    return {way: median(taken) for way, taken in seconds.items()}


def row(size: int, way: str, seconds: dict[str, float]) -> Row:
    ratio, bar = seconds[way] / seconds["TCP"], BARS.get((way, size))
    return {
        "there and back": f"{size // MB} MB" if size >= MB else f"{size // KB} KB",
        "way": way,
        "TCP, ms": seconds["TCP"] * 1e3,
        "ms": seconds[way] * 1e3,
        "ratio": ratio,
        "bar": bar,
        "met": bar if bar is None else ratio <= bar,
    }


def connect(ports: dict[str, int], keys: Path) -> dict[str, Exchange]:
    mine = Credentials.load(keys / "clients" / "ann")
    plain = grpc.insecure_channel(f"{HOST}:{ports['plain text']}", options=CHANNEL_OPTIONS)
    secure = secure_channel(f"{HOST}:{ports['mutual TLS']}", mine, "train", CHANNEL_OPTIONS)
    return {
        "TCP": over_tcp(at_once(socket.create_connection((HOST, ports["TCP"])))),
        "plain text": over_grpc(plain),
        "mutual TLS": over_grpc(secure),
    }


def over_tcp(link: socket.socket) -> Exchange:
    def exchange(sent: Tensor) -> Tensor:
        size = sent.nbytes
        link.sendall(size.to_bytes(8))
        link.sendall(sent.numpy())
        return torch.frombuffer(received(link, size), dtype=sent.dtype)

    return exchange


def over_grpc(channel: grpc.Channel) -> Exchange:
    chunks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    answers = channel.stream_stream("/bench/exchange")(iter(chunks.get, None))
    decoder = Decoder(FromClient, MOST)
    work = Work(session=1, number=1, round=1, key=1, token=1, begins=False, list=1, commands=None, numbers=())

    def exchange(sent: Tensor) -> Tensor:
        for chunk in encode(work, [sent]):
            chunks.put(chunk)
        while (got := decoder.feed(next(answers))) is None:
            pass
        return got[1][0]

    return exchange


def serve(link: Connection, keys: Path) -> None:
    """The other process: it sends back whatever comes, in three ways."""
    torch.set_num_threads(1)
    listener = socket.create_server((HOST, 0))
    threading.Thread(target=echo, args=(listener,), daemon=True).start()
    server = grpc.server(ThreadPoolExecutor(2), options=CHANNEL_OPTIONS)
    exchange = grpc.stream_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"exchange": exchange}),))
    secret = grpc_server_credentials(Credentials.load(keys / "train"))
    ports = {
        "TCP": listener.getsockname()[1],
        "plain text": server.add_insecure_port(f"{HOST}:0"),
        "mutual TLS": server.add_secure_port(f"{HOST}:0", secret),
    }
    server.start()
    link.send(ports)
    server.wait_for_termination()


def echo(listener: socket.socket) -> None:
    link = at_once(listener.accept()[0])
    while size := link.recv(8, socket.MSG_WAITALL):
        link.sendall(received(link, int.from_bytes(size)))


def at_once(link: socket.socket) -> socket.socket:
    """A link that does not wait for more to send, as those of gRPC do not."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def received(link: socket.socket, size: int) -> bytearray:
    """So many bytes, in memory of their own."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        view = view[link.recv_into(view) :]
    return buffer


def answer(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
    decoder = Decoder(FromServer, MOST)
    for chunk in chunks:
        if got := decoder.feed(chunk):
            yield from encode(Answer(session=1, number=1, token=1, seconds=0.0, numbers=()), got[1])


if __name__ == "__main__":
    main()
