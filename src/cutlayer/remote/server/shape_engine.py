"""The engine for the server that is in another process.

Both servers run the same program. Of the other server's values only the shapes are known here, so a function runs once
for all clients and steps whose values have the same shapes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from cutlayer.core import calculus
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient
from cutlayer.engines.loop import Loop
from cutlayer.meters.clock import identity
from cutlayer.remote.server.shape_runner import signature


class ShapeEngine(Loop):
    """The loop engine on tensors without content."""

    name = "shapes"

    def __init__(self) -> None:
        self._known: dict[Any, Tree] = {}

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        return self._each("call", fn, values, ids, lambda own: fn(*own))

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        blocks = self._each(("vjp", cut), fn, values, ids, lambda own: calculus.vjp(fn, own, cut))
        return [b._replace(tree=(b.tree[0], calculus.Pullback(b.tree[1], b.ids))) for b in blocks]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return self._each(("grad", cut), fn, values, ids, lambda own: calculus.gradient(fn, own, cut))

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Run each pullback once: all gradients of its output have one shape."""
        pulls = {j: pullbacks.at(j).pull for j in pullbacks.ids}
        return [Block((j,), self._once(pull, pull, gradient.at(j)), stacked=False) for j, pull in pulls.items()]

    def _each(
        self, how: Any, fn: Fn, values: Sequence[PerClient], ids: Ids, run: Callable[[list[Any]], Tree]
    ) -> list[Block]:
        made = []
        for j in ids:
            own = [v.at(j) for v in values]
            key = (how, identity(fn), tuple(signature(a) for a in own))
            made.append(Block((j,), self._once(key, run, own), stacked=False))
        return made

    def _once(self, key: Any, run: Callable[..., Tree], *arguments: Any) -> Tree:
        if key not in self._known:
            self._known[key] = run(*arguments)
        return self._known[key]
