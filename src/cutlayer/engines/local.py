"""Clients in this process: an engine computes for them, none is ever lost, and values that cross stay in place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutlayer.core import keys, tree
from cutlayer.core.batches import Index, Samples, Walk
from cutlayer.core.engine import Engine, Ids
from cutlayer.core.kinds import Kind, Parcel
from cutlayer.core.memory import Keeps, Recall
from cutlayer.core.transport import Augmentation, Brought
from cutlayer.core.values import Block, PerClient


@dataclass(kw_only=True)
class Local:
    """All clients of a round, computed by one engine."""

    engine: Engine
    data: Samples
    kept: Keeps
    key: int  # from which the clients' own seeds are derived
    augment: Augmentation | None = None
    index: Sequence[Index] | None = None  # the samples of each client; None if all belong to the only client

    def __post_init__(self) -> None:
        engine = self.engine
        self.keys, self.call, self.vjp, self.grad, self.pull = (
            engine.keys,
            engine.call,
            engine.vjp,
            engine.grad,
            engine.pull,
        )

    def alive(self, ids: Ids) -> Ids:
        return ids

    def load(
        self, walk: Walk, steps: Mapping[int, int], number: int, step_keys: Mapping[int, int]
    ) -> tuple[PerClient, PerClient]:
        rows = {j: walk.samples(j, step) for j, step in steps.items()}
        if self.index is not None:
            rows = {j: self.index[j][places] for j, places in rows.items()}
        x, y = self.engine.load(self.data, rows)
        return (x if self.augment is None else _augmented(x, self.augment, step_keys)), y

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        known = self.keys({j: keys.fold(self.key, "own", number, j) for j in ids})
        return PerClient("clients", known.blocks, known.ids)  # where no server can read them

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        return value.blocks

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        return Brought(ids, [p.value.blocks for p in parcels])

    def memory(self, ids: Ids) -> Recall:
        return Remembering(self.kept.at(ids), self.engine)


@dataclass
class Remembering:
    """The values that some clients keep; the engine computes a value before it is kept."""

    kept: Recall
    engine: Engine

    def __post_init__(self) -> None:
        self.versions, self.recall = self.kept.versions, self.kept.recall

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        blocks = [b._replace(tree=self.engine.real(b.tree)) for b in value.blocks]
        there = PerClient(value.place, blocks, value.ids, value.kind, value.ready)
        return self.kept.keep(name, there, version)


def _augmented(x: PerClient, augment: Augmentation, step_keys: Mapping[int, int]) -> PerClient:
    """Augment each client's samples by its own key, whichever clients are stacked with it."""

    def changed(block: Block) -> Block:
        stack = block.tree if block.stacked else tree.map(lambda a: a[None], block.tree)
        new = augment(stack, [step_keys[j] for j in block.ids])
        return block._replace(tree=new if block.stacked else tree.map(lambda a: a[0], new))

    return PerClient(x.place, [changed(b) for b in x.blocks], x.ids)
