"""The protocol of engines: they load batches, call functions and differentiate them for each client."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from cutlayer.core.batches import Index, Samples
from cutlayer.core.sums import Weights
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient

Fn = Callable[..., Any]
Ids = tuple[int, ...]


class Computes(Protocol):
    """Runs functions once per client: what engines and transports have in common."""

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Return each client's key of a step, known at every place, as an int64 tensor."""

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """Return fn(*values) of each client."""

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Return (output, pullback) of fn(*values) -> (output, buffers) for each client."""

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        """Return the gradients of fn(*values) -> (loss, buffers) for each client."""

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Run each client's pullback on its gradient."""


@runtime_checkable
class Engine(Computes, Protocol):
    """Runs functions in this process. The engine decides how the values of many clients are laid out in memory."""

    name: str

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        """Return each client's inputs and labels, at the client."""

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        """Return fn(*values) of values that a server holds."""

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        """Return the weighted sum over clients; integers are summed, too, or their maximum is taken."""

    def norms(self, rows: PerClient, start: PerClient | None) -> Tensor:
        """Return the norm of each row's change since the start, or of the row itself, in the order of the clients."""

    def real(self, value: Tree) -> Tree:
        """Return the computed value where the engine has only a handle to it."""

    def arrange(self, rows: Mapping[int, Tree]) -> list[Block]:
        """Lay out values that came from other processes as this engine computes them."""

    def forget(self) -> None:
        """Drop all pending computation after a failed round."""

    def recover(self, error: BaseException, attempt: int) -> "Engine":
        """Return the engine to retry a round on after this failed attempt; raise if a retry cannot help."""
