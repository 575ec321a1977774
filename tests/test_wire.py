"""Specifies messages as bytes: what is sent comes out again, in any cutting, and nothing else gets through."""

import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from cutlayer.errors import WireError
from cutlayer.remote.protocol.commands import Do, Put, Up
from cutlayer.remote.protocol.messages import (
    PROTOCOL,
    Answer,
    Bye,
    FromClient,
    FromServer,
    Message,
    TensorForm,
    Work,
)
from cutlayer.remote.tensors import wire
from cutlayer.remote.tensors.forms import DTYPES
from cutlayer.remote.tensors.trees import build, sendable
from cutlayer.remote.tensors.wire import CHUNK, PREFIX, Decoder, encode

grpc = pytest.importorskip("grpc")

ANSWER = Answer(session=3, number=7, token=4, seconds=0.25, numbers=(1, 2.5))
COMMANDS = (Put(0, ["dict", ["w"], ["tensor"]]), Do(1, "client.forward", (0,)), Up(("activations",), (1,)))
WORK = Work(session=1, number=2, round=3, key=4, token=5, begins=True, list=6, commands=COMMANDS, numbers=(7, 0.5))
ALL = [torch.ones(2, 3).to(dtype) for dtype in DTYPES.values()]


def decoded(chunks: list[bytes], of: Any = FromClient, most: Any = 2**30) -> tuple[Message, list[Tensor]]:
    """The one message that ends with the last chunk."""
    decoder = Decoder(of, most)
    *early, last = [decoder.feed(chunk) for chunk in chunks]
    assert early == [None] * len(early)
    assert last is not None
    return last


def travelled(tensor: Tensor) -> Tensor:
    return decoded(encode(ANSWER, [tensor]))[1][0]


def forged(header: bytes, body: int = 0, protocol: int = PROTOCOL, magic: bytes = b"CUT") -> bytes:
    """A message with this header, whose checksum is right, and zeros for a body."""
    sizes = struct.pack("<3sBIQ", magic, protocol, len(header), body)
    head = sizes + struct.pack("<I", zlib.crc32(sizes + header)) + header
    return head + bytes(-len(head) % 16)


def test_a_message_comes_out_as_it_went_in() -> None:
    message, tensors = decoded(encode(WORK, ALL), FromServer)
    assert message == Work(
        **{name: getattr(WORK, name) for name in WORK.__struct_fields__ if name != "tensors"},
        tensors=tuple(TensorForm(name, (2, 3)) for name in DTYPES),
    )
    torch.testing.assert_close(tensors, ALL, rtol=0, atol=0)


def test_the_bytes_are_those_of_the_format() -> None:
    (chunk,) = encode(Bye(reason="x"))
    header = b"\x82\xa4type\xa3bye\xa6reason\xa1x"
    assert chunk == forged(header)
    assert chunk[:16] == b"CUT\x04" + len(header).to_bytes(4, "little") + bytes(8)
    assert (PREFIX, len(chunk)) == (20, 48)


@pytest.mark.parametrize("length", [0, 1, CHUNK, 2 * CHUNK - 200])
def test_a_message_is_one_chunk_until_there_is_enough_for_two(length: int) -> None:
    assert len(encode(ANSWER, [torch.zeros(length, dtype=torch.int8)])) == 1


@pytest.mark.parametrize(("length", "number"), [(2 * CHUNK, 2), (3 * CHUNK - 200, 2), (8 * CHUNK, 8)])
def test_chunks_have_one_size(length: int, number: int) -> None:
    *most, last = (len(chunk) for chunk in encode(ANSWER, [torch.zeros(length, dtype=torch.int8)]))
    assert len(most) + 1 == number
    assert CHUNK <= most[0] < 2 * CHUNK
    assert set(most) == {most[0]}
    assert most[0] - number < last <= most[0]


