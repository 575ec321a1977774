"""A method on clients that are somewhere else, round after round."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from cutlayer import keys
from cutlayer.batches import Batching, Walk
from cutlayer.data.arrays import Arrays
from cutlayer.engines.base import Engine
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError
from cutlayer.kinds import Place
from cutlayer.meters.base import Meter
from cutlayer.meters.ledger import Ledger
from cutlayer.methods.base import Method, TooFew
from cutlayer.pieces.sampler import uniform
from cutlayer.places import Clients, World
from cutlayer.precision import Precision, check_precision, computing
from cutlayer.program import Program
from cutlayer.remote.kept import Statements
from cutlayer.remote.messages import Begin
from cutlayer.remote.office import Office, RoundId
from cutlayer.remote.peer import Apart, Peer, PeerLost
from cutlayer.remote.remote import Deserted, Remote
from cutlayer.remote.shadow import Shadow
from cutlayer.remote.shapes import Shapes
from cutlayer.remote.watch import Nobody, Watcher
from cutlayer.servers import Bridge, Fed, Server, Together
from cutlayer.state import State

log = logging.getLogger("cutlayer")

Ids = tuple[int, ...]
MOST_REFUSED = 3  # attempts at a round in which everybody is lost and some were refused


@dataclass(kw_only=True)
class Deployment:
    """Runs rounds with the clients that are present.

    All it remembers between rounds is what its clients keep, and the ledger.
    """

    method: Method
    office: Office
    sample: Arrays  # a few samples: what everybody's look like
    batching: Batching = Batching()
    per_round: int | None = None
    seed: int = 0
    device: str = "cpu"  # that this server computes on
    precision: Precision = "fp32"  # that its layers compute in
    deadline: float = 60.0  # seconds that a server waits for an answer
    patience: float = 24 * 3600.0  # seconds that a fed server of its own waits for a round to begin
    gather: Callable[[int], Ids]  # waits until a round can begin: the clients that are present
    on_begin: Callable[[int, Ids], None] = lambda round, ids: None  # told of each attempt
    watcher: Watcher = field(default_factory=Nobody)
    peer: Peer | None = None  # the other server, if it is a process of its own
    meters: tuple[Meter, ...] = ()

    def __post_init__(self) -> None:
        check_precision(self.precision, self.method.model.model)
        self.program = Program(self.method)
        self.shadow = Shadow(self.program, self.sample)
        self.ledger = Ledger()
        self.memory = Statements()
        self._shapes = Shapes()

    @property
    def num_classes(self) -> int | None:
        return self.sample.num_classes

    @property
    def engine_name(self) -> str:
        return "grpc"

    @property
    def clock(self) -> None:
        """Real devices take real time."""

    def names(self) -> dict[int, str]:
        return {j: line.name for j, line in self.office.lines().items()}

    def samples_of(self, client: int) -> Arrays:
        raise ConfigError(f"the samples of client {client} stay with it")

    def start(self) -> State:
        """The state before the first round."""
        bridge = self._bridge(token=0)
        return self.method.start(Server(Loop(), bridge=bridge), Fed(Loop(), bridge=bridge))

    def round(self, state: State) -> State:
        """The state after one more round; one in which every client is lost did not happen, and is tried again."""
        refused = 0
        while True:
            kept, ledger = self.memory.fork(), self.ledger.content()
            try:
                after = self._attempt(state, kept)
            except (Deserted, TooFew) as error:
                refused += bool(getattr(error, "refusal", ""))
                if refused == MOST_REFUSED:  # it would be so for ever
                    raise ConfigError(
                        f"{error}, {refused} times; what they sent could not be used: {error.refusal}. Look at the "  # type: ignore[union-attr]
                        "data and the learning rate; the rounds before are saved"
                    ) from None
                log.warning("%s; it is tried again", error)
                self.ledger.restore(ledger)
                self._dismiss_all()
                continue
            self.memory = kept
            return after

    @torch.no_grad()
    def _attempt(self, state: State, kept: Statements) -> State:
        key = keys.fold(self.seed, "round", state.round)
        round_, samples = self._begun(state.round, key, kept)
        ids = tuple(samples)
        self.on_begin(state.round, ids)
        index = {j: range(num) for j, num in samples.items()}  # which of them are drawn is the clients' business

        def walk(sizes: Mapping[int, int]) -> Walk:
            return Walk(self.batching, index, key, sizes)

        remote = Remote(
            office=self.office,
            program=self.program,
            shadow=self.shadow,
            kept=kept,
            round=round_,
            ids=ids,
            deadline=self.deadline,
            num_classes=self.sample.num_classes,
            device=self.device,
            watcher=self.watcher,
            peer=self.peer,
        )
        meters = (self.ledger, *self.meters)
        world = World(
            program=self.program,
            reach=remote,
            walk=walk,
            sizes={j: float(num) for j, num in samples.items()},
            key=key,
            meters=meters,
        )
        bridge = self._bridge(round_.token)
        server = Server(self._engine("server"), meters, bridge=bridge)
        fed = Fed(self._engine("fed"), meters, bridge=bridge)
        with computing(self.precision):
            after = self.method.round(state, Clients(world, ids), server, fed)
        remote.finish()
        return after

    def _dismiss_all(self) -> None:
        """After a round that failed nobody knows who keeps what of it: all join again, and state it anew."""
        for line in self.office.lines().values():
            if line.noted:
                self.office.leave(line.client, line.session, "the round failed, and begins again")

    def _begun(self, number: int, key: int, kept: Statements) -> tuple[RoundId, dict[int, int]]:
        """This attempt at a round, and the clients that take part with their numbers of samples."""
        if self.peer is not None and not self.peer.commands:
            begin = self.peer.begin(self.patience)
            if begin.round != number:
                raise PeerLost(f"the training server is at round {begin.round + 1}, and this one at {number + 1}")
            kept.hold(begin.held)
            self.await_clients(tuple(begin.samples))
            return RoundId(number, key, begin.token), dict(begin.samples)
        present = self.gather(number)
        lines = {j: line for j, line in self.office.lines().items() if j in present}
        able = tuple(j for j, line in lines.items() if self.batching.per_epoch(line.samples, self.batching.size))
        samples = {j: lines[j].samples for j in uniform(able, min(self.per_round or len(able), len(able)), key)}
        round_ = RoundId.drawn(number, key)
        if self.peer is not None:
            for j in samples:
                if not lines[j].noted:
                    kept.joined(j, lines[j].kept)
                    lines[j].noted = True
            held = kept.held_by(tuple(samples))
            self.peer.tell(Begin(round=number, token=round_.token, samples=samples, held=held))
        return round_, samples

    def await_clients(self, ids: Ids) -> None:
        """A client joins the fed server before the training server; one that is gone again is lost to both."""
        end = time.monotonic() + self.deadline
        while not set(ids) <= self.office.lines().keys() and time.monotonic() < end:
            time.sleep(0.05)

    def _engine(self, place: Place) -> Engine:
        return Loop() if self.peer is None or self.peer.here == place else self._shapes

    def _bridge(self, token: int) -> Bridge:
        return Together() if self.peer is None else Apart(self.peer, token)
