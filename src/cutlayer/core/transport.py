"""How a round reaches its clients: in this process (`engines.local`), or elsewhere behind handles (`remote`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from cutlayer.core.batches import Walk
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import Kind, Parcel
from cutlayer.core.memory import Recall
from cutlayer.core.values import Block, PerClient

Augmentation = Callable[[Tensor, Sequence[int]], Tensor]  # of the clients' stacked inputs, by a key for each client


class Brought(NamedTuple):
    """What came of an `up`: who answered, and each parcel's values of them."""

    ids: Ids
    values: list[list[Block]]


class Transport(Protocol):
    """What the verbs do to the clients of one round."""

    def alive(self, ids: Ids) -> Ids:
        """Those that have not been lost."""

    def load(self, walk: Walk, steps: Mapping[int, int], step_keys: Mapping[int, int]) -> tuple[PerClient, PerClient]:
        """The inputs and labels of each client's own step of this number, at the client."""

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Each client's key of a step, known at every place."""

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        """The same as int64 tensors."""

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        """For this step of the round, a seed that each client has to itself."""

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """fn(*values) at each client."""

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """(output, pullback) of fn(*values) -> (output, buffers) at each client."""

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Gradients of fn(*values) -> (loss, buffers) at each client."""

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Each client's pullback of its gradient."""

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        """The value, at the clients."""

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        """The parcels of those clients that answer."""

    def memory(self, ids: Ids) -> Recall:
        """What these clients keep between rounds."""
