"""How a round reaches its clients: in this process (`engines.local`), or elsewhere behind handles (`remote`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cutlayer.core.batches import Walk
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import Kind, Parcel
from cutlayer.core.memory import Recall
from cutlayer.core.values import Block, PerClient

Augmentation = Callable[[Tensor, Sequence[int]], Tensor]  # (stacked inputs, a key for each client) -> inputs


class Brought(NamedTuple):
    """The result of an `up`: the clients that answered, and for each parcel their values."""

    ids: Ids
    values: list[list[Block]]


class Transport(Protocol):
    """Carries out the verbs at the clients of one round."""

    def alive(self, ids: Ids) -> Ids:
        """Return the clients that are still connected."""

    def load(self, walk: Walk, steps: Mapping[int, int], step_keys: Mapping[int, int]) -> tuple[PerClient, PerClient]:
        """Load the inputs and labels of each client's own step of this number, at the client."""

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Return each client's key of a step, known at every place."""

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        """Return the same keys as int64 tensors."""

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        """Return, for this step of the round, a seed that only the client knows."""

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """Run fn(*values) at each client."""

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Return (output, pullback) of fn(*values) -> (output, buffers) at each client."""

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Return the gradients of fn(*values) -> (loss, buffers) at each client."""

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Run each client's pullback on its gradient."""

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        """Send the value, and return it at the clients."""

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        """Return the parcels of the clients that answer."""

    def memory(self, ids: Ids) -> Recall:
        """Return what these clients keep between rounds."""
