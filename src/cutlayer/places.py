"""Three places and the verbs between them: everything a method can say.

Values live at the **clients** (data, lower layers), at the training **server** (activations, labels, upper layers) or
at the **fed** server (keeps and averages client-side models). `do` computes at the clients, `down` sends to them, and
`up` brings values from them; `up` is the only statement that waits.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from cutlayer import keys, tree
from cutlayer.batches import Walk
from cutlayer.calculus import check_pullback
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment
from cutlayer.engines.base import Engine
from cutlayer.errors import LawError
from cutlayer.kinds import SETTINGS, Kind, Parcel, Place, check_kind
from cutlayer.memory import Memories, Memory
from cutlayer.meters.base import Meter
from cutlayer.meters.clock import How, NoClock, Timer
from cutlayer.program import Program
from cutlayer.values import Block, Gives, Held, PerClient, at_once, common, shared, unzipped

Weights = Mapping[int, float]
Barrier = Literal["epoch", "step"] | None
Scalar = int | float


@dataclass(frozen=True, kw_only=True)
class World:
    """What a round runs in: the engine, the clients' program and data, and the meters that watch the verbs."""

    engine: Engine
    program: Program
    data: Arrays
    walk: Callable[[Mapping[int, int]], Walk]  # batch sizes that a method regulates -> this round's batches
    sizes: Weights  # samples of each client of the round
    key: int  # of this round
    memory: Memory  # what the clients keep between rounds
    meters: tuple[Meter, ...] = ()
    clock: Timer = NoClock()
    augment: Augment | None = None
    most_steps: int | None = None  # of each client, where a round is only tried


@dataclass(frozen=True, kw_only=True)
class Step:
    """One mini-batch of every client that still has one."""

    everyone: "Clients"  # the clients of the round
    active: "Clients"  # those that take this step
    staying: "Clients"  # those of them that have another one
    idle: Mapping[int, int]  # for each client of the round: steps since its last one, 0 while it is active
    sizes: Mapping[int, int]  # samples in each active client's batch
    x: PerClient
    y: PerClient
    key: PerClient  # randomness of this step, known at every place
    seed: PerClient  # the same as a tensor, to draw directions from
    own: PerClient  # another one that each client has to itself
    number: int
    ends_epoch: bool  # with a barrier per epoch: everyone has finished this one


