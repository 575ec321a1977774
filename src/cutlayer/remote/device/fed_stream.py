"""A device's stream to a fed server of its own: its values come, and deliveries go."""

import threading
from collections.abc import Callable

import msgspec

from cutlayer.core.tree import Tree
from cutlayer.errors import WireError
from cutlayer.remote.device.session import Reply
from cutlayer.remote.device.stream import Stream, StreamEnded
from cutlayer.remote.protocol.messages import Done, Hello, Ready, Sent, Welcome
from cutlayer.remote.tensors.trees import build

SECONDS = 120.0  # that a value may take


class FedStream:
    """The stream, and the values that came, by token and number."""

    def __init__(self, stream: Stream, on_end: Callable[[], None]) -> None:
        self._stream, self._on_end = stream, on_end  # the device leaves both servers, or none
        self._messages = iter(stream)
        self._session = -1
        self._values: dict[tuple[int, int], Tree] = {}
        self._newest: int | None = None  # the attempt of the last value
        self._end: StreamEnded | None = None
        self._change = threading.Condition()

    def opened(self, hello: Hello) -> Welcome:
        """The fed server's welcome."""
        self._stream.say(hello)
        for message, _ in self._messages:
            if isinstance(message, Welcome):
                self._session = message.session
                return message
        raise StreamEnded("the fed server closed the connection", True)

    def follow(self, ready: Ready) -> None:
        self._stream.say(ready)
        threading.Thread(target=self._listen, name="fed stream", daemon=True).start()

    def value(self, token: int, number: int) -> Tree:
        """A value of this attempt at the round, once it is there."""
        with self._change:
            before = self._newest

            def settled() -> bool:
                begun_again = self._newest not in (before, token)
                return (token, number) in self._values or self._end is not None or begun_again

            self._change.wait_for(settled, SECONDS)
            if (token, number) in self._values:
                return self._values.pop((token, number))
            if self._end is not None:
                raise self._end
            raise WireError("the fed server did not send what the training server said it would")

    def send(self, reply: Reply) -> None:
        self._stream.say(msgspec.structs.replace(reply.message, session=self._session), reply.tensors)

    def close(self) -> None:
        self._stream.close()

    def _listen(self) -> None:
        try:
            for message, tensors in self._messages:
                if isinstance(message, Done):  # the training server says so, too
                    return
                if isinstance(message, Sent):
                    self._put(message, build(message.tree, iter(message.numbers).__next__, iter(tensors).__next__))
            end = StreamEnded("the fed server closed the connection", True)
        except StreamEnded as left:
            end = left
        except Exception as error:  # whatever is wrong with a value, the device must hear of it
            end = StreamEnded(f"the fed server sent something that cannot be used: {error}", True)
        with self._change:
            self._end = end
            self._change.notify_all()
        self._on_end()

    def _put(self, message: Sent, value: Tree) -> None:
        with self._change:
            # Of an older attempt at a round nobody wants anything any more.
            self._values = {key: old for key, old in self._values.items() if key[0] == message.token}
            self._values[message.token, message.number] = value
            self._newest = message.token
            self._change.notify_all()
