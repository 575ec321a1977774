"""How a round reaches its clients: in this process (`engines.local`), or elsewhere behind handles (`remote`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cutlayer.core.batches import Walk
from cutlayer.core.engine import Computes, Ids
from cutlayer.core.kinds import Kind, Parcel
from cutlayer.core.memory import Recall
from cutlayer.core.values import Block, PerClient

Augmentation = Callable[[Any, Sequence[int]], Any]  # (stacked inputs, a key for each client) -> inputs


class Brought(NamedTuple):
    """The result of an `up`: the clients that answered, and for each parcel their values."""

    ids: Ids
    values: list[list[Block]]


class Transport(Computes, Protocol):
    """Runs functions at the clients of one round, and moves values to and from them."""

    def alive(self, ids: Ids) -> Ids:
        """Return the clients that are still connected."""

    def load(
        self, walk: Walk, steps: Mapping[int, int], number: int, step_keys: Mapping[int, int]
    ) -> tuple[PerClient, PerClient]:
        """Load the inputs and labels of each client's own step, at the client, in step `number` of the round."""

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        """Return, for this step of the round, a seed that only the client knows."""

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        """Send the value, and return it at the clients."""

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        """Return the parcels of the clients that answer."""

    def memory(self, ids: Ids) -> Recall:
        """Return what these clients keep between rounds."""
