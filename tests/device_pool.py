"""Real devices for tests: warm processes that join servers, or serve, and that may be killed or frozen.

A process takes seconds to start, so each pytest worker has a few that many tests share; one that was killed is replaced
before it is needed. A process that a test tells to die kills itself with SIGKILL, as a power cut would, after it has
sent, received or written a given number of things. If a test fails, its error shows what its processes said, and each
of them prints its stacks.
"""

import errno
import faulthandler
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cutlayer.remote.device import client
from cutlayer.remote.device.session import ClientDevice, Session
from cutlayer.remote.device.stream import Stream
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.joining import join
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import Welcome
from cutlayer.remote.server import serve
from cutlayer.remote.server.sessions import ClientSession, Sessions
from cutlayer.runs import checkpoint, run
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder

PATIENCE = 60.0  # seconds for anything that a test waits for
NEVER = 0  # no moment to die at
WHERE_ARE_YOU = signal.SIGUSR1  # a process then writes to stderr what each of its threads is at


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Some clients of one server, in one process."""

    address: str
    keys: Path | None  # the folder of the CA; None: plaintext
    names: Sequence[str]
    case: bool = False  # whether the server's run is a case of test_engines_agree, rather than a configuration
    state: Path | None = None  # of what they keep
    fed: str | None = None  # the address of a separate fed server
    settings: Mapping[str, Any] = field(default_factory=dict)  # more of each device's own, such as its run file
    dies_at: int = NEVER  # the moment: of all of them, whatever they say or are asked is counted
    by: int = signal.SIGKILL  # or SIGSTOP, which freezes them
    gives_up_after: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Served:
    """A run to serve in this folder."""

    run: Run
    folder: Path
    serving: serve.Serving
    dies_at: int = NEVER  # the moment: requests, answers and writes are counted


# -- in the process ------------------------------------------------------------------------------------------------


class Moments:
    """Counts the events of this process, and kills it at a given count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(NEVER)

    def begin(self, last: int, by: int = signal.SIGKILL) -> None:
        self.count, self._last, self._by = 0, last, by

    def end(self) -> None:
        os.kill(os.getpid(), self._by)

    def is_last(self) -> bool:
        """Count one more event; return whether it is the last."""
        with self._lock:
            self.count += 1
            return self.count == self._last

    def watch(self, owner: Any, name: str) -> None:
        """Count an event whenever this function is called."""
        old = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            if self.is_last():
                self.end()
            return old(*args, **options)

        setattr(owner, name, counted)

    def watch_writes(self) -> None:
        """Count writes of checkpoints; a process that dies during one leaves half of the file."""
        old = checkpoint.write_to_disk

        def write(path: Path, data: bytes) -> None:
            if self.is_last():
                path.write_bytes(data[: len(data) // 2])
                self.end()
            old(path, data)

        checkpoint.write_to_disk = write


SERVER, CLIENT = Moments(), Moments()


def work(orders: Connection) -> None:
    """Run the orders that come through the pipe, each in its own threads, until the pipe closes."""
    torch.set_num_threads(1)
    faulthandler.register(WHERE_ARE_YOU)
    logging.getLogger("cutlayer").setLevel(logging.CRITICAL)
    client.FIRST_PAUSE, client.LONGEST_PAUSE = 0.05, 0.4
    serve.POLL_SECONDS = 0.02
    for owner, name in ((ClientSession, "send"), (Sessions, "take"), (run, "append_line")):
        SERVER.watch(owner, name)
    SERVER.watch_writes()
    CLIENT.watch(Session, "work")
    CLIENT.watch(Stream, "say")
    lock = threading.Lock()

    def tell(word: str, value: Any) -> None:
        with lock:
            orders.send((word, value))

    tell("ready", os.getpid())
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        match order:
            case Devices():
                join_all(order, tell)
            case Served():
                threading.Thread(target=serve_it, args=(order, tell), daemon=True).start()


def join_all(order: Devices, tell: Callable[[str, Any], None]) -> None:
    CLIENT.begin(order.dies_at, order.by)
    for name in order.names:
        threading.Thread(target=join_one, args=(order, name, tell), daemon=True).start()


def join_one(order: Devices, name: str, tell: Callable[[str, Any], None]) -> None:
    keys = None if order.keys is None else Credentials.load(order.keys / "clients" / name)
    state = None if order.state is None else order.state / name
    own = {"data": "digits", "state": state, "two_servers": order.fed is not None, **order.settings}
    options = client.JoinOptions(
        address=order.address,
        fed=order.fed,
        name=name,
        credentials=keys,
        plugins={},
        ready=partial(case_device, state) if order.case else join.DeviceSettings(**own).ready,
        gives_up_after=order.gives_up_after,
    )
    try:
        tell("left", (name, client.stay(options)))
    except Exception as error:
        tell("left", (name, f"{type(error).__name__}: {error}"))


def case_device(state: Path | None, welcome: Welcome) -> ClientDevice:
    """A client of one of the cases: its name, its shape, and the name of its codecs if it has any."""
    from conftest import CODECS, clients_of, images
    from in_process import device
    from test_engines_agree import CASES
    from test_remote import method_of

    from cutlayer.runs.codecs import coders

    case, shape, *codecs = welcome.run.split("/")
    method, data = method_of(case, shape), images()
    own = coders(CODECS[codecs[0]], method.model, data.take([0, 1]).x) if codecs else {}
    made = device(method, data, clients_of(), CASES[case].batching, welcome.client, coders=own)
    made.store.folder = state
    made.store.load()
    return made


def serve_it(order: Served, tell: Callable[[str, Any], None]) -> None:
    SERVER.begin(order.dies_at)
    board = Board(name=order.run.name, method=order.run.method.name, rounds=order.run.rounds)
    try:
        serve.serve(
            order.run, Folder(order.folder), order.serving, board, on_open=lambda address: tell("open", address)
        )
        tell("served", (board.snapshot(), SERVER.count))
    except Exception as error:
        tell("failed", f"{type(error).__name__}: {error}")


# -- at the test ---------------------------------------------------------------------------------------------------

LAST_WORDS = ("left", "served", "failed")


class Process:
    """One warm process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._said: list[tuple[str, Any]] = []
        self._warm = False
        self._owed = 0  # last words, of each client and server

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def order(self, order: Devices | Served) -> None:
        self._owed += len(order.names) if isinstance(order, Devices) else 1
        self._said = [said for said in self._said if said[0] != "open"]  # of an earlier server
        self._orders.send(order)

    def hear(self, word: str, seconds: float = PATIENCE) -> Any:
        """Wait for the next message of this name from the process, and return its content."""
        end = time.monotonic() + seconds
        while True:
            for said in self._said:
                if said[0] == word:
                    self._said.remove(said)
                    return said[1]
            if self._said and self._said[-1][0] == "failed":
                raise RuntimeError(self._said.pop()[1])
            if not self._orders.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError(f"process {self.pid} said no {word!r} within {seconds:g} seconds")
            self._listen()

    def _listen(self) -> None:
        self._said.append(self._orders.recv())
        self._owed -= self._said[-1][0] in LAST_WORDS

    def story(self) -> str:
        """Describe the unread messages and the stacks of the process, for the report of a failed test."""
        with suppress(EOFError, ConnectionError):  # it is dead
            while self._orders.poll():
                self._listen()
        if self._process.is_alive() and self._owed:
            self.signal(WHERE_ARE_YOU)
        return f"process {self.pid}, exit code {self._process.exitcode}, has said {self._said}"

    def wait_until_warm(self) -> None:
        if not self._warm:
            self.hear("ready")
            self._warm = True

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_until_frozen(self, seconds: float = PATIENCE) -> None:
        state = Path(f"/proc/{self.pid}/stat")
        wait_for(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def wait_for_death(self, seconds: float = PATIENCE) -> None:
        self._process.join(seconds)
        code = self._process.exitcode
        assert code is not None, f"process {self.pid} is still alive after {seconds:g} seconds"
        assert code == -signal.SIGKILL, f"process {self.pid} ended with {code}"

    @property
    def useful(self) -> bool:
        """Whether another test may use this process."""
        return self._process.is_alive() and not self._owed


class Pool:
    """Warm processes, some of them in use."""

    def __init__(self) -> None:
        self._free: list[Process] = []
        self._most = 0  # that a test has asked for

    @contextmanager
    def some(self, number: int = 1) -> Iterator[list[Process]]:
        """Processes for this test alone; those that have died, or have not ended what they began, do not come back."""
        self._most = max(self._most, number)
        self._fill()
        taken, self._free = self._free[:number], self._free[number:]
        try:
            for process in taken:
                process.wait_until_warm()
            yield taken
        except BaseException as error:
            for process in taken:
                error.add_note(process.story())
            time.sleep(0.5)  # they write
            for process in taken:  # what they still say is not for the next test
                process.kill()
            raise
        finally:
            for process in taken:
                self._take_back(process)
            self._fill()  # so that they are warm by the time of the next test

    def _fill(self) -> None:
        while len(self._free) < self._most:
            self._free.append(Process())

    def _take_back(self, process: Process) -> None:
        if process.useful:
            self._free.insert(0, process)
        else:
            process.kill()


@cache
def shared() -> Pool:
    """The pool of this pytest worker; its processes end with it."""
    return Pool()


@cache
def _ports() -> Iterator[int]:
    """Return the ports of this pytest worker, below the range from which Linux assigns free ports.

    One of these could go to another process while a killed server is started again.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first, number, start = 20_000 + 1000 * (worker % 12), 1000, os.getpid()  # another run begins elsewhere
    return itertools.cycle(first + (start + i) % number for i in range(number))


def free_port() -> int:
    """Return a port that no other process of this machine and no other running test uses."""
    return next(port for port in _ports() if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        return True


def wait_for(what: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait until the condition holds; fail after that many seconds."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"it did not come to that within {seconds:g} seconds"
        time.sleep(0.01)