def test_a_message_may_be_cut_anywhere() -> None:
    x = torch.arange(CHUNK // 2, dtype=torch.int32)
    raw = b"".join(encode(ANSWER, [x]))
    for step in (1000, 65_537, len(raw)):
        assert torch.equal(decoded([raw[i : i + step] for i in range(0, len(raw), step)])[1][0], x)
    small = b"".join(encode(ANSWER, ALL))
    assert decoded([bytes([byte]) for byte in small])[0] == decoded([small])[0]


def test_a_decoder_reads_one_message_after_another() -> None:
    decoder = Decoder(FromClient, 2**20)
    read = [decoder.feed(chunk) for n in range(3) for chunk in encode(ANSWER, [torch.full((2,), n)])]
    assert [got[1][0].tolist() for got in read if got] == [[0, 0], [1, 1], [2, 2]]


def test_a_stream_may_end_only_between_messages() -> None:
    decoder = Decoder(FromClient, 2**20)
    decoder.end()
    (chunk,) = encode(ANSWER)
    decoder.feed(chunk)
    decoder.end()
    decoder.feed(chunk[:50])
    with pytest.raises(WireError, match=r"^the stream ended within a message, after 50 of its bytes$"):
        decoder.end()


def test_tensors_are_writable_aligned_and_each_other_s_neighbours_only() -> None:
    first, second = decoded(encode(ANSWER, [torch.ones(3, dtype=torch.int8), torch.ones(2)]))[1]
    first += 1
    assert (first.tolist(), second.tolist()) == ([2, 2, 2], [1.0, 1.0])
    assert second.data_ptr() % 16 == first.data_ptr() % 16 == 0


def test_a_message_can_be_sent_on_with_other_tensors_or_none() -> None:
    message, tensors = decoded(encode(ANSWER, [torch.ones(2)]))
    assert decoded(encode(message))[0] == ANSWER
    assert decoded(encode(message, tensors))[0] == message


def test_encoding_copies_the_tensors() -> None:
    x = torch.zeros(4, requires_grad=True)
    chunks = encode(ANSWER, [x])
    with torch.no_grad():
        x += 1
    assert decoded(chunks)[1][0].tolist() == [0.0] * 4


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (2, 3, 4)])
def test_shapes_of_all_kinds_travel(shape: tuple[int, ...]) -> None:
    got = travelled(torch.ones(shape, dtype=torch.float64))
    assert (got.shape, got.dtype) == (shape, torch.float64)
    assert torch.equal(got, torch.ones(shape, dtype=torch.float64))


def test_tensors_need_not_be_contiguous() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    for view in (x.T, x[:, ::2], x[1:], x[0].expand(2, 4)):
        assert torch.equal(travelled(view), view)


