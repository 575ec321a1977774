"""Three places and the verbs between them: all that a method is written in.

Values live at the **clients** (data, lower layers), at the training **server** (activations, labels, upper layers) or
at the **fed** server (keeps and averages client-side models). `do` computes at the clients, `down` sends to them, and
`up` brings values from them; `up` is the only statement that waits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, overload

from torch import Tensor

from cutlayer.core import keys, tree
from cutlayer.core.batches import Walk
from cutlayer.core.calculus import Pull, check_pullback
from cutlayer.core.crossing import NO_CODECS, Seam
from cutlayer.core.engine import Fn
from cutlayer.core.guard import GUARDED, AllDropped, Guard
from cutlayer.core.kinds import MODEL, SETTINGS, Kind, Parcel, Place, check_kind
from cutlayer.core.memory import Recall
from cutlayer.core.meter import Direction, How, Meter, Ready, Timer
from cutlayer.core.program import Program
from cutlayer.core.servers import Keeper
from cutlayer.core.state import Grads, Tensors
from cutlayer.core.sums import Weights
from cutlayer.core.transport import Transport
from cutlayer.core.tree import T
from cutlayer.core.values import Block, Gives, Held, OfTuple, PerClient, Raw, Seed, at_once, common, pair, shared
from cutlayer.errors import LawError

Barrier = Literal["epoch", "step"] | None
Scalar = int | float
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class World:
    """The context of a round: the clients' program, the transport to them, and the meters."""

    program: Program
    transport: Transport
    walk: Callable[[Mapping[int, int]], Walk]  # batch sizes that the method sets -> the batches of this round
    sizes: Weights  # number of samples of each client of the round
    key: int  # of this round
    meters: tuple[Meter, ...] = ()
    clock: Timer = Timer()
    seam: Seam = NO_CODECS  # applies the codecs; a device does so when its server asks for it
    servers: Mapping[Place, Keeper] = field(default_factory=dict)  # that check what comes up
    guard: Guard | None = None
    missing: set[int] = field(default_factory=set)  # clients that did not answer an `up`
    spent: set[tuple[int, int]] = field(default_factory=set)  # by client and number: seeds that codecs have drawn with


@dataclass(frozen=True, kw_only=True)
class Step:
    """One mini-batch of every client that has one left. A client that disconnects during a step has not taken it."""

    everyone: "Clients"  # the clients of the round
    active: "Clients"  # those that take this step
    last: Mapping[int, int]  # by client that has taken a step: the number of its last one before this
    left: Mapping[int, int]  # by active client: steps left after this one
    sizes: Mapping[int, int]  # by active client: samples in its batch
    x: PerClient
    y: PerClient[Tensor]
    key: PerClient[Tensor]  # of this step, known at every place, for random layers and random directions
    own: PerClient[Tensor]  # a seed that only the client knows
    number: int
    by_epoch: bool  # whether all clients finish an epoch before any starts the next

    @property
    def staying(self) -> "Clients":
        """The active clients that have another step."""
        return self.active.only(tuple(j for j in self.active.alive if self.left[j]))

    @property
    def idle(self) -> dict[int, int]:
        """By client that has taken a step: how many steps ago its last one was; 0 for an active client."""
        last = {**self.last, **dict.fromkeys(self.active.ids, self.number)}
        return {j: self.number - last[j] for j in sorted(last)}

    @property
    def ends_epoch(self) -> bool:
        """Whether all clients have finished an epoch at which they wait for each other."""
        return self.by_epoch and not self.staying.ids


