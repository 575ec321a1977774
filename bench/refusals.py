"""How long a decoder takes to refuse a message whose header is nested deep, as an attacker may send it.

The processor's time of one message, from its first byte to the refusal, beside that of reading the same number of
bytes as one flat text. Python's recursion limit ends the decoding, so the time must not grow faster than the bytes.
"""

import struct
import zlib
from statistics import median
from time import process_time

import msgspec
from tables import Row, options, show

from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import PROTOCOL, FromPeer, Sent
from cutlayer.remote.tensors.wire import CHUNK, MAGIC, Decoder

TURNS = 200
DEPTHS = (100, 10_000, 100_000, 1_000_000)
NESTED = {"lists": b"\x91", "dicts": b"\x81\xa1a"}  # MessagePack of one level: a list of one, a dict of one key
BAR = 1000.0  # ms, also for the slowest


def main() -> None:
    args = options(__doc__.splitlines()[0])
    turns, depths = (3, DEPTHS[:2]) if args.quick else (TURNS, DEPTHS)
    show([row(kind, depth, turns) for kind in NESTED for depth in depths], args.json)


def row(kind: str, depth: int, turns: int) -> Row:
    deep = NESTED[kind] * depth + b"\xc0"
    nested, flat = message(deep), message(msgspec.msgpack.encode("x" * len(deep)))
    times = [(spent(nested), spent(flat)) for _ in range(1 + turns)][1:]
    taken, read = (median(side) for side in zip(*times, strict=True))
    slowest = max(taken for taken, _ in times)
    return {
        "nested": kind,
        "depth": depth,
        "KiB": len(nested) / 2**10,
        "flat, ms": 1e3 * read,
        "ms": 1e3 * taken,
        "slowest, ms": 1e3 * slowest,
        "bar": BAR,
        "met": 1e3 * slowest <= BAR,
    }


def message(tree: bytes) -> bytes:
    """A message with this MessagePack as its tree; the checksum is right."""
    marker = "the tree"
    header = msgspec.msgpack.encode(Sent(token=1, number=1, tree=marker, numbers=()))
    header = header.replace(msgspec.msgpack.encode(marker), tree)
    sizes = struct.pack("<3sBIQ", MAGIC, PROTOCOL, len(header), 0)
    head = sizes + struct.pack("<I", zlib.crc32(sizes + header)) + header
    return head + bytes(-len(head) % 16)


def spent(raw: bytes) -> float:
    """The seconds of the processor until the message is refused, or read."""
    decoder = Decoder(FromPeer, 0)
    began = process_time()
    try:
        for start in range(0, len(raw), CHUNK):
            decoder.feed(raw[start : start + CHUNK])
    except WireError:
        pass
    return process_time() - began


if __name__ == "__main__":
    main()
