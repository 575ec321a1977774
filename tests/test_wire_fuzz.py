"""Specifies that a decoder refuses malformed bytes with a reason, and that its memory does not grow."""

import random
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect as info
from torch import Tensor

from cutlayer.errors import WireError
from cutlayer.remote.protocol.commands import AnyCommand
from cutlayer.remote.protocol.messages import PROTOCOL, FromClient, FromPeer, FromServer, Message, Work
from cutlayer.remote.tensors.forms import DTYPES
from cutlayer.remote.tensors.wire import PREFIX, Decoder, encode

Random = random.Random
Mutation = Callable[[Random, bytes, bytes], bytes]
MOST = 2**20  # the limit on a body
MOST_GROWTH = 50 * 2**20

SKELETON = ["dict", ["w", "b"], ["tensor", ["tuple", ["number", None]]]]
TENSORS = [torch.ones(3, 5).to(dtype) for dtype in DTYPES.values()]


def examples(kind: info.Type) -> list[Any]:
    """Values of a type of a field, one of each of its alternatives."""
    match kind:
        case info.UnionType():
            return [value for one in kind.types for value in examples(one)]
        case info.StructType():
            columns = [examples(field.type) for field in kind.fields if field.name != "tensors"]
            number = max((len(c) for c in columns), default=1)
            return [kind.cls(*(c[i % len(c)] for c in columns)) for i in range(number)]
        case info.VarTupleType():
            return [tuple(examples(kind.item_type))]
        case info.TupleType():
            return [tuple(examples(item)[0] for item in kind.item_types)]
        case info.DictType():
            return [dict(zip(examples(kind.key_type), examples(kind.value_type), strict=True))]
        case info.LiteralType():
            return list(kind.values)
    plain = {info.IntType: 1, info.FloatType: 0.5, info.StrType: "int8", info.BoolType: True, info.AnyType: SKELETON}
    return [plain.get(type(kind))]


def with_tensors(message: Message) -> list[Tensor]:
    return TENSORS if hasattr(message, "tensors") else []


COMING: dict[Any, list[Message]] = {of: examples(info.type_info(of)) for of in (FromClient, FromServer, FromPeer)}
SENT = {of: [b"".join(encode(m, with_tensors(m))) for m in sent] for of, sent in COMING.items()}


