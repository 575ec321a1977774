"""A server that asks a real device for whatever a test likes, over mutual TLS."""

import atexit
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any

import grpc
from device_pool import PATIENCE
from torch import Tensor

from cutlayer.core import keys
from cutlayer.core.tree import Tree
from cutlayer.remote.identity.certificates import Credentials, grpc_server_credentials
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.protocol import messages as m
from cutlayer.remote.tensors.trees import sendable
from cutlayer.remote.tensors.wire import CHANNEL_OPTIONS, Decoder, encode
from cutlayer.runs import config
from cutlayer.runs.config import Run

Said = list[Tensor] | str | None  # the tensors of an answer, the reason of a refusal, or None: the device has left
MOST = 2**30  # bytes of an answer


class Threads(Executor):
    """Threads that do not outlive the tests: a device stays for as long as it can."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(target=lambda: future.set_result(fn(*args, **options)), daemon=True).start()
        return future


class Visit:
    """A device's session at this server."""

    def __init__(self, run: Run, client: int, session: int) -> None:
        self.run, self.client, self.session = run, client, session
        self.ready: m.Ready | None = None
        self.out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.heard: queue.SimpleQueue[tuple[Any, list[Tensor]] | None] = queue.SimpleQueue()
        self._number = 0
        self._over = False

    def say(self, message: m.Message, tensors: Sequence[Tensor] = ()) -> None:
        for chunk in encode(message, tensors):
            self.out.put(chunk)

    def tell(
        self,
        commands: Sequence[c.AnyCommand] | None,
        numbers: Sequence[float] = (),
        tensors: Sequence[Tensor] = (),
        *,
        begins: bool = False,
        round: int = 0,
        **fields: Any,
    ) -> None:
        """Send work, and wait for nothing."""
        self._number += 1
        purpose = "tests" if fields.get("tests") else "round"
        own = {
            "session": self.session,
            "number": self._number,
            "round": round,
            "key": keys.fold(self.run.seed, purpose, round),
            "token": 1,
            "list": self._number,
            "commands": None if commands is None else tuple(commands),
        }
        self.say(m.Work(begins=begins, numbers=tuple(numbers), **{**own, **fields}), list(tensors))

    def ask(self, *work: Any, **fields: Any) -> Said:
        """Send work, and return what the device says to it."""
        self.tell(*work, **fields)
        return self.hear()

    def hear(self, seconds: float = PATIENCE) -> Said:
        said = self.heard.get(timeout=seconds)
        self._over = said is None
        if said is None or isinstance(said[0], m.Bye):
            return None
        return said[1] if isinstance(said[0], m.Answer) else str(said[0].reason)

    def send(self, value: Tree, number: int = 1, token: int = 1) -> None:
        """Send a value as a fed server does."""
        message, tensors = sendable(token, number, value)
        self.say(message, tensors)

    def end(self, words: m.Message = m.Bye("come again")) -> None:  # noqa: B008
        self.say(words)
        self.out.put(None)
        with suppress(queue.Empty):  # of a device that has crashed nothing comes
            while not self._over:
                self._over = self.heard.get(timeout=PATIENCE) is None


class EvilServer:
    """Accepts devices, welcomes them to a run, and leaves the rest to the test."""

    def __init__(
        self, credentials: Credentials | None, run: Run, client: int = 0, address: str = "127.0.0.1:0"
    ) -> None:
        self.run, self.client = run, client
        self.greeted: list[m.Hello] = []
        self._visits: queue.SimpleQueue[Visit] = queue.SimpleQueue()
        self._sessions = 0
        self._server = grpc.server(Threads(), options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        handlers = {"Join": grpc.stream_stream_rpc_method_handler(self._joined)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(m.SERVICE, handlers),))
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, grpc_server_credentials(credentials))
        self.address = f"127.0.0.1:{port}"
        self._server.start()
        atexit.register(self.close)

    def visit(self, seconds: float = PATIENCE) -> Visit:
        """Wait for the next device that is ready."""
        return self._visits.get(timeout=seconds)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._server.stop(0).wait(5)

    def welcome(self, visit: Visit) -> m.Welcome:
        return m.Welcome(session=visit.session, client=visit.client, run=config.dumps(self.run))

    def _joined(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        self._sessions += 1
        visit = Visit(self.run, self.client, self._sessions)
        threading.Thread(target=self._listen, args=(visit, requests), daemon=True).start()
        return iter(visit.out.get, None)

    def _listen(self, visit: Visit, requests: Iterator[bytes]) -> None:
        decoder = Decoder(m.FromClient, MOST)
        with suppress(grpc.RpcError, Exception):
            for chunk in requests:
                match come := decoder.feed(chunk):
                    case (m.Hello() as hello, _):
                        self.greeted.append(hello)
                        visit.say(self.welcome(visit))
                    case (m.Ready() as ready, _) if visit.ready is None:
                        visit.ready = ready
                        self._visits.put(visit)
                    case (_, _):
                        visit.heard.put(come)
        visit.heard.put(None)
        visit.out.put(None)
