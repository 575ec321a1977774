"""Messages as bytes: a prefix, a typed header, and the raw buffers of the tensors, cut into chunks for a gRPC stream.

    prefix    "CUT", the protocol (1 byte), bytes of the header (4) and of the body (8), checksum (4); little endian
    header    the message in MessagePack; its `tensors` are the forms of the buffers
    body      the buffers in order

The header and each buffer are padded to a multiple of 16 bytes. The checksum (CRC-32) covers the prefix before it and
the header; TLS protects the tensors. A chunk ends where its message ends.
"""

import zlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import PROTOCOL, Message, TensorForm
from cutlayer.remote.tensors.forms import content, form_of, num_bytes, view

CHUNK = 2**20  # bytes; if a message has several chunks, each has from one to two times as many
MOST_HEADER = 64 * 2**20  # bytes: a round of FedAvg is one list, with a few commands for each step
MAGIC = b"CUT"
ALIGN = 16  # bytes, as Python's memory is aligned

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    # Nobody sends more than a chunk at once; longer messages are refused before memory is allocated.
    ("grpc.max_send_message_length", 2 * CHUNK),
    ("grpc.max_receive_message_length", 2 * CHUNK),
    ("grpc.http2.max_frame_size", 2 * CHUNK),  # a chunk is one frame
    # Detect a dead peer within half a minute, and allow peers to ping that often.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]

_SIZES = Struct("<3sBIQ")
PREFIX = _SIZES.size + 4

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message, tensors: Sequence[Tensor] = ()) -> list[bytes]:
    """Encode a message and its tensors as chunks; later changes of the tensors do not change them."""
    forms = tuple(map(form_of, tensors))
    if hasattr(message, "tensors"):
        message = msgspec.structs.replace(message, tensors=forms)
    elif forms:
        raise WireError(f"a {type(message).__name__} carries no tensors, but {len(forms)} came with it")
    header = _encoder.encode(message)
    if len(header) > MOST_HEADER:
        raise WireError(f"a header of {len(header)} bytes is too long; at most {MOST_HEADER} travel")
    buffers = [content(t).numpy().data for t in tensors]
    sizes = _SIZES.pack(MAGIC, PROTOCOL, len(header), sum(_aligned(len(b)) for b in buffers))
    head = memoryview(sizes + _checksum(sizes, header) + header)
    return _cut([part for buffer in (head, *buffers) for part in (buffer, memoryview(bytes(-len(buffer) % ALIGN)))])


def _checksum(sizes: bytes, header: bytes) -> bytes:
    return zlib.crc32(header, zlib.crc32(sizes)).to_bytes(4, "little")


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _cut(parts: Sequence[memoryview]) -> list[bytes]:
    """Join the parts and cut them into chunks of equal size, so that none is tiny; each byte is copied once."""
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
    """Where the parts of a message end."""

    header_end: int
    body_begin: int
    end: int


class Decoder:
    """Reads messages from chunks. It trusts nothing, and allocates memory only for what has arrived.

    `of` is the union of the messages that may come, `most` the limit on the body in bytes; a function is called for
    each message. Tensors are views of memory that nobody else uses. `size` is the length of the last message.
    """

    def __init__(
        self, of: Any, most: int | Callable[[], int], most_header: int | Callable[[], int] = MOST_HEADER
    ) -> None:
        self._header: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(of)
        self._most, self._most_header = most, most_header
        self.size = 0
        self._refused = ""
        self._restart()

    def _restart(self) -> None:
        self._buffer = bytearray()
        self._prefix: _Prefix | None = None
        self._message: Message | None = None

    def feed(self, chunk: bytes) -> tuple[Message, list[Tensor]] | None:
        """Return the message that ends with this chunk, with its tensors; None if none ends here."""
        if self._refused:
            raise WireError(f"nothing more is read here, because an earlier message was refused: {self._refused}")
        try:
            return self._feed(chunk)
        except WireError as error:
            self._restart()
            self._refused = str(error)
            raise

    def end(self) -> None:
        """Refuse a stream that ends in the middle of a message."""
        if self._buffer:
            raise WireError(f"the stream ended within a message, after {len(self._buffer)} of its bytes")

    def _feed(self, chunk: bytes) -> tuple[Message, list[Tensor]] | None:
        if not chunk:
            raise WireError("an empty chunk came")
        self._buffer += chunk
        come = len(self._buffer)
        if self._prefix is None and come >= PREFIX:
            self._prefix = self._read_prefix()
        prefix = self._prefix
        if prefix is None:
            return None
        if come > prefix.end:
            raise WireError(f"{come} bytes came of a message of {prefix.end}")
        if self._message is None and come >= prefix.body_begin:
            self._message = self._read_header(prefix)
        if self._message is None or come < prefix.end:
            return None
        message, buffer, forms = self._message, self._buffer, _forms(self._message)
        self._restart()
        self.size = prefix.end
        offsets = accumulate((_aligned(num_bytes(form)) for form in forms), initial=prefix.body_begin)
        return message, [view(buffer, offset, form) for form, offset in zip(forms, offsets, strict=False)]

    def _read_prefix(self) -> _Prefix:
        magic, protocol, header, body = _SIZES.unpack_from(self._buffer)
        if magic != MAGIC:
            raise WireError("what came is no message of cutlayer")
        if protocol != PROTOCOL:
            raise WireError(
                f"the other side speaks protocol {protocol} and this one {PROTOCOL}; install the same version of "
                "cutlayer on both"
            )
        most_header = self._most_header() if callable(self._most_header) else self._most_header
        if header > most_header:
            raise WireError(f"a header of {header} bytes is too long; at most {most_header} are read")
        most = self._most() if callable(self._most) else self._most
        if body > most:
            raise WireError(f"a body of {body} bytes is too long; at most {most} are expected now")
        body_begin = _aligned(PREFIX + header)
        return _Prefix(PREFIX + header, body_begin, body_begin + body)

    def _read_header(self, prefix: _Prefix) -> Message:
        head = bytes(self._buffer[: prefix.header_end])
        if _checksum(head[: _SIZES.size], head[PREFIX:]) != head[_SIZES.size : PREFIX]:
            raise WireError("a header was damaged on its way: its checksum is wrong")
        try:
            message = self._header.decode(head[PREFIX:])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise WireError(f"a header is not what it should be: {error}") from None
        expected, body = sum(_aligned(num_bytes(form)) for form in _forms(message)), prefix.end - prefix.body_begin
        if expected != body:
            raise WireError(f"the tensors of a message have {expected} bytes, but its body has {body}")
        return message


def _forms(message: Message) -> tuple[TensorForm, ...]:
    forms: tuple[TensorForm, ...] = getattr(message, "tensors", ())
    return forms
