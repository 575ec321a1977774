"""A device's stream to one server: what is said goes out, what comes is read, and every end has a reason."""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from cutlayer.errors import WireError
from cutlayer.remote.identity.certificates import Credentials, secure_channel
from cutlayer.remote.protocol.messages import JOIN, MOST_BYTES, Bye, Denied, FromServer, Message, Packing
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, Decoder, encode

# A new connection each time: no stale one, and no pauses but the device's own.
OPTIONS = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]

HANDSHAKES = {  # what gRPC says where no connection came about
    "WRONG_VERSION_NUMBER": "it shows no certificate; perhaps it was started with --insecure",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not of the CA that this device trusts, or has expired",
    "Socket closed": "it hung up at once; perhaps it does not accept this device's certificate, or wants one",
}
GOODBYE_SECONDS = 1.0


Come = tuple[Message, list[Tensor]] | Exception | None  # the last two at the end


class StreamEnded(Exception):
    """The stream has ended; `again` tells whether it is worth coming back."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again


def channel_to(address: str, server: Literal["train", "fed"], credentials: Credentials | None) -> Any:
    """A gRPC channel to this server, and to nobody else at that address."""
    import grpc

    if credentials is None:
        return grpc.insecure_channel(address, options=OPTIONS)
    return secure_channel(address, credentials, server, OPTIONS)


class Stream:
    """One stream, which is iterated once."""

    def __init__(self, address: str, server: Literal["train", "fed"], credentials: Credentials | None) -> None:
        self.address = address
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = channel_to(address, server, credentials)
        self._call = self._channel.stream_stream(JOIN)(iter(self._out.get, None))

    def say(self, message: Message, tensors: Sequence[Tensor] = (), packing: Sequence[Packing] | None = None) -> None:
        for chunk in encode(message, tensors, packing):
            self._out.put(chunk)

    def __iter__(self) -> Iterator[tuple[Message, list[Tensor]]]:
        """All that the server says, until it refuses this client, says good-bye, or is gone: then Left."""
        come: queue.SimpleQueue[Come] = queue.SimpleQueue()
        # Not in this thread: Ctrl-C in the midst of gRPC's code would leave its locks locked for ever.
        threading.Thread(target=self._read, args=(come,), name="stream", daemon=True).start()
        while (one := come.get()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one

    def _read(self, come: "queue.SimpleQueue[Come]") -> None:
        """Whatever comes, and at the end nothing, or what went wrong."""
        import grpc

        decoder = Decoder(FromServer, MOST_BYTES)
        end: Exception | None = None
        try:
            for chunk in self._call:
                said = decoder.feed(chunk)
                if said is not None:
                    _check_stay(said[0])
                    come.put(said)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            again = code not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED)
            end = StreamEnded(self._in_words(code.name, details), again)
        except WireError as error:
            end = StreamEnded(f"the server sent something that cannot be used: {error}", True)
        except Exception as error:
            end = error
        come.put(end)

    def close(self, reason: str = "") -> None:
        """Leave; with a reason the server is told it."""
        if reason:
            self.say(Bye(reason))
        self._out.put(None)
        end = time.monotonic() + GOODBYE_SECONDS
        while reason and not self._call.done() and time.monotonic() < end:
            time.sleep(0.02)
        self._call.cancel()
        self._channel.close()

    def _in_words(self, code: str, details: str) -> str:
        if code == "PERMISSION_DENIED":
            return f"the server refuses this client: {details}"
        if "failed to connect" in details:
            for sign, words in HANDSHAKES.items():
                if sign in details:
                    return f"no connection to {self.address}: {words} ({details})"
        refused = "connection refused: nothing listens there yet, or it is another port"
        why = refused if "Connection refused" in details else details or code
        return f"no connection to {self.address} ({why})"


def _check_stay(message: Message) -> None:
    match message:
        case Denied(reason, final):
            raise StreamEnded(f"the server refuses this client: {reason}", not final)
        case Bye(reason):
            raise StreamEnded(f"the server says good-bye: {reason}", True)
