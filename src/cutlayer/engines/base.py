"""What an engine does for the places: load batches, call functions and differentiate them, client by client."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from cutlayer.batches import Index
from cutlayer.data.arrays import Arrays
from cutlayer.sums import Weights, weighted_sum
from cutlayer.tree import Tree
from cutlayer.values import Block, PerClient

Fn = Callable[..., Any]
Ids = tuple[int, ...]


class AtOnce:
    """What engines have in common whose values are there as soon as they are asked for."""

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        return fn(*values)

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        return weighted_sum(rows, weights, largest_integers)

    def real(self, value: Tree) -> Tree:
        return value


class Engine(Protocol):
    """Runs functions once per client. How the values of many clients sit in memory is its own business."""

    name: str

    def load(self, data: Arrays, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        """Each client's samples: inputs and labels, at the client."""
        ...

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Each client's key of a step, known at every place."""
        ...

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        """The same as int64 tensors."""
        ...

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """fn(*values) of each client."""
        ...

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """(output, pullback) of fn(*values) -> (output, buffers) of each client."""
        ...

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Gradients of fn(*values) -> (loss, buffers) of each client."""
        ...

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Each client's pullback of its gradient."""
        ...

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        """fn(*values), of values that a server holds."""
        ...

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        """The sum of each client's values times its weight; integers as numbers, or their maximum."""
        ...

    def real(self, value: Tree) -> Tree:
        """The value computed, where the engine only has a handle to it."""
        ...