class Clients:
    """The clients of a round, or some of them; a method reaches them only through these verbs."""

    def __init__(self, world: World, ids: tuple[int, ...]) -> None:
        self._world, self._ids = world, ids

    @property
    def ids(self) -> tuple[int, ...]:
        """The numbers of the clients, without those that did not answer."""
        missing = self._world.missing
        return tuple(j for j in self._ids if j not in missing) if missing else self._ids

    @property
    def alive(self) -> tuple[int, ...]:
        """The clients that are still connected."""
        return self._world.transport.alive(self.ids)

    @property
    def weights(self) -> dict[int, float]:
        """By client: its number of samples."""
        return {j: self._world.sizes[j] for j in self.ids}

    @property
    def key(self) -> int:
        """The key of this round."""
        return self._world.key

    @property
    def memory(self) -> Recall:
        """The values that these clients keep between rounds, each with a version."""
        return self._world.transport.memory(self.ids)

    @property
    def batch(self) -> int:
        """The run's batch size."""
        return self._world.walk({}).batching.size

    def only(self, ids: tuple[int, ...]) -> "Clients":
        """Return these clients of the round."""
        strangers = [j for j in ids if j not in self._world.sizes]
        if strangers:
            raise LawError(f"client {strangers[0]} does not take part in this round")
        return self if ids == self.ids else Clients(self._world, ids)

    # -- time ---------------------------------------------------------------------------------------------------

    def steps(
        self, *, barrier: Barrier = None, sizes: Mapping[int, int] | None = None, count: int | None = None
    ) -> Iterator[Step]:
        """Yield the mini-batches of a round; at a barrier, all clients finish an epoch or step before the next.

        A method may set batch sizes by client, and a number of steps that is the same for all. A client that
        disconnects has finished early.
        """
        world = self._world
        walk = world.walk(sizes or {})
        done = dict.fromkeys(self.ids, 0)
        last: dict[int, int] = {}
        number = 0
        for stretch in self._stretches(walk, barrier == "epoch", count):
            left = dict(stretch)
            while active := tuple(j for j in self.alive if left.get(j)):
                left = {j: left[j] - 1 for j in active}
                lengths = {j: walk.length(j, done[j]) for j in active}
                for meter in world.meters:
                    meter.stepped(lengths)
                step_keys = {j: keys.of_step(world.key, number, j) for j in active}
                x, y = self.load(walk, {j: done[j] for j in active}, number, step_keys)
                step = Step(
                    everyone=self,
                    active=self.only(active),
                    last=last,
                    left=left,
                    sizes=lengths,
                    x=x,
                    y=y,
                    key=world.transport.keys(step_keys),
                    own=world.transport.own_seeds(number, active),
                    number=number,
                    by_epoch=barrier == "epoch",
                )
                yield step
                if step.ends_epoch or barrier == "step":
                    world.clock.wait(self.ids)
                last = {**last, **dict.fromkeys(step.active.ids, number)}
                for j in active:
                    done[j] += 1
                number += 1

    def _stretches(self, walk: Walk, by_epoch: bool, count: int | None) -> list[dict[int, int]]:
        """Return the steps of each client between barriers; a client without a batch takes none."""
        total = {j: walk.per_round(j, count) for j in self.ids}
        if not by_epoch:
            return [total]
        epoch = {j: walk.per_epoch(j) for j in self.ids}
        longest = max((-(-total[j] // epoch[j]) for j in self.ids if epoch[j]), default=0)
        return [{j: min(epoch[j], max(0, total[j] - e * epoch[j])) for j in self.ids} for e in range(longest)]

    def load(
        self, walk: Walk, steps: Mapping[int, int], number: int, step_keys: Mapping[int, int]
    ) -> tuple[PerClient, PerClient]:
        """Load each client's own mini-batch in step `number` of the round; mark labels if they may go up."""
        x, y = self._world.transport.load(walk, steps, number, step_keys)
        return _marked(x, raw="x"), _marked(y, gives=self._world.program.labels, raw="y")

    def own_seeds(self, number: int) -> PerClient[Tensor]:
        """Return a seed of this number in the round that only the client knows."""
        return _marked(self._world.transport.own_seeds(number, self.ids), gives=Seed(number))

    # -- the verbs ----------------------------------------------------------------------------------------------

    def do(self, fn: Callable[..., R] | PerClient[Callable[..., R]], *values: PerClient) -> PerClient[R]:
        """Run a function that the method declares, or a pullback, at the clients."""
        self._check_arguments(fn, values)
        if isinstance(fn, PerClient):
            ids = common((fn, *values), self.ids)
            pulled = self._world.transport.pull(fn[self.only(ids)], *(v[self.only(ids)] for v in values))
            return PerClient("clients", pulled, ids, ready=self._world.clock.pulled(fn, values[0], ids))
        program = self._world.program
        program.check_coding(fn, values, self._world.spent)
        made = self._run("call", self._world.transport.call, fn, values)
        gives: Gives | OfTuple = program.gives(fn)
        if any(type(b.tree) is tuple for b in made.blocks):  # a kind names one value, not several
            gives = OfTuple(gives) if isinstance(gives, Kind) else None
        return _marked(made, gives=gives, raw=program.passes(fn))

    def vjp(
        self, fn: Callable[..., tuple[R, Tensors]], part: PerClient, *values: PerClient
    ) -> tuple[PerClient[R], PerClient[Pull]]:
        """Run fn(part, *values) -> (out, buffers); return the output and the pullback, which stays at the client."""
        self._check_arguments(fn, (part, *values))
        self._world.program.check_differentiable(fn)
        out, pull = pair(self._run("vjp", self._world.transport.vjp, fn, (part, *values), cut=None))
        gives = self._world.program.gives(fn)
        return _marked(out, gives=gives if isinstance(gives, Kind) else None), pull

    def grad(
        self, fn: Callable[..., tuple[Tensor, Tensors]], part: PerClient, *values: PerClient, cut: int | None = None
    ) -> PerClient[Grads]:
        """Return the gradients of fn(part, *values) -> (loss, buffers), also for argument number `cut`, if given."""
        self._check_arguments(fn, (part, *values))
        self._world.program.check_differentiable(fn)
        grads = self._run("grad", self._world.transport.grad, fn, (part, *values), cut=cut)
        gives = self._world.program.gives(fn)
        return _marked(grads, gives=gives if isinstance(gives, Mapping) else None)

    def down(self, kind: Kind, value: Held[T] | PerClient[T] | float) -> PerClient[T]:
        """Send a value from the kind's home to these clients: one for all, or each client's own."""
        check_kind(kind)
        sent = self._addressed(kind, value)
        if self._world.guard is not None and kind is MODEL:
            self._world.servers[sent.place].began(sent)
        leaving = self._world.seam.encoded_down(kind, sent)
        ready = self._cross(kind, "down", leaving)
        there = PerClient("clients", self._world.transport.down(kind, leaving), leaving.ids, ready=ready)
        return self._world.seam.decoded_down(self, kind, there, leaving)

    @overload
    def up(self, parcel: Parcel[T], /) -> PerClient[T]: ...
    @overload
    def up(self, first: Parcel[T], second: Parcel[R], /) -> tuple[PerClient[T], PerClient[R]]: ...
    @overload
    def up(self, first: Parcel, second: Parcel, third: Parcel, /, *more: Parcel) -> tuple[PerClient, ...]: ...
    def up(self, *parcels: Parcel) -> Any:
        """Bring values to the home of their kinds. This waits for the clients; some may not answer."""
        home = self._home(parcels)
        asked = common([p.value for p in parcels], self.ids)
        who = self.only(asked)
        leaving = [self._world.seam.encoded_up(who, kind, value[who]) for kind, value in parcels]
        for sent in leaving:
            for block in sent.value.blocks:
                self._world.program.release(sent.kind, block.gives, block.ids[0])
        ids, values = self._world.transport.up([Parcel(sent.kind, sent.value) for sent in leaving], asked)
        self._world.missing.update(j for j in asked if j not in ids)
        brought = []
        for sent, blocks in zip(leaving, values, strict=True):
            plain = [b._replace(gives=None) for b in blocks]  # a value at a server needs no permission to leave
            arrived = PerClient(home, plain, ids, sent.kind, sent.value.ready)
            arrived.ready = self._cross(sent.kind, "up", arrived)
            brought.append(self._world.seam.decoded_up(sent, arrived))
        for meter in self._world.meters:
            meter.waited(ids)
        if self._world.guard is not None:
            brought = self._guarded(self._world.guard, brought)
        return brought[0] if len(brought) == 1 else tuple(brought)

    def _guarded(self, guard: Guard, brought: list[PerClient]) -> list[PerClient]:
        """Leave out the clients whose updates the guard drops, as if they had not answered."""
        kept = brought[0].ids
        for number, value in enumerate(brought):
            if value.kind in GUARDED:
                accepted = self._world.servers[value.place].accepted(f"{value.kind.name} {number}", value)
                kept = tuple(j for j in kept if j in accepted)
        guard.closing |= any(value.kind is MODEL for value in brought)
        if kept == brought[0].ids:
            return brought
        self._world.missing.update(set(brought[0].ids) - set(kept))
        if not self._world.sizes.keys() - self._world.missing:
            raise AllDropped(guard.dropped)
        return [value[self.only(kept)] for value in brought]

    def _cross(self, kind: Kind, direction: Direction, value: PerClient) -> Ready:
        """Count and time a value as it crosses. Every value that goes up or down passes here, under its kind."""
        for meter in self._world.meters:
            meter.crossed(kind, direction, value)
        return self._world.clock.moved(kind, direction, value)

    def together(self, *values: PerClient) -> tuple[PerClient, ...]:
        """Return the same values, all available when the last of them is: no client goes ahead."""
        return at_once(values, max(self._world.clock.last(v) for v in values))

    # -- the laws -----------------------------------------------------------------------------------------------

    def _run(
        self, how: How, verb: Callable[..., list[Block]], fn: Fn, values: tuple[PerClient, ...], **options: int | None
    ) -> PerClient:
        """Run a verb at the clients that have all arguments; the result may not be sent up yet."""
        ids = common(values, self.ids)
        blocks = verb(fn, values, ids, **options)
        return PerClient("clients", blocks, ids, ready=self._world.clock.worked(how, fn, values, ids, blocks))

    def _check_arguments(self, fn: Fn | PerClient, values: tuple[PerClient, ...]) -> None:
        name = "a pullback" if isinstance(fn, PerClient) else self._world.program.address(fn)
        if isinstance(fn, PerClient):
            check_pullback(fn)
            if fn.place != "clients":
                raise LawError(f"this pullback is at the {fn.place}; clients run only their own")
        for k, value in enumerate(values):
            if not isinstance(value, PerClient):
                raise LawError(
                    f"argument {k + 1} of {name} is a plain {type(value).__name__}, which would reach the clients "
                    f"uncounted; send it with `down` and pass what that returns"
                )
            if value.place not in ("clients", "anywhere"):
                raise LawError(f"argument {k + 1} of {name} is at the {value.place}; send it with `down` first")
            for block in value.blocks:
                if not isinstance(fn, PerClient):
                    self._world.program.check_raw(fn, k, block.raw)
                elif block.raw is not None:
                    raise LawError("a pullback takes the gradient of its output, and no client's own data")

    def _addressed(self, kind: Kind, value: Held | PerClient | float) -> PerClient:
        if isinstance(value, Scalar):
            if kind is not SETTINGS:
                raise LawError(f"a plain number travels as {SETTINGS.name}, not as {kind.name}")
            return shared("clients", self.ids, value)
        if kind.home is not None and value.place != kind.home:
            raise LawError(
                f"what goes down as {kind.name} is at the {kind.home}, but this value is at the {value.place}"
            )
        for leaf in tree.leaves(tuple(b.tree for b in value.blocks) if isinstance(value, PerClient) else value.tree):
            if not isinstance(leaf, Tensor | Scalar):
                raise LawError(f"only tensors and numbers go down to clients; this is a {type(leaf).__name__}")
        if isinstance(value, PerClient):
            return value[self]
        return shared(value.place, self.ids, value.tree, value.ready)

    def _home(self, parcels: tuple[Parcel, ...]) -> Place:
        homes: set[Place] = set()
        for kind, value in parcels:
            check_kind(kind)
            if kind.home is None:
                raise LawError(f"nothing goes up as {kind.name}: it has no home at either server")
            if value.place != "clients":
                raise LawError(f"what goes up as {kind.name} is at the clients, but this value is at the {value.place}")
            homes.add(kind.home)
        if len(homes) != 1:
            names = ", ".join(p.kind.name for p in parcels)
            raise LawError(f"one `up` goes to one server, but {names} belong to {' and '.join(sorted(homes))}")
        return homes.pop()


def _marked(value: PerClient, *, gives: Gives | OfTuple = None, raw: Raw | None = None) -> PerClient:
    """Return the value with the kind that it may be sent up as, and marked as raw data if it is."""
    blocks = [b._replace(gives=gives, raw=raw) for b in value.blocks]
    return PerClient(value.place, blocks, value.ids, ready=value.ready)
