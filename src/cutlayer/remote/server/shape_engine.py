"""The engine of a server that is not here: both servers run the same program, and of the other's values only the shapes
are known, so that each function runs once for all clients and steps whose values have the same shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cutlayer.core import calculus
from cutlayer.core.batches import Index, Samples
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.state import Grads
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient
from cutlayer.engines.base import AtOnce
from cutlayer.engines.loop import Loop
from cutlayer.meters.clock import identity
from cutlayer.remote.server.shape_runner import signature


class ShapeEngine(AtOnce):
    """A block per client, on tensors without content."""

    name = "shapes"

    def __init__(self) -> None:
        self._known: dict[Any, Tree] = {}
        self._loop = Loop()

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        raise NotImplementedError("no server loads data")

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return self._loop.keys(keys)

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        return self._loop.seeds(keys)

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        return self._each("call", fn, values, ids, lambda own: fn(*own))

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        def made(own: list[Any]) -> tuple[Tensor, Callable[[Tensor], Grads]]:
            out, pull = calculus.vjp(fn, own, cut)
            return out, _Once(pull)

        blocks = self._each(("vjp", cut), fn, values, ids, made)
        return [b._replace(tree=(b.tree[0], calculus.Pullback(b.tree[1], b.ids))) for b in blocks]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return self._each(("grad", cut), fn, values, ids, lambda own: calculus.gradient(fn, own, cut))

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return [Block((j,), pullbacks.at(j).pull(gradient.at(j)), stacked=False) for j in pullbacks.ids]

    def _each(
        self, how: Any, fn: Fn, values: Sequence[PerClient], ids: Ids, run: Callable[[list[Any]], Tree]
    ) -> list[Block]:
        made = []
        for j in ids:
            own = [v.at(j) for v in values]
            key = (how, identity(fn), tuple(signature(a) for a in own))
            if key not in self._known:
                self._known[key] = run(own)
            made.append(Block((j,), self._known[key], stacked=False))
        return made


class _Once:
    """A pullback whose result is remembered: all gradients of its output have one shape."""

    def __init__(self, pull: Callable[[Tensor], Grads]) -> None:
        self._pull, self._result = pull, None

    def __call__(self, gradient: Tensor) -> Grads:
        if self._result is None:
            self._result = self._pull(gradient)  # type: ignore[assignment]
        return self._result  # type: ignore[return-value]
