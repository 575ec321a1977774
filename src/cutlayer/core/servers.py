"""The two servers: the training server computes; the fed server keeps and averages models."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from cutlayer.core import calculus, tree
from cutlayer.core.calculus import Pull, check_pullback
from cutlayer.core.engine import Engine, Fn
from cutlayer.core.guard import AllDropped, Guard, Update, holds_models
from cutlayer.core.kinds import MODEL, SLOPES, STATISTICS, SYNC, Kind, Place
from cutlayer.core.meter import Meter, Timer
from cutlayer.core.state import Grads, Model, Tensors
from cutlayer.core.sums import Weights
from cutlayer.core.tree import T, Tree
from cutlayer.core.values import ALWAYS, NOBODY, Held, PerClient, Who, at_once, common, grouped, pair, shared
from cutlayer.errors import LawError

R = TypeVar("R")
AtServer = TypeVar("AtServer", bound=Held | PerClient)
Value = PerClient | Held | float  # what a server computes on
Differentiable = Callable[..., tuple[Tensor, Tensors]]  # -> (output, buffers)


class Bridge:
    """Connects the two servers. This one is for both in the same process and does nothing.

    If each server is a process, the other server's values are only shapes in this process.
    """

    def kept(self, place: Place, value: Tree) -> Tree:
        """Return a value that a place holds from now on."""
        return value

    def run(self, place: Place, fn: Fn, values: list[Tree]) -> Tree:
        """Return fn(*values), computed at this place."""
        return fn(*values)

    def crossed(self, origin: Place, values: list[Tree]) -> list[Tree]:
        """Send values from this place to the other server, and return them as they arrive."""
        return values

    def looked(self, place: Place, value: Tree) -> Tree:
        """Return a value of this place that steers the round, so that both servers continue alike."""
        return value


class Keeper:
    """What both servers can do: hold values, compute on them, and combine clients' rows."""

    place: Place

    def __init__(
        self,
        engine: Engine,
        meters: tuple[Meter, ...] = (),
        clock: Timer = Timer(),
        bridge: Bridge = Bridge(),
        guard: Guard | None = None,
    ) -> None:
        self._engine, self._meters, self._clock, self._bridge = engine, meters, clock, bridge
        self._guard = guard

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """Return these keys of the clients, as tensors."""
        return self._engine.keys(keys)

    def hold(self, value: T) -> Held[T]:
        """Hold a value here that belongs to no client, such as an initial model."""
        return Held(self.place, self._bridge.kept(self.place, value))

    def pick(self, rows: PerClient[T], j: int) -> Held[T]:
        """Return one client's row as a value of this server; it may not be sent to the other server."""
        return Held(self.place, self._own(rows).row(j), stays=True, ready=rows.ready.get(j, 0.0))

    def do(self, fn: Callable[..., R] | Held[Callable[..., R]], *values: Held | float) -> Held[R]:
        """Run fn, or a pullback that is held here, once, on values that are held here."""
        run = self._own(fn).tree if isinstance(fn, Held) else fn
        plain = [self._one(v) for v in values]
        out = self._bridge.run(self.place, lambda *given: self._engine.once(run, given), plain)
        ready = self._clock.done("call", run, plain, _ready((fn, *values)))
        return Held(self.place, out, _stay(values), ready)

    def mean(self, rows: PerClient[T], weights: Weights | None = None) -> Held[T]:
        """Return the weighted mean over clients; for integers (BatchNorm's counters) the maximum."""
        rows = self._guarded(self._own(rows))
        chosen = {j: 1.0 if weights is None else weights[j] for j in rows.ids}
        total = sum(chosen.values())
        if not total > 0:
            raise LawError("a mean over no clients; a round without clients must be skipped")
        return self._combined(rows, {j: w / total for j, w in chosen.items()}, largest_integers=True)

    def sum(self, rows: PerClient[T], weights: Weights | None = None) -> Held[T]:
        """Return the weighted sum over clients; integers and booleans count as numbers."""
        chosen = {j: 1.0 if weights is None else weights[j] for j in self._own(rows).ids}
        return self._combined(rows, chosen, largest_integers=False)

    def _guarded(self, rows: PerClient) -> PerClient:
        """Drop models that the guard drops, at the end of a round: at each step, the host would wait for them.

        What has come up under a kind was checked when it came.
        """
        guard = self._guard
        if guard is None or not guard.closing or rows.kind is not None or not holds_models(rows):
            return rows
        kept = self.accepted("mean", rows)
        if not kept:
            raise AllDropped(guard.dropped)
        return rows[Ids(kept)]

    def accepted(self, what: str, rows: PerClient) -> tuple[int, ...]:
        """Return the clients whose updates may be averaged; the other server learns who they are, and not why."""
        if self._guard is None or not rows.ids:
            return rows.ids
        start = self._guard.start_of(rows)
        norms = self._engine.norms(rows, start)
        if rows.kind is SLOPES:  # a method that averages slopes leaves out itself what is not finite, and counts it
            norms = norms.nan_to_num(nan=0.0, posinf=torch.inf)
        sizes = torch.zeros_like(norms) if start is None else self._engine.norms(start, None)
        fit = (0,) * len(rows.ids)  # if the other server has the values, it decides
        if not norms.is_meta:
            updates = [Update(*pair) for pair in torch.stack((norms, sizes), 1).tolist()]
            fit = self._guard.judged((self.place, what), dict(zip(rows.ids, updates, strict=True)))
        return self._guard.left(rows.ids, self._bridge.looked(self.place, fit))

    def began(self, rows: PerClient) -> None:
        """Note what clients begin the round with; the guard compares with it what becomes of it."""
        if self._guard is not None:
            self._guard.began(rows)

    def _combined(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Held:
        """Combine rows. A result of fewer than two clients, or of values that crossed the cut, must stay here."""
        few = sum(w != 0 for w in weights.values()) < 2
        from_the_cut = rows.kind is not None and rows.kind.home == "server"
        combined = self._engine.combine(rows, weights, largest_integers)
        return Held(self.place, combined, stays=few or from_the_cut, ready=self._clock.last(rows))

    def each(self, fn: Callable[..., R], *values: Value) -> PerClient[R]:
        """Run fn once per client; values that are not rows are the same for all."""
        rows, ids = self._rows(values)
        made = self._engine.call(fn, rows, ids)
        return PerClient(self.place, made, ids, ready=self._clock.served("call", fn, rows, ids, made))

    def rows(self, values: Mapping[int, Held[T]]) -> PerClient[T]:
        """Gather values that were computed one client at a time; the rows are available when the last of them is."""
        last = max((self._own(v).ready for v in values.values()), default=0.0)
        ready = dict.fromkeys(values, last) if last else ALWAYS
        return PerClient(self.place, grouped({j: v.tree for j, v in values.items()}), values, ready=ready)

    def copies(self, value: Held[T], who: Who) -> PerClient[T]:
        """Return a row of this value for each client; rows share memory until they differ."""
        rows = shared(self.place, who.ids, self._own(value).tree, value.ready)
        if isinstance(value.tree, Model):
            self.began(rows)
        return rows

    def look(self, value: Held[T]) -> T:
        """Return the value itself, to steer the round with; refuse one that may tell of a single client."""
        if self._own(value).stays:
            raise LawError("what steers a round must be an aggregate; this value may tell of a single client")
        seen: T = self._bridge.looked(self.place, self._engine.real(value.tree))
        return seen

    def send(self, kind: Kind, value: AtServer, to: "Keeper") -> AtServer:
        """Send an aggregate to the other server, or each client's layers or statistics to the home of their kind."""
        own = self._own(value)
        self._check_sending(kind, own, to)
        rows = shared(self.place, (NOBODY,), own.tree, own.ready) if isinstance(own, Held) else own
        for meter in self._meters:
            meter.sent(kind, self.place, to.place, rows)
        ready = self._clock.sent(kind, self.place, rows)
        arrived = self._bridge.crossed(self.place, [b.tree for b in rows.blocks])
        if isinstance(own, Held):
            return Held(to.place, arrived[0], ready=ready.get(NOBODY, 0.0))  # type: ignore[return-value]
        blocks = [b._replace(tree=there) for b, there in zip(own.blocks, arrived, strict=True)]
        return PerClient(to.place, blocks, own.ids, kind, ready)  # type: ignore[return-value]

    def _check_sending(self, kind: Kind, value: Held | PerClient, to: "Keeper") -> None:
        if isinstance(value, Held):
            if kind is not SYNC or value.stays:
                what = kind.name if kind is not SYNC else "a value that may tell of a single client"
                raise LawError(f"only aggregates go from server to server, as {SYNC.name}; this is {what}")
            return
        for block in value.blocks:
            models = kind is MODEL and isinstance(tree.bare(block.tree), Model)
            numbers = (
                kind is STATISTICS
                and value.kind is None
                and all(_is_number(a) for a in tree.leaves(block.row(block.ids[0])))
            )
            if kind.home != to.place or not (models or numbers):
                raise LawError(
                    f"single clients' values go from server to server only as {MODEL.name}, whole models, or as "
                    f"{STATISTICS.name}, lists of numbers, and only to the {MODEL.home} place; this goes to the "
                    f"{to.place} as {kind.name}"
                )

    def _one(self, value: Held | float) -> Tree:
        """Return the content of a value that is held here, or a plain number as it is."""
        if isinstance(value, PerClient):
            self._own(value)
            raise LawError(
                "`do` computes on one value, but this is a row for each client; use `each`, `mean`, `sum` or `concat`"
            )
        return self._own(value).tree if isinstance(value, Held) else value

    def _rows(self, values: tuple[Value, ...]) -> tuple[list[PerClient], tuple[int, ...]]:
        rows = [self._own(v) for v in values if isinstance(v, PerClient)]
        ids = common(rows, rows[0].ids)
        return [v if isinstance(v, PerClient) else self._spread(v, ids) for v in values], ids

    def _spread(self, value: Held | float, ids: tuple[int, ...]) -> PerClient:
        if isinstance(value, Held):
            return shared(self.place, ids, self._own(value).tree, value.ready)
        return shared(self.place, ids, value)

    def _own(self, value: AtServer) -> AtServer:
        if value.place not in (self.place, "anywhere"):
            raise LawError(f"the {self.place} place was given a value that is at the {value.place}")
        return value


class Fed(Keeper):
    """The fed server: keeps and averages client-side models."""

    place: Place = "fed"


class Server(Keeper):
    """The training server: computes on the rows of many clients side by side."""

    place: Place = "server"

    def each(self, fn: Callable[..., R] | PerClient[Callable[..., R]], *values: Value) -> PerClient[R]:
        """Run fn, or each row's pullback, once per client; values that are not rows are the same for all."""
        if not isinstance(fn, PerClient):
            return super().each(fn, *values)
        check_pullback(fn)
        rows, ids = self._rows((fn, *values))
        ready = self._clock.served_pull(rows[0], rows[1], ids)
        return PerClient(self.place, self._engine.pull(*(r[Ids(ids)] for r in rows)), ids, ready=ready)

    @overload
    def vjp(self, fn: Differentiable, part: Held, value: Held, *rest: Value) -> tuple[Held[Tensor], Held[Pull]]: ...
    @overload
    def vjp(
        self, fn: Differentiable, part: PerClient, value: PerClient, *rest: Value
    ) -> tuple[PerClient[Tensor], PerClient[Pull]]: ...
    def vjp(self, fn: Differentiable, part: PerClient | Held, value: Any, *rest: Any) -> tuple[Any, Any]:
        """Return the output of fn(part, value, *rest) -> (out, buffers), and its pullback to part and value."""
        if isinstance(part, Held):  # one part over a merged batch
            values = (part, value, *rest)
            plain = [self._engine.real(self._one(v)) for v in values]
            out, pull = calculus.vjp(fn, list(plain), 1)
            end = self._clock.done("vjp", fn, plain, _ready(values), pull)
            return Held(self.place, out, _stay(values), end), Held(self.place, pull, _stay(values), end)
        rows, ids = self._rows((part, value, *rest))
        made = self._engine.vjp(fn, rows, ids, cut=1)
        ready = self._clock.served("vjp", fn, rows, ids, made)
        return pair(PerClient(self.place, made, ids, ready=ready))

    def grad(self, fn: Differentiable, value: PerClient, *rest: Value) -> PerClient[Grads]:
        """Return the loss of fn(value, *rest) -> (loss, buffers) and its gradients with respect to the value."""
        rows, ids = self._rows((value, *rest))
        made = self._engine.grad(fn, rows, ids, cut=0)
        return PerClient(self.place, made, ids, ready=self._clock.served("grad", fn, rows, ids, made))

    def together(self, rows: PerClient[T]) -> PerClient[T]:
        """Return the same rows, all available when the last of them is."""
        (same,) = at_once([self._own(rows)], self._clock.last(rows))
        return same

    def concat(self, rows: PerClient[T]) -> tuple[Held[T], Callable[[Held[T]], PerClient[T]]]:
        """Return the rows as one batch, in the order of the clients, and a function that splits a batch into rows."""
        pieces = [self._engine.real(self._own(rows).row(j)) for j in rows.ids]
        ends = list(accumulate(len(tree.tensors(p)[0]) for p in pieces))
        own = {j: slice(start, end) for j, start, end in zip(rows.ids, [0, *ends], ends, strict=False)}

        def back(merged: Held[T]) -> PerClient[T]:
            whole = self._own(merged).tree
            return self.rows({j: replace(merged, tree=tree.map(itemgetter(at), whole)) for j, at in own.items()})

        batch = tree.map(lambda *tensors: torch.cat(tensors), *pieces)
        return Held(self.place, batch, stays=True, ready=self._clock.last(rows)), back


class Ids(NamedTuple):
    """Client numbers, to select rows with."""

    ids: tuple[int, ...]


def _is_number(leaf: object) -> bool:
    """Return whether a leaf is a float or a vector of floats: no batch, no layer and no labels."""
    return isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() < 2)


def _ready(values: tuple[object, ...]) -> list[float]:
    return [v.ready for v in values if isinstance(v, Held)]


def _stay(values: tuple[object, ...]) -> bool:
    return any(isinstance(v, Held) and v.stays for v in values)
