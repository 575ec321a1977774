"""How a round reaches its clients: all of them here, computed by an engine, or each somewhere else behind a handle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cutlayer import keys
from cutlayer.batches import Walk
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment
from cutlayer.engines.base import Engine, Fn, Ids
from cutlayer.kinds import Kind, Parcel
from cutlayer.memory import Keeps, Recall
from cutlayer.values import Block, PerClient


class Brought(NamedTuple):
    """What came of an `up`: who answered, and each parcel's values of them."""

    ids: Ids
    values: list[list[Block]]


class Reach(Protocol):
    """What the verbs do to the clients of one round."""

    def alive(self, ids: Ids) -> Ids:
        """Those that have not been lost."""
        ...

    def load(self, walk: Walk, steps: Mapping[int, int], step_keys: Mapping[int, int]) -> tuple[PerClient, PerClient]:
        """The inputs and labels of each client's own step of this number, at the client."""
        ...

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Each client's key of a step, known at every place."""
        ...

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        """The same as int64 tensors."""
        ...

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        """For this step of the round, a seed that each client has to itself."""
        ...

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """fn(*values) at each client."""
        ...

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """(output, pullback) of fn(*values) -> (output, buffers) at each client."""
        ...

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Gradients of fn(*values) -> (loss, buffers) at each client."""
        ...

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Each client's pullback of its gradient."""
        ...

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        """The value, at the clients."""
        ...

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        """The parcels of those clients that answer."""
        ...

    def memory(self, ids: Ids) -> Recall:
        """What these clients keep between rounds."""
        ...


@dataclass(frozen=True, kw_only=True)
class Here:
    """All clients in this process: nobody is ever lost, and what crosses stays where it is."""

    engine: Engine
    data: Arrays
    kept: Keeps
    key: int  # that the clients' own seeds are drawn from
    augment: Augment | None = None

    def alive(self, ids: Ids) -> Ids:
        return ids

    def load(self, walk: Walk, steps: Mapping[int, int], step_keys: Mapping[int, int]) -> tuple[PerClient, PerClient]:
        x, y = self.engine.load(self.data, {j: walk.samples(j, step) for j, step in steps.items()})
        return (x if self.augment is None else _augmented(x, self.augment, step_keys)), y

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return self.engine.keys(keys)

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        return self.engine.seeds(keys)

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        known = self.engine.seeds({j: keys.fold(self.key, "own", number, j) for j in ids})
        return PerClient("clients", known.blocks, known.ids)  # where no server can read them

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        return self.engine.call(fn, values, ids)

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return self.engine.vjp(fn, values, ids, cut=cut)

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return self.engine.grad(fn, values, ids, cut=cut)

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return self.engine.pull(pullbacks, gradient)

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        return value.blocks

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        return Brought(ids, [p.value.blocks for p in parcels])

    def memory(self, ids: Ids) -> Recall:
        return Remembering(self.kept.at(ids), self.engine)


@dataclass(frozen=True)
class Remembering:
    """What some clients keep; what they are to keep is computed first."""

    kept: Recall
    engine: Engine

    def versions(self, name: str) -> dict[int, int]:
        return self.kept.versions(name)

    def recall(self, name: str) -> PerClient:
        return self.kept.recall(name)

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        blocks = [b._replace(tree=self.engine.real(b.tree)) for b in value.blocks]
        there = PerClient(value.place, blocks, value.ids, value.kind, value.ready)
        return self.kept.keep(name, there, version)


def _augmented(x: PerClient, augment: Augment, step_keys: Mapping[int, int]) -> PerClient:
    """Each client's images changed by its own key, whoever else is stacked with it."""

    def changed(block: Block) -> Block:
        stack = block.tree if block.stacked else block.tree[None]
        new = augment(stack, [step_keys[j] for j in block.ids])
        return block._replace(tree=new if block.stacked else new[0])

    return PerClient(x.place, [changed(b) for b in x.blocks], x.ids)