def flip(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Flip some bits, most often in the prefix and the header."""
    out, end = bytearray(raw), len(raw) if rng.random() < 0.3 else min(len(raw), 200)
    for _i in range(rng.choice([1, 1, 2, 8])):
        out[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(out)


def truncate(rng: Random, raw: bytes, _: bytes) -> bytes:
    return raw[: rng.randrange(1, len(raw))]


def duplicate(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Repeat a piece of the message."""
    start, end = sorted(rng.randrange(len(raw) + 1) for _i in range(2))
    return raw[:end] + raw[start:]


def splice(rng: Random, raw: bytes, other: bytes) -> bytes:
    """Join the beginning of one message and the end of another."""
    return raw[: rng.randrange(len(raw))] + other[rng.randrange(len(other)) :]


def lengthen(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Change the lengths in the prefix."""
    lengths = [0, 1, 255, 2**16, 2**20, 2**24, 2**31, 2**32 - 1]
    header, body = rng.choice(lengths), rng.choice([*lengths, 2**48, 2**63, 2**64 - 1])
    if rng.random() < 0.5:
        header = struct.unpack_from("<I", raw, 4)[0]
    return with_header(raw, raw[PREFIX:], header, body)


def anything(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Replace the header by any MessagePack value."""
    return with_header(raw, msgspec.msgpack.encode(value(rng)))


def other_field(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Change, remove or add one field at any depth."""
    header = header_of(raw)
    place = header
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            place = inner
            continue
        break
    match rng.randrange(4):
        case 0:
            del place[key]
        case 1 if isinstance(place, dict):
            place[rng.choice(["extra", "type", "tensors"])] = value(rng)
        case _:
            place[key] = value(rng)
    return with_header(raw, msgspec.msgpack.encode(header)) + body_of(raw)


def nest(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Nest lists or dicts, as the whole header or in place of a skeleton."""
    depth = rng.choice([20, 500, 5000, 100_000])
    deep = rng.choice([b"\x91", b"\x81\xa1a"]) * depth + b"\xc0"
    header = header_bytes(raw)
    skeleton = msgspec.msgpack.encode(SKELETON)
    return with_header(raw, header.replace(skeleton, deep) if skeleton in header else deep) + body_of(raw)


def promise(rng: Random, raw: bytes, _: bytes) -> bytes:
    """Insert a list, dict, text or extension that claims to be longer than the rest of the message."""
    header = header_bytes(raw)
    at = rng.randrange(len(header))
    claim = rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + rng.choice([2**20, 2**31, 2**32 - 1]).to_bytes(
        4
    )
    return with_header(raw, header[:at] + claim + header[at + 1 :]) + body_of(raw)


def forge(rng: Random, raw: bytes, other: bytes) -> bytes:
    """Change bits or pieces of the header, with a correct checksum."""
    mutated = rng.choice([flip, duplicate, splice])(rng, header_bytes(raw), header_bytes(other))
    return with_header(raw, mutated) + body_of(raw)


# What the line does to a message, and what somebody who means harm may do: there the checksum is right.
NOISE: list[Mutation] = [flip, truncate, duplicate, splice]
HARM: list[Mutation] = [lengthen, anything, other_field, nest, promise, forge]


def header_bytes(raw: bytes) -> bytes:
    return raw[PREFIX : PREFIX + struct.unpack_from("<I", raw, 4)[0]]


def header_of(raw: bytes) -> Any:
    return msgspec.msgpack.decode(header_bytes(raw))


def body_of(raw: bytes) -> bytes:
    return raw[len(raw) - struct.unpack_from("<Q", raw, 8)[0] :]


def with_header(raw: bytes, header: bytes, length: int | None = None, body: int | None = None) -> bytes:
    """Replace the header; the checksum is correct, and the lengths too unless they are given."""
    length = len(header) if length is None else length
    body = struct.unpack_from("<Q", raw, 8)[0] if body is None else body
    sizes = struct.pack("<3sBIQ", b"CUT", PROTOCOL, length, body)
    head = sizes + struct.pack("<I", zlib.crc32(sizes + header[:length])) + header
    return head + bytes(-len(head) % 16)


def value(rng: Random, depth: int = 0) -> Any:
    """Any value that MessagePack knows."""
    plain: list[Callable[[], Any]] = [
        lambda: rng.choice([None, True, False, float("nan"), float("inf"), -0.0, 1.5]),
        lambda: rng.choice([0, -1, 2**31, 2**62, 2**63, 2**64 - 1, -(2**63), rng.randrange(1000)]),
        lambda: rng.choice(["", "hello", "raw", "float32", "dict", "x" * rng.randrange(200), "\0", "é" * 70]),
        lambda: rng.randbytes(rng.randrange(40)),
    ]
    if depth < 4 and rng.random() < 0.5:
        items = [value(rng, depth + 1) for _ in range(rng.randrange(5))]
        return items if rng.random() < 0.5 else {str(i): item for i, item in enumerate(items)}
    return rng.choice(plain)()


def fed(rng: Random, of: Any, raw: bytes) -> list[tuple[Message, list[Tensor]]] | str:
    """Feed a decoder the bytes in random chunks; return the messages, or the reason of the refusal."""
    decoder, got = Decoder(of, MOST), []
    most = rng.choice([7, 100, 1000, 10**6]) if len(raw) < 5000 else 10**5
    start = 0
    try:
        while start < len(raw):
            size = rng.randint(1, most)
            got.append(decoder.feed(raw[start : start + size]))
            start += size
        decoder.end()
    except WireError as error:
        assert str(error)
        return str(error)
    return [one for one in got if one]


def outcome(rng: Random, of: Any, mutation: Mutation) -> str:
    """Mutate a message, decode it, and check the result."""
    raw = rng.choice(SENT[of])
    other = rng.choice(SENT[of])
    mutated = mutation(rng, raw, other)
    got = fed(rng, of, mutated)
    if isinstance(got, str):
        return "refused"
    message, tensors = got[-1]  # a whole message may have come twice
    if mutation in HARM:  # it may be another message, but then it is a message in every respect
        check_whole(of, message, tensors)
        return "a message"
    assert msgspec.msgpack.encode(message) in (header_bytes(raw), header_bytes(other))
    check_bytes(mutated, tensors)
    return "the same"


def check_bytes(raw: bytes, tensors: list[Tensor]) -> None:
    """Check that the tensors are what the body says: their values have no checksum."""
    body = body_of(raw)
    for tensor in tensors:
        expected = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        assert body.startswith(expected)
        body = body[len(expected) + -len(expected) % 16 :]
    assert not body


def check_whole(of: Any, message: Message, tensors: list[Tensor]) -> None:
    """Check that the message can be encoded again, and decodes to itself."""
    raw = b"".join(encode(message, tensors))
    again = Decoder(of, 2 * MOST).feed(raw)
    assert again is not None
    assert msgspec.msgpack.encode(again[0]) == msgspec.msgpack.encode(message)


def run(number: int, seed: int) -> Counter[tuple[str, str]]:
    """Decode mutated messages, and check that the memory of the process does not grow."""
    rng, seen = Random(seed), Counter[tuple[str, str]]()
    mutations = NOISE + HARM
    resident = []
    for i in range(number):
        mutation = mutations[i % len(mutations)]
        seen[mutation.__name__, outcome(rng, rng.choice(list(COMING)), mutation)] += 1
        resident.append(psutil.Process().memory_info().rss)
    warm = number // 10
    assert max(resident[warm:]) - resident[warm] < MOST_GROWTH
    return seen


def check(seen: Counter[tuple[str, str]]) -> None:
    """Check that all were refused, except unchanged messages and a few mutations that are valid messages."""
    assert {what for name, what in seen if name in {m.__name__ for m in NOISE}} == {"refused", "the same"}
    assert {name for name, what in seen if what == "a message"} == {"lengthen", "other_field", "nest", "forge"}
    for mutation in NOISE + HARM:
        counts = {what: count for (name, what), count in seen.items() if name == mutation.__name__}
        assert counts["refused"] > 0.8 * sum(counts.values())


def test_mutated_messages_are_refused() -> None:
    check(run(3000, seed=0))


@pytest.mark.slow
def test_a_hundred_thousand_mutated_messages_are_refused() -> None:
    check(run(100_000, seed=1))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.booleans())
def test_any_header_is_refused_or_a_message(header: bytes, honest: bool) -> None:
    raw = with_header(SENT[FromClient][-1], header) if honest else header
    got = fed(Random(0), FromClient, raw)
    assert isinstance(got, str) or not raw


def test_every_message_and_every_command_is_among_those_mutated() -> None:
    for of, sent in COMING.items():
        assert {type(message) for message in sent} == set(get_args(of))
    lists = [message.commands for message in COMING[FromServer] if isinstance(message, Work)]
    assert None in lists
    assert {type(command) for command in lists[0] or ()} == set(get_args(AnyCommand))


def test_unmutated_messages_are_not_refused() -> None:
    rng = Random(0)
    for of, sent in COMING.items():
        for original, raw in zip(sent, SENT[of], strict=True):
            ((message, got),) = fed(rng, of, raw)
            assert msgspec.msgpack.encode(message) == header_bytes(raw)
            torch.testing.assert_close(got, with_tensors(original), rtol=0, atol=0)
