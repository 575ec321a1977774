"""The server of real devices: it waits for clients, runs rounds with them, and saves the results of each round."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch

from cutlayer.core.checks import check_device, check_positive
from cutlayer.core.engine import Engine
from cutlayer.core.method import needs_of
from cutlayer.core.precision import computing
from cutlayer.core.tree import num_bytes
from cutlayer.data.arrays import Arrays
from cutlayer.data.local import local
from cutlayer.data.sample import DTYPES, Sample
from cutlayer.engines.auto import EngineSetting, chosen_for_servers
from cutlayer.errors import ConfigError, LinkError, UnknownNameError
from cutlayer.remote.device.session import forms_of
from cutlayer.remote.identity.certificates import Credentials, warning_of_expiry
from cutlayer.remote.identity.register import Register
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import STOPPING
from cutlayer.remote.server.ceilings import Ceilings
from cutlayer.remote.server.claims import Claims
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.device_tests import DeviceTests
from cutlayer.remote.server.guests import Guests
from cutlayer.remote.server.handshakes import Handshakes
from cutlayer.remote.server.peer import NoPeer, Peer, PeerLost
from cutlayer.remote.server.sessions import Sessions
from cutlayer.remote.server.streams import OVER, Admission, listen
from cutlayer.remote.server.waits import Waits
from cutlayer.runs import build, config
from cutlayer.runs.checks import RunPlan, check_run
from cutlayer.runs.codecs import coders
from cutlayer.runs.config import Run
from cutlayer.runs.examination import Examination
from cutlayer.runs.folder import Folder
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.run import check_resumable, execute
from cutlayer.runs.stopping import Limits
from cutlayer.runs.training import Training

log = logging.getLogger("cutlayer")

Role = Literal["both", "train", "fed"]
POLL_SECONDS = 0.2
MODELS_WORTH = 4  # a delivery may be as large as so many models: a model with its moments, and more
GOODBYE_SECONDS = 2.0
MOST_NAMED = 10  # clients that are not here


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a server listens to and waits for its clients."""

    listen: str = "0.0.0.0:8470"
    keys: Path | None = None  # the server's own folder of keys; None: plaintext, open to everybody
    deadline: float = 60.0  # seconds that a client has for an answer
    patience: float = 60.0  # seconds that a round waits for missing clients
    waits: Waits = field(default_factory=Waits)  # how slow a client may be compared with others, and a round in all
    least: int | None = None  # clients that a round needs; by default all for the first round, then any number
    linger: float = 0.0  # seconds to wait at the end for lost clients, to tell them that the run is over
    role: Role = "both"  # the training server, the fed server, or both in one process
    train: str | None = None  # the address of the training server, for a fed server
    plugins: Mapping[str, str] = field(default_factory=dict)
    ceilings: Ceilings = field(default_factory=Ceilings)

    def __post_init__(self) -> None:
        check_positive("deadline", self.deadline)
        if self.patience < 0:
            raise ConfigError(f"patience is {self.patience}; it must be at least 0 seconds")
        if self.least is not None and self.least < 1:
            raise ConfigError(f"least is {self.least}; a round needs at least 1 client")
        if self.role not in get_args(Role):
            raise UnknownNameError("role", self.role, get_args(Role))
        if (self.role == "fed") != (self.train is not None):
            raise ConfigError("a fed server of its own needs to know the training server, and only that one: --train")


@dataclass(frozen=True, kw_only=True)
class ServerData:
    """What a server knows about its clients' samples, and the test samples that it measures the model on."""

    like: Arrays  # two samples: what all samples look like
    test: Arrays | None
    counts: Sequence[int] | None = None  # how many each client has, if the data set is known


def samples_of(run: Run, root: Path | None, test: Path | None) -> ServerData:
    """Return what the run's [sample] or its data set tells; a data set's test samples belong to the server."""
    if run.sample is not None:
        held_out = None if test is None else local(test, sample=run.sample)
        return ServerData(like=blank(run.sample), test=held_out)
    if test is not None:
        raise ConfigError("--test needs a [sample] in the configuration, which says what a sample looks like")
    data = build.dealt(run, root)
    return ServerData(like=data.data.take([0, 1]), test=data.test, counts=data.partition.sizes.tolist())


def blank(sample: Sample) -> Arrays:
    """Return two samples of zeros."""
    targets = torch.zeros(2, dtype=torch.int64 if sample.classes is not None else torch.float32)
    return Arrays(x=torch.zeros(2, *sample.shape, dtype=DTYPES[sample.dtype]), y=targets, num_classes=sample.classes)


