"""What engines share that compute a value as soon as it is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from cutlayer.core.engine import Engine, Fn
from cutlayer.core.sums import Weights, weighted_sum
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient


class AtOnce:
    """What engines have in common whose values are there as soon as they are asked for."""

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        return fn(*values)

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        return weighted_sum(rows, weights, largest_integers)

    def real(self, value: Tree) -> Tree:
        return value

    def arrange(self, rows: Mapping[int, Tree]) -> list[Block]:
        return one_by_one(rows)

    def forget(self) -> None:
        pass

    def recover(self, error: BaseException, attempt: int) -> Engine:
        raise error


def one_by_one(rows: Mapping[int, Tree]) -> list[Block]:
    """A block per client."""
    return [Block((j,), value, stacked=False) for j, value in rows.items()]
