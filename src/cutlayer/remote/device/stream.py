"""A device's streams: one to the server, and one to the fed server where that is a separate process."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.text import printable
from cutlayer.core.tree import Tree
from cutlayer.errors import WireError
from cutlayer.remote.device.session import Reply
from cutlayer.remote.identity.certificates import Credentials, secure_channel
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.tensors.trees import build
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, Decoder, encode

# Each attempt opens a new connection: none is stale, and the device alone decides when to retry.
OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

FAILED, REFUSED = "failed to connect", "Connection refused"  # in gRPC's own texts
FAILURES = {  # why a connection failed, by what gRPC says about it
    REFUSED: "connection refused: nothing listens there yet, or it is another port",
    "WRONG_VERSION_NUMBER": "it shows no certificate; perhaps it was started with --insecure",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the CA that this device trusts, or has expired",
    "Socket closed": "it hung up at once; perhaps it does not accept this device's certificate, or wants one",
}
GOODBYE_SECONDS = 1.0
MOST_WORDS = 1000  # characters of what a server says to people
VALUE_SECONDS = 120.0  # that a value of the fed server may take
FIRST_HEADER = 2**18  # bytes of a message before the terms are known: a welcome with its configuration
MOST_WAITING = 8  # messages that are read before the ones before them are worked on
FULL_SECONDS = 0.5  # between looks whether the connection was closed meanwhile
MOST_VALUES = 64  # messages' worth of bytes that may wait from the fed server

Received = tuple[m.Message, list[Tensor]] | Exception | None  # the last two at the end


class StreamEnded(Exception):
    """The stream has ended; `again` tells whether to connect again, `raw` is gRPC's own text of a failed connection."""

    def __init__(self, reason: str, again: bool, raw: str = "") -> None:
        super().__init__(reason)
        self.again, self.raw = again, raw


def channel_to(address: str, server: Literal["train", "fed"], credentials: Credentials | None) -> Any:
    """Open a gRPC channel to this server, and to nobody else at that address."""
    import grpc

    if credentials is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return secure_channel(address, credentials, server, OPTIONS)