class RunServer:
    """Serves one run."""

    def __init__(self, run: Run, serving: Serving, board: Board, samples: ServerData, root: Path | None = None) -> None:
        self.run, self.serving, self.board, self.samples = run, serving, board, samples
        self.sessions = Sessions()
        clients = None if serving.keys is None else serving.keys / "clients.toml"
        self.guests = Guests(path=clients, sessions=self.sessions, board=board)
        self.peer: Peer | NoPeer = NoPeer()
        if serving.role != "both":
            self.peer = Peer("server" if serving.role == "train" else "fed", serving.train)
            self.peer.notify = self.sessions.take
        if run.per_client:
            raise ConfigError("per_client needs the clients' samples, which stay with them; leave it out")
        check_device(run.device)
        split = build.model_of(run, samples.like, root)
        self.method, _ = build.planned_method(run, split, samples.like, run.clients)
        few = samples.like.to(run.device)
        plan = RunPlan(
            method=self.method,
            num_clients=run.clients,
            counts=samples.counts,
            like=few,
            batching=run.batching,
            per_round=run.per_round,
            precision=run.precision,
            chunk=run.chunk,
            augment=run.augment,
            name=run.method.name,
        )
        check_run(plan)
        self.coders = coders(run.codecs, split, few.x)
        self._setting = EngineSetting(
            split=split, like=few, batch=run.batching.size, clients=run.per_round or run.clients, chunk=run.chunk
        )
        self._engine(run)  # report a mistake before anyone can join
        self._sampler = build.sampler(run)
        build.meters(run)  # likewise
        self._list = None if serving.keys is None else serving.keys / "clients.toml"
        self._expected = run.clients  # how many clients a round waits for
        self._present: set[int] = set()

    def _engine(self, run: Run) -> Engine:
        """Return the engine of this server; a run that resumes names the one that it began with."""
        if self.peer.apart and run.server_engine not in ("auto", "loop"):
            raise ConfigError("two servers in two processes compute on loop; leave the server's engine out")
        with computing(run.precision):
            return chosen_for_servers("loop" if self.peer.apart else run.server_engine, self._setting)

    def training(self, run: Run) -> Training:
        """Return the training of this run, before its first round."""
        examination, metrics = None, build.metrics(run, self.samples.like)
        if not self.peer.apart:  # of two servers, neither has the whole model
            examination = Examination.of(self.method, metrics)
        devices = DeviceBackend(
            method=self.method,
            coders=self.coders,
            sessions=self.sessions,
            sample=self.samples.like,
            examination=examination,
            engine=self._engine(run),
            device=run.device,
            deadline=self.serving.deadline,
            waits=self.serving.waits,
            gather=self.gather,
            on_begin=lambda round, ids: self.board.round_began(round + 1, ids),
            watcher=self.board,
            peer=self.peer,
        )
        runner = Rounds(
            self.method,
            devices,
            batching=run.batching,
            per_round=run.per_round,
            sampler=self._sampler,
            seed=run.seed,
            precision=run.precision,
            guard=run.guard,
            most_weight=run.most_weight,
            meters=build.meters(run),
        )
        test = None if self.peer.apart else self.samples.test  # neither server can compute the whole model
        client_tests = None
        if examination is not None:
            client_tests = DeviceTests(
                backend=devices,
                examination=examination,
                certain=run.hold_out > 0,
                seed=run.seed,
                precision=run.precision,
            )
        return Training(
            runner=runner,
            test=None if test is None else test.to(run.device),
            client_tests=client_tests,
            metrics=metrics,
            eval_every=run.eval_every,
            limits=Limits.of(run),
        )

    def gather(self, round: int) -> tuple[int, ...]:
        """Wait for all clients of the run; after `patience` seconds, only for as many as the round needs.

        Later rounds do not wait for the missing clients until they are back.
        """
        self.guests.look()
        begin = time.monotonic()
        fewest = needs_of(self.method).fewest_clients
        least = self.serving.least or (self.run.clients if round == 0 else fewest)
        while True:
            present = tuple(self.sessions.present())
            waited = time.monotonic() - begin
            self._notice(present)
            late, enough = waited >= self.serving.patience, len(present) >= max(least, fewest)
            self._expected = max(self._expected, min(len(present), self.run.clients))
            missing = self._expected - len(present)
            if missing <= 0 or (late and enough):
                if missing > 0:
                    counts = f"{len(present)} of {self._expected} clients"
                    log.info("round %d begins with %s%s", round + 1, counts, self._absent(present))
                self._expected = len(present)
                self.board.waiting("")
                return present
            if waited > POLL_SECONDS:
                limit = f"for up to {self.serving.patience:g} s" if enough else "without a limit"
                counts = f"{missing} of {self._expected} clients"
                self.board.waiting(f"waiting for {counts} {limit}{self._absent(present)}")
            time.sleep(POLL_SECONDS)

    def _absent(self, present: tuple[int, ...]) -> str:
        """Return the names of those in the list who are not here."""
        names = [name for j, name in self.guests.names().items() if j not in present]
        more = ["..."] if len(names) > MOST_NAMED else []
        return f"; not here: {', '.join(names[:MOST_NAMED] + more)}" if names else ""

    def _notice(self, present: tuple[int, ...]) -> None:
        """Show on the board who has left."""
        for j in self._present - set(present):
            self.board.left(j)
        self._present = set(present)

    @contextmanager
    def open(self) -> Iterator[str]:
        """Listen, and yield the address with the port that was chosen."""
        credentials = None if self.serving.keys is None else Credentials.load(self.serving.keys)
        name = "fed" if self.serving.role == "fed" else "train"
        if credentials is not None and credentials.name != name:
            raise ConfigError(
                f"{self.serving.keys} holds the keys of {credentials.name!r}; this server needs those of {name!r}"
                + (", or start it with --role fed" if credentials.name == "fed" else "")
            )
        ceilings = self.serving.ceilings
        handshakes = Handshakes(ceilings.handshake, self.board.failed_handshakes, ceilings.of_an_address)
        admission = Admission(
            sessions=self.sessions,
            run=config.dumps(self.run),
            number_of=self._numbers(),
            check=Claims.of(self.run, self.method, forms_of(self.samples.like), ceilings.steps, self._list).check,
            plugins=self.serving.plugins,
            watcher=self.board,
            secure=credentials is not None,
            peer=self.peer,
            # Generous: each delivery is checked exactly once it is asked for.
            most_bytes=0 if self.peer.commands else MODELS_WORTH * num_bytes(self.method.model.initial()) + 2**20,
            ceilings=ceilings,
            handshakes=handshakes,
        )
        server, port = listen(self.serving.listen, credentials, admission, self.run.clients)
        self.farewell = STOPPING
        try:
            with (
                self.peer.linked(credentials),
                self.guests.watched(),
                handshakes.watched(),
                warning_of_expiry(credentials),
            ):
                yield f"{self.serving.listen.rpartition(':')[0]}:{port}"
        finally:
            for j in self.sessions.present():
                self.sessions.leave(j, None, self.farewell)
            server.stop(GOODBYE_SECONDS).wait(GOODBYE_SECONDS)

    def done(self) -> None:
        """Note that the run is over, and wait for lost clients to tell them.

        Of two servers it is the training server that tells them, so the fed server is there for as long as that one.
        """
        self.farewell = OVER
        self.peer.ending()
        end = time.monotonic() + self.serving.linger
        while self._has_lost() and self.peer.says_goodbye and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def _has_lost(self) -> bool:
        return bool(self.sessions.met - self.sessions.present().keys())

    def _numbers(self) -> Callable[[str], int]:
        path = self._list
        if path is None:
            return _first_come(self.run.clients, self.sessions)
        Register.read(path)  # report a mistake before anyone can join
        planned = self.run.devices is not None or needs_of(self.method).num_clients is not None

        def number(name: str) -> int:
            found = Register.read(path).number(name)
            if planned and found >= self.run.clients:
                raise LinkError(
                    f"client {name!r} is number {found}, but this run's plan is for the numbers 0 to "
                    f"{self.run.clients - 1}"
                )
            return found

        return number


