"""Messages as bytes: a prefix, a typed header, and the raw buffers of the tensors, cut into chunks for a gRPC stream.

    prefix    "CUT", the protocol (1 byte), bytes of the header (4) and of the body (8), checksum (4); little endian
    header    the message in MessagePack; its `tensors` are the forms of the buffers
    body      the buffers in order

Header, and every buffer, are filled up to a multiple of 16 bytes. The checksum (CRC-32) is of all before it and of the
header; the values of tensors are left to TLS. A chunk ends where its message ends.
"""

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import PROTOCOL, Message, Packing, TensorForm
from cutlayer.remote.tensors.packing import form_of, num_bytes, pack, unpack

CHUNK = 2**20  # at least, if there is more than one; less than twice as much
MOST_HEADER = 64 * 2**20  # a round of FedAvg is one list, with a few commands for each of its steps
MAGIC = b"CUT"
ALIGN = 16  # what memory of Python is aligned to

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # Nobody sends more than a chunk at once; what is longer is refused before it takes memory.
    ("grpc.max_send_message_length", 2 * CHUNK),
    ("grpc.max_receive_message_length", 2 * CHUNK),
    ("grpc.http2.max_frame_size", 2 * CHUNK),  # a chunk is not cut once more
    # A dead peer is noticed within half a minute, and whoever asks so often whether the other lives is not cut off.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]

_SIZES = Struct("<3sBIQ")
_CHECKSUM = Struct("<I")
PREFIX = _SIZES.size + _CHECKSUM.size

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, tensors: Sequence[Tensor] = (), packing: Sequence[Packing] | None = None) -> list[bytes]:
    """A message and its tensors as chunks; later changes of the tensors do not change them."""
    how: Sequence[Packing] = ["raw"] * len(tensors) if packing is None else packing
    if len(how) != len(tensors):
        raise WireError(f"{len(tensors)} tensors need as many packings, but {len(how)} came")
    forms = tuple(form_of(t, p) for t, p in zip(tensors, how, strict=True))
    header = _encoder.encode(_with_forms(message, forms))
    if len(header) > MOST_HEADER:
        raise WireError(f"a header of {len(header)} bytes is too long; at most {MOST_HEADER} travel")
    buffers = [pack(t, p).numpy().data for t, p in zip(tensors, how, strict=True)]
    sizes = _SIZES.pack(MAGIC, PROTOCOL, len(header), sum(_aligned(len(b)) for b in buffers))
    head = memoryview(sizes + _checksum(sizes, header) + header)
    return _cut([part for buffer in (head, *buffers) for part in (buffer, _padding(len(buffer)))])


def _with_forms(message: Message, forms: tuple[TensorForm, ...]) -> Message:
    if hasattr(message, "tensors"):
        return msgspec.structs.replace(message, tensors=forms)
    if forms:
        raise WireError(f"a {type(message).__name__} carries no tensors, but {len(forms)} came with it")
    return message


def _checksum(sizes: bytes, header: bytes | memoryview) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(header, zlib.crc32(sizes)))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _padding(size: int) -> memoryview:
    return memoryview(bytes(_aligned(size) - size))


