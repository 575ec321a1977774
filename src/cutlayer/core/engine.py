"""What an engine does for the places: load batches, call functions and differentiate them, client by client."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cutlayer.core.batches import Index, Samples
from cutlayer.core.sums import Weights
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient

Fn = Callable[..., Any]
Ids = tuple[int, ...]


class Engine(Protocol):
    """Runs functions once per client. How the values of many clients sit in memory is its own business."""

    name: str

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        """Each client's samples: inputs and labels, at the client."""

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Each client's key of a step, known at every place."""

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        """The same as int64 tensors."""

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """fn(*values) of each client."""

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """(output, pullback) of fn(*values) -> (output, buffers) of each client."""

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Gradients of fn(*values) -> (loss, buffers) of each client."""

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Each client's pullback of its gradient."""

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        """fn(*values), of values that a server holds."""

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        """The sum of each client's values times its weight; integers as numbers, or their maximum."""

    def real(self, value: Tree) -> Tree:
        """The value computed, where the engine only has a handle to it."""

    def arrange(self, rows: Mapping[int, Tree]) -> list[Block]:
        """Values that came from elsewhere, client by client, laid out as this engine computes them."""

    def forget(self) -> None:
        """Drop everything that still waits to be computed: the round failed."""

    def recover(self, error: BaseException, attempt: int) -> "Engine":
        """The engine to retry a round on whose attempt of this number failed; raises if no retry can help."""