def _first_come(num_clients: int, sessions: Sessions) -> Callable[[str], int]:
    """Number clients without certificates: a name that is a number is that client, any other gets a free number.

    A number is free while its client is not present.
    """
    places: dict[int, str] = {}
    lock = threading.Lock()

    def number(name: str) -> int:
        with lock:
            own = next((j for j, other in places.items() if other == name), None)
            if own is not None:
                return own
            wanted = (int(name),) if name.isdigit() else range(num_clients)
            free = [j for j in wanted if j < num_clients and j not in sessions.present()]
            unused = [j for j in free if j not in places]
            if not free:
                raise LinkError(f"there is no place left for {name!r}: this run is for {num_clients} clients")
            chosen = (unused or free)[0]
            places[chosen] = name
            return chosen

    return number


def serve(
    run: Run,
    folder: Folder,
    serving: Serving,
    board: Board,
    *,
    root: Path | None = None,
    test: Path | None = None,
    overwrite: bool = False,
    on_open: Callable[[str], None] = lambda address: None,
) -> Training:
    """Serve a run to its end; a run that was begun in this folder resumes from its newest checkpoint."""
    server = RunServer(run, serving, board, samples_of(run, root, test), root)
    folder.refuse_if_in_use()  # before any device comes
    if not overwrite:
        check_resumable(run, folder)
    with server.open() as address:
        on_open(address)
        while True:
            try:
                training = execute(
                    run,
                    folder,
                    resume=True,
                    overwrite=server.peer.agree(folder, overwrite),
                    make=server.training,
                    on_start=lambda training: _tell_resumed(training, folder, run),
                    on_round=lambda _, record: board.round_ended(record),
                )
                break
            except PeerLost as error:
                log.warning("%s; both servers resume from the newest round that they have in common", error)
                overwrite = False
        server.done()
        board.ended()
    return training


def _tell_resumed(training: Training, folder: Folder, run: Run) -> None:
    if training.state.round and not training.ended:
        log.info("continuing %s after round %d of %d", folder.path, training.state.round, run.rounds)