@pytest.mark.gpu
def test_tensors_on_a_gpu_travel() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x = torch.randn(5, 3, device="cuda")
    assert torch.equal(travelled(x), x.cpu())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_travel(bad: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    torch.testing.assert_close(travelled(x), x, equal_nan=True, rtol=0, atol=0)


KNOWN = "float64, float32, bfloat16, int64, int32, int16, int8, uint8, bool"


@pytest.mark.parametrize(
    ("message", "tensors", "reason"),
    [
        (ANSWER, [torch.ones(2).half()], f"a tensor of 'float16' does not travel; those that do: {KNOWN}"),
        (Bye(reason=""), [torch.ones(2)], "a Bye carries no tensors, but 1 came with it"),
    ],
)  # fmt: skip
def test_values_without_a_wire_format_are_not_sent(message: Message, tensors: list[Tensor], reason: str) -> None:
    with pytest.raises(WireError) as error:
        encode(message, tensors)
    assert str(error.value) == reason


def test_a_header_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_HEADER", 100)
    with pytest.raises(WireError, match=r"^a header of 112 bytes is too long; at most 100 travel$"):
        encode(Bye(reason="x" * 93))


def answer(*tensors: Any, **other: Any) -> bytes:
    """The header of an answer with these forms."""
    fields = {
        "type": "answer",
        "session": 1,
        "number": 1,
        "token": 1,
        "seconds": 0.0,
        "numbers": [],
        "tensors": tensors,
    }
    return wire._encoder.encode({**fields, **other})


WRONG = "a header is not what it should be: "


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: a", "what came is no message of cutlayer"),
        (
            forged(b"", protocol=9),
            "the other side speaks protocol 9 and this one 4; install the same version of cutlayer on both",
        ),
        (
            struct.pack("<3sBIQI", b"CUT", PROTOCOL, 2**32 - 1, 0, 0),
            "a header of 4294967295 bytes is too long; at most 67108864 are read",
        ),
        (forged(answer(), body=4096), "a body of 4096 bytes is too long; at most 1000 are expected now"),
        (forged(answer()) + b"x", "97 bytes came of a message of 96"),
        (forged(answer())[:-20] + bytes(20), "a header was damaged on its way: its checksum is wrong"),
        (forged(answer(["float16", [2]])), f"a tensor of 'float16' does not travel; those that do: {KNOWN}"),
        (forged(answer(["int8", [0, 2**62, 9]])), f"a tensor of shape (0, {2**62}, 9) is larger than any memory"),
        (forged(answer(["int8", [17]]), 16), "the tensors of a message have 32 bytes, but its body has 16"),
        (forged(answer(["bool", [2]]), 16) + b"\x02" * 16, "a tensor of bool has bytes other than 0 and 1"),
        (forged(answer(["int8", [-1]])), WRONG + "Expected `int` >= 0 - at `$.tensors[0][1][0]`"),
        (forged(answer(["int8", [1], 1])), WRONG + "Expected `array` of at most length 2, got 3 - at `$.tensors[0]`"),
        (forged(answer(extra=1)), WRONG + "Object contains unknown field `extra`"),
        (forged(answer(type="work")), WRONG + "Invalid value 'work' - at `$.type`"),
        (forged(b""), WRONG + "Input data was truncated"),
        (forged(b"\x91" * 5000), WRONG + "Expected `object`, got `array`"),
        (b"", "an empty chunk came"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    decoder = Decoder(FromClient, 1000)
    with pytest.raises(WireError) as error:
        decoder.feed(raw)
    assert str(error.value) == reason
    with pytest.raises(WireError) as error:
        decoder.feed(encode(ANSWER)[0])
    assert str(error.value) == f"nothing more is read here, because an earlier message was refused: {reason}"


UNKNOWN = "which this version of cutlayer does not know"


@pytest.mark.parametrize(
    ("skeleton", "reason"),
    [
        ("text", "a skeleton is none of those that a value can have"),
        (["tuple", ["text"]], "a skeleton is none of those that a value can have"),
        (["list", ["number"]], f"it holds a list, {UNKNOWN}"),
        (["x" * 10**5, []], f"it holds a {'x' * 199}…, {UNKNOWN}"),
        (["Model", ["x" * 10**5], [None]], f"it holds a Model({'x' * 193}…, {UNKNOWN}"),
        (["Model", ["x"] * 10**5, [None]], f"it holds a Model({('x, ' * 65)[:193]}…, {UNKNOWN}"),
    ],
)
def test_a_tree_of_another_kind_is_refused_with_a_short_reason(skeleton: Any, reason: str) -> None:
    with pytest.raises(WireError) as error:
        build(skeleton, lambda: 1.0, lambda: torch.ones(1))
    assert str(error.value) == reason


@pytest.mark.parametrize("value", [[1.0], {"a": ([torch.ones(1)],)}])
def test_a_list_is_not_sent(value: Any) -> None:
    with pytest.raises(WireError, match=r"^a list cannot travel; only tensors, numbers, dicts and tuples of them can$"):
        sendable(1, 1, value)


def test_the_limit_is_asked_anew_for_every_message() -> None:
    limits = iter([16, 32, 16])
    decoder = Decoder(FromClient, lambda: next(limits))
    for length in (16, 32):
        assert decoder.feed(encode(ANSWER, [torch.zeros(length, dtype=torch.int8)])[0])
    with pytest.raises(WireError, match="a body of 32 bytes is too long; at most 16 are expected now"):
        decoder.feed(encode(ANSWER, [torch.zeros(32, dtype=torch.int8)])[0])


def test_a_promise_takes_no_memory() -> None:
    decoder = Decoder(FromClient, 2**62)
    assert decoder.feed(forged(answer(["float64", [2**40]]), body=2**43)) is None
    for _ in range(10):
        assert decoder.feed(bytes(1000)) is None
    assert decoder._buffer.__sizeof__() < 20_000


def echo(chunks: Iterator[bytes], _: Any) -> Iterator[bytes]:
    decoder = Decoder(FromServer, 2**30)
    for chunk in chunks:
        if got := decoder.feed(chunk):
            yield from encode(ANSWER, got[1])


@pytest.fixture
def stub() -> Iterator[Any]:
    """A stream to a server that answers with the tensors that came."""
    server = grpc.server(ThreadPoolExecutor(1), options=wire.CHANNEL_OPTIONS)
    handlers = {"echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("wire", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=wire.CHANNEL_OPTIONS) as channel:
        yield channel.stream_stream("/wire/echo")
    server.stop(None).wait()


def test_large_tensors_travel_over_a_grpc_stream(stub: Any) -> None:
    x = torch.arange(3 * CHUNK // 4, dtype=torch.int32).reshape(3, -1)
    message, tensors = decoded(list(stub(iter(encode(WORK, [x])), timeout=60)))
    assert isinstance(message, Answer)
    assert torch.equal(tensors[0], x)


def test_grpc_takes_no_more_than_two_chunks_at_once(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(stub(iter([bytes(2 * CHUNK + 1)]), timeout=60))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_dead_peer_is_noticed_within_half_a_minute() -> None:
    options = dict(wire.CHANNEL_OPTIONS)
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 30_000