def _cut(parts: Sequence[memoryview]) -> list[bytes]:
    """The parts one after another in chunks of the same size, so that none is tiny; every byte is copied once."""
    total = sum(len(part) for part in parts)
    size = -(-total // max(total // CHUNK, 1))
    chunks: list[bytes] = []
    pending: list[memoryview] = []
    room = size
    for part in parts:
        while part:
            pending.append(part[:room])
            part = part[room:]
            room -= len(pending[-1])
            if not room:
                chunks.append(b"".join(pending))
                pending, room = [], size
    return [*chunks, b"".join(pending)] if pending else chunks


class _Prefix(NamedTuple):
    """How long a message is."""

    header: int
    body: int
    checksum: bytes
    sizes: bytes

    @property
    def begin(self) -> int:
        """Where the body begins."""
        return _aligned(PREFIX + self.header)

    @property
    def end(self) -> int:
        return self.begin + self.body


class Decoder:
    """Messages out of chunks. Nothing that comes is trusted, and no memory is taken for what has not come yet.

    `of` is the union of the messages that may come, `most` the limit on the body in bytes; a function is asked anew for
    every message. Tensors that came raw are views of memory which nobody else uses.
    """

    def __init__(self, of: Any, most: int | Callable[[], int], most_header: int = MOST_HEADER) -> None:
        self._header: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(of)
        self._most, self._most_header = most, most_header
        self._refused = ""
        self._restart()

    def _restart(self) -> None:
        self._buffer = bytearray()
        self._prefix: _Prefix | None = None
        self._message: Message | None = None

    def feed(self, chunk: bytes) -> tuple[Message, list[Tensor]] | None:
        """The message that ends with this chunk, with its tensors."""
        if self._refused:
            raise WireError(f"nothing more is read here, because an earlier message was refused: {self._refused}")
        try:
            return self._feed(chunk)
        except WireError as error:
            self._restart()
            self._refused = str(error)
            raise

    def end(self) -> None:
        """The stream is over: is it where a message was, too?"""
        if self._buffer:
            raise WireError(f"the stream ended within a message, after {len(self._buffer)} of its bytes")

    def _feed(self, chunk: bytes) -> tuple[Message, list[Tensor]] | None:
        if not chunk:
            raise WireError("an empty chunk came")
        come = len(self._buffer) + len(chunk)
        if self._prefix is None and come >= PREFIX:
            self._prefix = self._read_prefix(bytes(self._buffer) + chunk[: PREFIX - len(self._buffer)])
        prefix = self._prefix
        if prefix and come > prefix.end:
            raise WireError(f"{come} bytes came of a message of {prefix.end}")
        self._buffer += chunk
        if prefix is None or come < prefix.begin:
            return None
        if self._message is None:
            self._message = self._read_header(prefix)
        if come < prefix.end:
            return None
        message, buffer = self._message, self._buffer
        self._restart()
        return message, _tensors(message, buffer, prefix)

    def _read_prefix(self, prefix: bytes) -> _Prefix:
        sizes = prefix[: _SIZES.size]
        magic, protocol, header, body = _SIZES.unpack(sizes)
        if magic != MAGIC:
            raise WireError("what came is no message of cutlayer")
        if protocol != PROTOCOL:
            raise WireError(
                f"the other side speaks protocol {protocol} and this one {PROTOCOL}; install the same version of "
                "cutlayer on both"
            )
        if header > self._most_header:
            raise WireError(f"a header of {header} bytes is too long; at most {self._most_header} are read")
        most = self._most() if callable(self._most) else self._most
        if body > most:
            raise WireError(f"a body of {body} bytes is too long; at most {most} are expected now")
        return _Prefix(header, body, prefix[_SIZES.size :], sizes)

    def _read_header(self, prefix: _Prefix) -> Message:
        header = bytes(self._buffer[PREFIX : PREFIX + prefix.header])
        if _checksum(prefix.sizes, header) != prefix.checksum:
            raise WireError("a header was damaged on its way: its checksum is wrong")
        try:
            message = self._header.decode(header)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"a header is not what it should be: {error}") from None
        expected = sum(_aligned(num_bytes(form)) for form in _forms(message))
        if expected != prefix.body:
            raise WireError(f"the tensors of a message have {expected} bytes, but its body has {prefix.body}")
        return message


def _forms(message: Message) -> tuple[TensorForm, ...]:
    forms: tuple[TensorForm, ...] = getattr(message, "tensors", ())
    return forms


def _tensors(message: Message, buffer: bytearray, prefix: _Prefix) -> list[Tensor]:
    forms = _forms(message)
    offsets = accumulate((_aligned(num_bytes(form)) for form in forms), initial=prefix.begin)
    return [unpack(buffer, offset, form) for form, offset in zip(forms, offsets, strict=False)]