class Stream:
    """A stream to one server; iterate over it once."""

    def __init__(self, address: str, server: Literal["train", "fed"], credentials: Credentials | None) -> None:
        self.address = address
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._received: queue.Queue[Received] = queue.Queue(MOST_WAITING)
        self._closed = threading.Event()
        self.most = (0, FIRST_HEADER)  # bytes of the tensors and of the header of a message
        self._channel = channel_to(address, server, credentials)
        self._call = self._channel.stream_stream(m.JOIN)(iter(self._out.get, None))

    def say(self, message: m.Message, tensors: Sequence[Tensor] = ()) -> int:
        """Send a message with its tensors; return its bytes."""
        sent = 0
        for chunk in encode(message, tensors):
            self._out.put(chunk)
            sent += len(chunk)
        return sent

    def __iter__(self) -> Iterator[tuple[m.Message, list[Tensor]]]:
        """Yield the server's messages; raise StreamEnded if it refuses this client, says goodbye or is gone."""
        # A thread reads: Ctrl-C inside gRPC's code would leave its locks locked for ever.
        threading.Thread(target=self._read, name="stream", daemon=True).start()
        while (one := self._next()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one

    def _next(self) -> Received:
        """Wait for the next message, or for somebody to close the stream: the reader then says nothing more."""
        while True:
            try:
                return self._received.get(timeout=FULL_SECONDS)
            except queue.Empty:
                if self._closed.is_set():
                    return StreamEnded("the connection was closed", True)

    def _read(self) -> None:
        """Put each message into the queue, and at the end None or the error."""
        import grpc

        decoder = Decoder(m.FromServer, lambda: self.most[0], lambda: self.most[1])
        end: Exception | None = None
        try:
            for chunk in self._call:
                said = decoder.feed(chunk)
                match said:
                    case (m.Denied(reason, final), _):
                        raise StreamEnded(f"refused by the server: {printable(reason, MOST_WORDS)}", not final)
                    case (m.Bye(m.STOPPING), _):
                        raise StreamEnded(m.STOPPING, True)
                    case (m.Bye(reason), _):
                        raise StreamEnded(f"the server ended the session: {printable(reason, MOST_WORDS)}", True)
                    case (_, _):
                        self._wait_with(said)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            again = code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
            raw = printable(details, MOST_WORDS) if FAILED in details and REFUSED not in details else ""
            end = StreamEnded(printable(self._in_words(code.name, details), MOST_WORDS), again, raw)
        except WireError as error:
            end = StreamEnded(f"the server sent something that cannot be used: {printable(str(error))}", True)
        except Exception as error:
            end = error
        self._wait_with(end)

    def _wait_with(self, one: Received) -> None:
        """Pass a message on; as long as there is no room, nothing more is read from the connection."""
        while not self._closed.is_set():
            try:
                self._received.put(one, timeout=FULL_SECONDS)
                break
            except queue.Full:
                continue

    def close(self, reason: str = "") -> None:
        """Close the stream; if there is a reason, tell the server first."""
        if reason:
            self.say(m.Bye(reason))
        self._closed.set()
        self._out.put(None)
        end = time.monotonic() + GOODBYE_SECONDS
        while reason and not self._call.done() and time.monotonic() < end:
            time.sleep(0.02)
        self._call.cancel()
        self._channel.close()

    def _in_words(self, code: str, details: str) -> str:
        if code == "PERMISSION_DENIED":
            return f"refused by the server: {details}"
        if FAILED not in details:
            return f"no connection to {self.address} ({details or code})"
        why = next((words for sign, words in FAILURES.items() if sign in details), "it cannot be reached")
        return f"no connection to {self.address}: {why}"


class FedStream(Stream):
    """The stream to a separate fed server: its values come in, by token and number, and deliveries go out."""

    def __init__(self, address: str, credentials: Credentials | None, on_end: Callable[[], None]) -> None:
        super().__init__(address, "fed", credentials)
        self._on_end = on_end  # a device that loses one server leaves the other, too
        self._messages = iter(self)
        self._session = -1
        self._values: dict[tuple[int, int], Tree] = {}
        self._newest: int | None = None  # the token of the last value
        self._end: StreamEnded | None = None
        self._change = threading.Condition()

    def opened(self, hello: m.Hello) -> m.Welcome:
        """Greet the fed server and return its welcome."""
        self.say(hello)
        for message, _ in self._messages:
            if isinstance(message, m.Welcome):
                self._session = message.session
                return message
        raise StreamEnded("the fed server closed the connection", True)

    def follow(self, ready: m.Ready) -> None:
        """Report that this client is ready, and read values from then on."""
        self.say(ready)
        threading.Thread(target=self._listen, name="fed stream", daemon=True).start()

    def value(self, token: int, number: int) -> Tree:
        """Wait for a value of this attempt at the round and return it."""
        key = (token, number)
        with self._change:
            expected = (self._newest, token)  # any other token tells that the round has begun again
            self._change.wait_for(
                lambda: key in self._values or self._end is not None or self._newest not in expected, VALUE_SECONDS
            )
            if key in self._values:
                return self._values.pop(key)
            if self._end is not None:
                raise self._end
            raise WireError("the fed server did not send what the training server said it would")

    def send(self, reply: Reply) -> int:
        return self.say(msgspec.structs.replace(reply.message, session=self._session), reply.tensors)

    def _listen(self) -> None:
        try:
            for message, tensors in self._messages:
                if isinstance(message, m.Done):  # the training server says so, too
                    return
                if isinstance(message, m.Sent):
                    value = build(message.tree, iter(message.numbers).__next__, iter(tensors).__next__)
                    with self._change:
                        # Values of an older attempt at a round are no longer needed.
                        self._values = {key: old for key, old in self._values.items() if key[0] == message.token}
                        self._values[message.token, message.number] = value
                        if sum(map(tree.num_bytes, self._values.values())) > MOST_VALUES * self.most[0]:
                            raise WireError("more values wait here than a round needs")
                        self._newest = message.token
                        self._change.notify_all()
            end = StreamEnded("the fed server closed the connection", True)
        except StreamEnded as left:
            end = left
        except Exception as error:  # whatever is wrong with a value, the device must learn of it
            end = StreamEnded(f"the fed server sent something that cannot be used: {error}", True)
        with self._change:
            self._end = end
            self._change.notify_all()
        self._on_end()
