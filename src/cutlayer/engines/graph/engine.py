"""The engine `graph`: record chains of operations once, and replay them for every client and step."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.batches import Index, Samples
from cutlayer.core.calculus import Pullback
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.sums import Weights, norms, weighted_sum
from cutlayer.core.transfer import upload
from cutlayer.core.tree import Pending, Tree
from cutlayer.core.values import Block, PerClient, aligned
from cutlayer.engines.base import ByClient, homes, load_stacked, one_by_one
from cutlayer.engines.graph.buffers import Buffers
from cutlayer.engines.graph.execute import done
from cutlayer.engines.graph.forms import NUMBERS, Form, Forms, Memory, Path, copy_into, follow
from cutlayer.engines.graph.lane import Book, Lane, NotKept, with_plain_numbers
from cutlayer.engines.graph.product import is_summable, write_sum
from cutlayer.engines.graph.queue import (
    Argument,
    ClientQueue,
    Literal,
    Moved,
    Operation,
    Promise,
    Same,
    Several,
    Shared,
    Value,
    name_of,
)
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.out_of_memory import out_of_memory
from cutlayer.errors import ConfigError

log = logging.getLogger("cutlayer")
Plain = int | float | str | None
MOST_SURPRISES = 5  # attempts at a round that may fail with `NotKept` before recordings keep everything
TOO_SHORT = "the GPU's memory is too short even for one client at a time; take smaller batches, or precision 'bf16'"
MOST_HELD = 16  # chains per lane whose inputs stay in memory before the host joins the lanes


class Graph(ByClient):
    """Queues operations for each client and returns handles; chains run when a value is needed."""

    name = "graph"

    def __init__(self, recorder: Again, slots: int) -> None:
        self.slots = slots  # clients that have memory of their own at a time
        self._book = Book(recorder, slots)
        self._lanes = [Lane(i, self._book) for i in range(slots)]
        self._forms = Forms()
        self._known: dict[Any, tuple[Form, ...]] = {}  # the forms of the results, by operation and argument forms
        self._functions: dict[Any, Same] = {}  # by `name_of`
        self._buffers = Buffers(recorder.device, self._book.addresses)
        self._warned: set[Any] = set()
        self._begin()

    def forget(self, *, keep_all: bool = False) -> None:
        """Drop everything that waits, as the round failed. With `keep_all`, recordings keep everything from now on."""
        self._join()  # running lanes still read what is dropped here
        self._book.keeps_all |= keep_all
        self._begin()

    def compile_at_once(self) -> None:
        """Compile chains at their first recording from now on, as a long run would do later."""
        self._book.compiles_at_once = True

    def recover(self, error: BaseException, attempt: int) -> "Graph":
        """After `NotKept`, retry and keep more values; on out-of-memory, retry with half the slots."""
        surprised = isinstance(error, NotKept)
        self.forget(keep_all=surprised and attempt >= MOST_SURPRISES)
        if surprised:
            log.info("engine graph: retrying the round, with more values kept")
            return self
        if not out_of_memory(error):
            raise error
        if self.slots == 1:
            raise ConfigError(TOO_SHORT) from error
        smaller = Graph(self._book.recorder.fresh(), self.slots // 2)  # which has recorded nothing
        smaller._book.compiles_at_once = self._book.compiles_at_once
        log.warning(
            "engine graph: memory is too short for %d clients at a time; retrying the round with %d, in turns",
            self.slots,
            smaller.slots,
        )
        return smaller

    def _begin(self) -> None:
        self._queues: dict[int, ClientQueue] = {}
        self._waiting: dict[int, ClientQueue] = {}
        self._assigned: dict[int, int] = {}
        self._running: set[int] = set()  # lanes whose work the host has not joined
        self._held: list[Any] = []  # keeps alive what running lanes still read
        self._common: dict[int, tuple[Tree, Shared]] = {}
        self._moves: dict[tuple[int, Path], tuple[Promise, Moved]] = {}
        self._loaded = self._since_load = False
        for lane in self._lanes:
            lane.occupant = None

    @property
    def num_recordings(self) -> int:
        """The number of recordings in all lanes."""
        return sum(len(lane.recordings) for lane in self._lanes)

    @property
    def refused(self) -> set[str]:
        """The reasons why chains could not be recorded."""
        return {chain.refused for chain in self._book.chains.values() if chain.refused is not None}

    # -- the protocol -----------------------------------------------------------------------------------------------

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        """Load stacks of batches; this ends the chains of the batch before, unless they have run already."""
        if self._since_load or any(queue.asks_pullback for queue in self._waiting.values()):
            self._flush()
        self._loaded = True
        return load_stacked(data, index)

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        rows = upload(list(keys.values()), torch.int64, self._book.recorder.device)
        return PerClient("anywhere", one_by_one(dict(zip(keys, rows.unbind(), strict=True))))

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        made: list[Block] = []
        blocks_of = homes(values)
        for group, blocks in aligned(values, ids):
            if any(b.stacked or _own(b.tree) for b in blocks):
                made += self._each("call", fn, blocks_of, group, None)
            else:  # the same for all of them, so computed once
                made.append(Block(group, fn(*(self.real(b.tree) for b in blocks)), stacked=False))
        return made

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return self._each("vjp", fn, homes(values), ids, cut)

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return self._each("grad", fn, homes(values), ids, cut)

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        bare = PerClient(pullbacks.place, [b._replace(tree=b.tree.pull) for b in pullbacks.blocks], pullbacks.ids)
        return self._each("pull", None, homes([bare, gradient]), pullbacks.ids, None)

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        """Call fn; if values are still in clients' queues, the call joins the chain of the last such client."""
        owned = [v for v in values if isinstance(v, Promise)]
        if not owned:
            return fn(*(self.real(v) for v in values))
        queue = owned[-1].held.queue
        (ref,) = self._operation("call", fn, [(v, False) for v in values], queue, None)
        return _handed(ref)

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        """Return the weighted sum over clients; for values in rows, it is one product for each dtype."""
        self._flush()
        self._join()
        fast = self._product(rows, weights, largest_integers)
        if fast is not None:
            return fast
        return weighted_sum(self._as_they_lie(rows), weights, largest_integers)

    def norms(self, rows: PerClient, start: PerClient | None) -> Tensor:
        return norms(self._as_they_lie(rows), None if start is None else self._as_they_lie(start))

    def real(self, value: Tree) -> Tree:
        """Return the value with everything computed, in memory of its own."""
        return tree.replace((Moved, Pending), lambda handle: tree.owned(self._seen(handle)), value)

    # -- chains -----------------------------------------------------------------------------------------------------

    def _each(
        self, how: str, fn: Any, blocks_of: Sequence[Mapping[int, Block]], ids: Ids, cut: int | None
    ) -> list[Block]:
        """Add an operation to the chain of each client, with the client's own arguments."""
        made: dict[int, Tree] = {}
        for j in ids:
            blocks = [home[j] for home in blocks_of]
            arguments = [(b.row(j), not b.stacked and len(b.ids) > 1) for b in blocks]
            queue = self._queues.get(j) or ClientQueue(j)  # a new one is kept once something is in it
            first, *pull = self._operation(how, fn, arguments, queue, cut)
            made[j] = (first, Pullback(pull[0], (j,))) if pull else _handed(first)  # type: ignore[arg-type]
        return one_by_one(made)

    def _operation(
        self, how: str, fn: Any, arguments: Sequence[tuple[Tree, bool]], queue: ClientQueue, cut: int | None
    ) -> list[Promise]:
        """Add an operation to a client's chain. An operation that was never seen on such values runs at once.

        So does one with a plain number as argument: with another number at each step, every chain would be a new one.
        """
        values = [self._at_hand(value, same, queue) for value, same in arguments]
        if how == "call" and any(type(value) in NUMBERS for value in values):
            return self._done_now(how, fn, values, queue, cut)
        given = [self._form(value) for value in values]
        name = name_of(fn)
        operation = how, name, tuple(given), cut
        forms = self._known.get(operation)
        if forms is None:
            promises = self._done_now(how, fn, values, queue, cut)
            self._known[operation] = tuple(promise.form for promise in promises)
            return promises
        args = tuple(_encoded(value, form, queue) for value, form in zip(values, given, strict=True))
        function = self._functions.setdefault(name, Same(fn))
        self._queues[queue.client] = self._waiting[queue.client] = queue
        self._since_load |= self._loaded
        return queue.add(Operation(how, function, args, cut), forms)

    def _done_now(self, how: str, fn: Any, arguments: list[Tree], queue: ClientQueue, cut: int | None) -> list[Promise]:
        self._flush()  # the results must not take slots that a waiting chain still reads
        results = done(Operation(how, Same(fn), (), cut), [self.real(a) for a in arguments])
        forms = tuple(self._forms.pullback() if callable(r) else self._forms.of(r) for r in results)
        self._queues[queue.client] = queue
        promises = [queue.promise(form) for form in forms]
        for promise, result in zip(promises, results, strict=True):
            queue.values[promise.held.slot] = Value(promise.form, result)
        return promises

    def _at_hand(self, value: Tree, same: bool, queue: ClientQueue) -> Tree:
        """Return an argument in the form in which the chain of this queue can use it."""
        if isinstance(value, Promise):
            if value.held.queue is queue:
                return value
            return self.real(value) if value.form.is_pullback else self._moved(value)
        if _own(value):
            return tuple(self._at_hand(v, same, queue) for v in value)
        if isinstance(value, Plain | Shared) or not same:
            return value
        return self._spread(value)

    def _moved(self, ref: Promise) -> Moved:
        """Copy a value out of another client's queue; the copy serves everyone until the next chains run."""
        key = id(ref.held), ref.path
        if key not in self._moves:
            self._flush()
            self._join()
            self._moves[key] = ref, Moved(ref.form, self._copied(ref))
        return self._moves[key][1]

    def _copied(self, ref: Promise) -> Memory:
        """Return new rows with the value: copies of its rows if it lies in rows, else filled from the value."""
        value = ref.held.value
        seen = self._book.read(value)
        lies = None if value.home is None else value.form.stretches(ref.form, ref.path)
        if lies is not None and not self._book.crowded:
            lane = self._assigned[ref.held.queue.client]
            rows = self._book.rows(value.home, value.form, lane)
            return {s.dtype: rows[s.dtype][s.start : s.start + s.size].clone() for s in lies}
        memory = ref.form.layout.empty(self._book.recorder.device)
        copy_into(ref.form.layout.of(memory), follow(seen, ref.path))
        return memory

    def _form(self, value: Tree) -> Any:
        if isinstance(value, Promise | Shared | Moved):
            return value.form
        if isinstance(value, Plain):
            return type(value), value
        return tuple(map(self._form, value)) if _own(value) else self._forms.of(value)

    def _spread(self, value: Tree) -> Shared:
        """Put a value that all clients share into a buffer that all chains can read."""
        if id(value) not in self._common:
            self._join()
            loan = self._buffers.take(self._forms.of(value))
            copy_into(loan.tree, value)
            self._common[id(value)] = value, Shared(loan, loan.form)
        return self._common[id(value)][1]

    # -- running ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Run all waiting chains, side by side."""
        self._moves.clear()  # chains may overwrite the values that were copied
        if not self._waiting:
            return
        self._book.flush += 1
        waiting = list(self._waiting.values())
        lanes = {queue.client: self._lane(queue) for queue in waiting}
        self._book.recorder.fork(set(lanes.values()))
        self._running |= set(lanes.values())
        for queue in waiting:
            self._held.append((queue.externals, queue.values, queue.common))
            self._lanes[lanes[queue.client]].run(queue)
        self._waiting.clear()
        self._held.append(list(self._common.values()))
        self._common.clear()
        self._loaded = self._since_load = False
        if len(self._held) > MOST_HELD * len(self._lanes):
            self._join()
        for why in self.refused - self._warned:
            log.warning("engine graph: a chain runs unrecorded (%s)", why)
            self._warned.add(why)

    def _join(self) -> None:
        if self._running:
            self._book.recorder.join(self._running)
        self._running = set()
        self._held.clear()
        self._buffers.collect()

    def _lane(self, queue: ClientQueue) -> int:
        """Return the lane of a client: its own while it has values, else the lane with the fewest clients."""
        if queue.client not in self._assigned:
            # Drop the queues of clients whose values nobody holds: these clients may never come back.
            self._queues = {j: q for j, q in self._queues.items() if q is queue or self._is_busy(q)}
            self._assigned = {j: i for j, i in self._assigned.items() if j in self._queues}
            load = Counter(self._assigned.values())
            self._assigned[queue.client] = min(range(self.slots), key=lambda i: load[i])
            self._book.crowded = len(set(self._assigned.values())) < len(self._assigned)
        return self._assigned[queue.client]

    def _is_busy(self, queue: ClientQueue) -> bool:
        queue.collect()
        return bool(queue.forms or queue.operations)

    # -- looking ----------------------------------------------------------------------------------------------------

    def _seen(self, handle: Promise | Shared | Moved) -> Tree:
        """Return the value of a handle as it lies in memory now."""
        if isinstance(handle, Moved):
            return with_plain_numbers(handle.form, handle.tree)
        if isinstance(handle, Shared):
            return with_plain_numbers(handle.form, follow(handle.held.tree, handle.path))
        self._flush()
        self._join()
        return with_plain_numbers(handle.form, follow(self._book.read(handle.held.value), handle.path))

    def _as_they_lie(self, rows: PerClient) -> PerClient:
        """Return the rows as they lie in memory now."""
        blocks = [b._replace(tree=tree.replace((Moved, Pending), self._seen, b.tree)) for b in rows.blocks]
        return PerClient(rows.place, blocks, rows.ids)

    def _product(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Shared | None:
        """Return the sum as a product of weights and rows; None if the values are not in rows or differ in form."""
        first = next((block.tree for block in rows.blocks), None)
        if self._book.crowded or not isinstance(first, Promise) or not is_summable(first.form, largest_integers):
            return None
        banks: dict[tuple[int, Form], list[tuple[int, float]]] = {}
        for block in rows.blocks:
            ref = block.tree
            if not isinstance(ref, Promise) or (ref.path, ref.form) != (first.path, first.form):
                return None
            value = ref.held.value
            self._book.read(value)
            if value.home is None or value.form.stretches(first.form, first.path) is None:
                return None
            member = self._assigned[ref.held.queue.client], sum(float(weights[j]) for j in block.ids)
            banks.setdefault((value.home, value.form), []).append(member)
        loan = self._buffers.take(first.form)
        write_sum(banks, first.form, first.path, self._book, loan.memory)
        return Shared(loan, loan.form)


def _encoded(value: Tree, form: Any, queue: ClientQueue) -> Any:
    """Return an argument as a part of a chain."""
    if isinstance(value, Promise):
        return queue.argument(value)
    if isinstance(value, Shared):
        queue.common[value.held.number] = value.held
        return Argument("common", value.held.number, value.path)
    if isinstance(value, Plain):
        return Literal(type(value), value)
    if type(form) is tuple:
        return Several(tuple(_encoded(v, f, queue) for v, f in zip(value, form, strict=True)))
    return queue.external(form, value)


def _own(value: Tree) -> bool:
    """Whether a value is, or contains, a value from a client's queue."""
    return isinstance(value, Promise | Moved) or (type(value) is tuple and any(map(_own, value)))


def _handed(ref: Promise) -> Tree:
    """Return the result as methods see it: a plain tuple becomes a tuple of handles."""
    return tuple(ref.item(k) for k in range(len(ref.form.bare))) if type(ref.form.bare) is tuple else ref