class Clients:
    """The only door to the clients."""

    def __init__(self, world: World, ids: tuple[int, ...]) -> None:
        self._world, self.ids = world, ids

    @property
    def weights(self) -> dict[int, float]:
        """Each client's number of samples."""
        return {j: self._world.sizes[j] for j in self.ids}

    @property
    def key(self) -> int:
        """The key of this round."""
        return self._world.key

    @property
    def memory(self) -> Memories:
        """Values that stay at these clients between rounds, each with a version."""
        return Memories(self._world.memory, self.ids)

    @property
    def batch(self) -> int:
        """The run's batch size."""
        return self._world.walk({}).batching.size

    def only(self, ids: tuple[int, ...]) -> "Clients":
        strangers = [j for j in ids if j not in self._world.sizes]
        if strangers:
            raise LawError(f"client {strangers[0]} does not take part in this round")
        return self if ids == self.ids else Clients(self._world, ids)

    # -- time ---------------------------------------------------------------------------------------------------

    def steps(
        self, *, barrier: Barrier = None, sizes: Mapping[int, int] | None = None, count: int | None = None
    ) -> Iterator[Step]:
        """The mini-batches of a round; with a barrier, all end an epoch (or a step) before anyone starts the next.

        A method may regulate the clients' batch sizes, and take the same number of steps with all of them.
        """
        walk = self._world.walk(sizes or {})
        done = dict.fromkeys(self.ids, 0)
        last = dict.fromkeys(self.ids, -1)
        number = 0
        for stretch in self._stretches(walk, barrier == "epoch", count):
            left = dict(stretch)
            while active := tuple(j for j in self.ids if left[j]):
                for j in active:
                    left[j] -= 1
                    last[j] = number
                ends_epoch = barrier == "epoch" and not any(left.values())
                yield self._step(walk, active, left, last, done, number, ends_epoch)
                if ends_epoch or barrier == "step":
                    self._world.clock.wait(self.ids)
                for j in active:
                    done[j] += 1
                number += 1

    def _stretches(self, walk: Walk, by_epoch: bool, count: int | None) -> list[dict[int, int]]:
        """Steps of each client between barriers; a client without a batch takes none."""
        total = {j: walk.per_round(j, count) for j in self.ids}
        if self._world.most_steps is not None:
            total = {j: min(steps, self._world.most_steps) for j, steps in total.items()}
        if not by_epoch:
            return [total]
        epoch = {j: walk.per_epoch(j) for j in self.ids}
        longest = max((-(-total[j] // epoch[j]) for j in self.ids if epoch[j]), default=0)
        return [{j: min(epoch[j], max(0, total[j] - e * epoch[j])) for j in self.ids} for e in range(longest)]

    def _step(
        self,
        walk: Walk,
        active: tuple[int, ...],
        left: Mapping[int, int],
        last: Mapping[int, int],
        done: Mapping[int, int],
        number: int,
        ends_epoch: bool,
    ) -> Step:
        world = self._world
        samples = {j: walk.samples(j, done[j]) for j in active}
        sizes = {j: len(i) for j, i in samples.items()}
        for meter in world.meters:
            meter.stepped(sizes)
        x, y = world.engine.load(world.data, samples)
        step_keys = {j: keys.fold(world.key, "step", number, j) for j in active}
        return Step(
            everyone=self,
            active=self.only(active),
            staying=self.only(tuple(j for j in active if left[j])),
            idle={j: number - last[j] for j in self.ids},
            sizes=sizes,
            x=x if world.augment is None else _augmented(x, world.augment, step_keys),
            y=_giving(y, world.program.labels),
            key=world.engine.keys(step_keys),
            seed=world.engine.seeds(step_keys),
            own=_at_clients(world.engine.seeds({j: keys.fold(world.key, "own", number, j) for j in active})),
            number=number,
            ends_epoch=ends_epoch,
        )

    # -- the verbs ----------------------------------------------------------------------------------------------

    def do(self, fn: Callable[..., Any] | PerClient, *values: PerClient) -> Any:
        """Run a function that the method declares, or a pullback, at the clients."""
        self._check_arguments(fn, values)
        if isinstance(fn, PerClient):
            ids = common((fn, *values), self.ids)
            pulled = self._world.engine.pull(fn[self.only(ids)], *(v[self.only(ids)] for v in values))
            return PerClient("clients", pulled, ids, ready=self._world.clock.pulled(fn, values[0], ids))
        return self._run("call", self._world.engine.call, fn, values)

    def vjp(self, fn: Callable[..., Any], part: PerClient, *values: PerClient) -> tuple[PerClient, PerClient]:
        """Run fn(part, *values) -> (out, buffers); give the output and the pullback, which stays at the client."""
        self._check_arguments(fn, (part, *values))
        out, pull = self._run("vjp", self._world.engine.vjp, fn, (part, *values), cut=None)
        gives = self._world.program.gives(fn)
        return _giving(out, gives if isinstance(gives, Kind) else None), pull

    def grad(self, fn: Callable[..., Any], part: PerClient, *values: PerClient, cut: int | None = None) -> PerClient:
        """Gradients of a loss fn(part, *values) -> (loss, buffers); also with respect to argument `cut`, if given."""
        self._check_arguments(fn, (part, *values))
        grads: PerClient = self._run("grad", self._world.engine.grad, fn, (part, *values), cut=cut)
        gives = self._world.program.gives(fn)
        return _giving(grads, gives if isinstance(gives, Mapping) else None)

    def down(self, kind: Kind, value: Held | PerClient | float) -> PerClient:
        """Send a value from the kind's home to these clients: one for all, or each client's own."""
        check_kind(kind)
        sent = self._addressed(kind, value)
        for meter in self._world.meters:
            meter.crossed(kind, "down", sent)
        return PerClient("clients", sent.blocks, sent.ids, ready=self._world.clock.moved(kind, "down", sent))

    def up(self, *parcels: Parcel) -> Any:
        """Bring values to the one home of their kinds. This waits for the clients; some may not answer."""
        home = self._home(parcels)
        ids = common([p.value for p in parcels], self.ids)
        brought = [self._brought(home, kind, value[self.only(ids)]) for kind, value in parcels]
        for meter in self._world.meters:
            for (kind, _), value in zip(parcels, brought, strict=True):
                meter.crossed(kind, "up", value)
            meter.waited(ids)
        return brought[0] if len(brought) == 1 else tuple(brought)

    def together(self, *values: PerClient) -> tuple[PerClient, ...]:
        """The same values, at the clients or at a server, once the last of them all is there: nobody goes ahead."""
        return at_once(values, max(self._world.clock.last(v) for v in values))

    # -- the laws -----------------------------------------------------------------------------------------------

    def _run(
        self, how: How, engine_verb: Callable[..., Any], fn: Any, values: tuple[PerClient, ...], **options: Any
    ) -> Any:
        """What the function made; where that is several values, none of them may leave."""
        ids = common(values, self.ids)
        blocks = engine_verb(fn, values, ids, **options)
        made = PerClient("clients", blocks, ids, ready=self._world.clock.worked(how, fn, values, ids, blocks))
        several = unzipped(made)
        return several if several is not made else _giving(made, self._world.program.gives(fn))

    def _check_arguments(self, fn: Any, values: tuple[Any, ...]) -> None:
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

    def _brought(self, home: Place, kind: Kind, value: PerClient) -> PerClient:
        for block in value.blocks:
            self._world.program.release(kind, block.gives, block.ids[0])
        ready = self._world.clock.moved(kind, "up", value)
        return PerClient(home, _giving(value, None).blocks, value.ids, kind, ready)


def _giving(value: PerClient, gives: Gives) -> PerClient:
    """The value with leave to be sent up as this."""
    return PerClient(value.place, [b._replace(gives=gives) for b in value.blocks], value.ids, ready=value.ready)


def _at_clients(value: PerClient) -> PerClient:
    """The value where no server can read it."""
    return PerClient("clients", value.blocks, value.ids)


def _augmented(x: PerClient, augment: Augment, step_keys: Mapping[int, int]) -> PerClient:
    """Each client's images changed by its own key, whoever else is stacked with it."""

    def changed(block: Block) -> Block:
        stack = block.tree if block.stacked else block.tree[None]
        new = augment(stack, [step_keys[j] for j in block.ids])
        return block._replace(tree=new if block.stacked else new[0])

    return PerClient(x.place, [changed(b) for b in x.blocks], x.ids)
