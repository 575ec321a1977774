"""Lanes: each runs the chains of one client at a time, in rows of memory that never move."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.core.state import Grads
from cutlayer.core.tree import Tree
from cutlayer.engines.graph.execute import Inputs, executed
from cutlayer.engines.graph.forms import NUMBERS, Form, Memory, copy_into, copy_pairs, is_there, pairs
from cutlayer.engines.graph.overwriting import overwritable
from cutlayer.engines.graph.queue import NOT_KEPT, ClientQueue, Moved, Value
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.out_of_memory import out_of_memory
from cutlayer.errors import CutlayerError

log = logging.getLogger("cutlayer")
# Replays of a chain in all lanes before it is compiled. Compiling takes up to a minute, which a short run never gains
# back; a chain with so many replays belongs to a long run, and waiting has cost that run only a few seconds.
COMPILE_AFTER = 10_000


class NotKept(CutlayerError):
    """A value is read that the recording of its chain did not keep; from now on it is kept."""


class LastingPull:
    """A pullback that a recording left behind; each replay refreshes what it computes with."""

    current: Callable[..., Grads] | None = None

    def __call__(self, gradient: Tensor) -> Grads:
        assert self.current is not None
        found = self.current(gradient, again=True)
        return found._replace(buffers=tree.owned(found.buffers))  # the next replay overwrites them


class Reading(NamedTuple):
    """A value that a chain reads."""

    slot: int
    value: Value
    home: int | None  # the bank that a recording reads it from; None for a pullback

    @property
    def comes(self) -> bool:
        """Whether it lies elsewhere and must be copied into its row."""
        return self.home is not None and self.value.home is None


class Out(NamedTuple):
    """A result of a chain that somebody holds."""

    number: int  # among the values that the chain makes
    slot: int
    form: Form
    home: int | None = None  # the bank that a recording writes it to; None if it is not kept


class Recording(NamedTuple):
    """A chain that can be replayed."""

    replay: Callable[[], None]
    outs: Mapping[int, Tree]  # where it leaves its results, by number


@dataclass(eq=False)
class ChainHistory:
    """What is known of a chain from all lanes together."""

    first: int  # the flush in which it first ran
    used: set[int] = field(default_factory=set)  # the numbers of the results that were read later
    played: int = 0  # how often it was replayed
    compiles: bool = True
    refused: str | None = None  # why it cannot be recorded


@dataclass
class Book:
    """What all lanes share: memory, and the history of chains."""

    recorder: Again
    lanes: int
    banks: dict[tuple[Any, Form], Memory] = field(default_factory=dict)
    chains: dict[Any, ChainHistory] = field(default_factory=dict)  # by operations and forms of inputs
    addresses: set[int] = field(default_factory=set)  # of memory that will be written again
    flush: int = 0
    crowded: bool = False  # whether some clients share a lane
    keeps_all: bool = False  # recordings keep every result that somebody holds, not only those read before
    compiles_at_once: bool = False  # the first recording of a chain is compiled already

    def bank(self, number: Any, form: Form) -> Memory:
        """Return the bank of this number for values of a form: for each type a matrix, with a row for each lane."""
        if (number, form) not in self.banks:
            device = self.recorder.device
            bank = self.banks[number, form] = form.layout.empty(device, self.lanes)
            if device.type == "cuda":  # one lane's stream writes the zeros, and the other lanes do not wait for it
                torch.cuda.current_stream(device).synchronize()
            self.addresses |= {matrix.untyped_storage().data_ptr() for matrix in bank.values()}
        return self.banks[number, form]

    def rows(self, number: Any, form: Form, lane: int) -> Memory:
        """Return the rows of one lane in a bank."""
        return {dtype: matrix[lane] for dtype, matrix in self.bank(number, form).items()}

    def chain(self, queue: ClientQueue, reads: Sequence[Value]) -> ChainHistory | None:
        """Return the history of a queue's chain; None if it cannot recur, as it reads a pullback that does not last."""
        if any(v.form.is_pullback and not isinstance(v.tree, LastingPull) for v in reads):
            return None
        found = tuple(v.tree if v.form.is_pullback else v.form for v in reads)
        name = tuple(queue.operations), tuple(form for form, _ in queue.externals), found
        return self.chains.setdefault(name, ChainHistory(self.flush))

    def read(self, value: Value) -> Tree:
        """Return a value after its chain has run, and note that it is read."""
        if value.origin is not None:
            chain, number = value.origin
            chain.used.add(number)
        if value.tree is NOT_KEPT:
            raise NotKept("a recording did not keep a value that is read later")
        return value.tree


class Lane:
    """Records and replays the chains of one client at a time."""

    def __init__(self, number: int, book: Book) -> None:
        self.number, self.book = number, book
        self.occupant: ClientQueue | None = None
        self._homes: dict[tuple[Any, Form], Tree] = {}
        self.recordings: dict[Any, Recording] = {}

    def home(self, number: Any, form: Form) -> Tree:
        if (number, form) not in self._homes:
            self._homes[number, form] = form.layout.of(self.book.rows(number, form, self.number))
        return self._homes[number, form]

    def run(self, queue: ClientQueue) -> None:
        """Run the chain of a queue; afterwards the queue has the values of the slots that somebody holds."""
        queue.collect()
        for slot in queue.reads:
            self.book.read(queue.values[slot])
        outs = sorted(Out(n, slot, queue.forms[slot]) for slot, n in queue.made.items() if slot in queue.forms)
        kept = {s: v for s, v in queue.values.items() if s in queue.forms and s not in queue.made}
        if outs:
            self._move_in(queue)
            with self.book.recorder.on(self.number):
                kept |= self._run(queue, outs, kept)
        queue.values = kept
        queue.begin()

    def _run(self, queue: ClientQueue, outs: Sequence[Out], others: Mapping[int, Value]) -> dict[int, Value]:
        """Return, by slot, the results that somebody holds, and the other values that moved into rows for the chain."""
        reads = self._readings(queue, others)
        chain = self.book.chain(queue, [r.value for r in reads])
        coming = {r.slot: r.home for r in reads if r.comes and r.slot in others}
        outs = self._with_homes(chain, outs, {s: v._replace(home=coming.get(s, v.home)) for s, v in others.items()})
        recording = self._recording(queue, chain, reads, outs)
        if recording is None:
            made = self._as_it_is(queue, reads, outs)
            return {o.slot: Value(o.form, made[o.number], origin=(chain, o.number) if chain else None) for o in outs}
        self._fill(reads, queue)
        recording.replay()
        moved = {s: others[s]._replace(tree=self.home(home, others[s].form), home=home) for s, home in coming.items()}
        return moved | {
            o.slot: Value(o.form, recording.outs.get(o.number, NOT_KEPT), o.home, (chain, o.number)) for o in outs
        }

    def _readings(self, queue: ClientQueue, others: Mapping[int, Value]) -> list[Reading]:
        """Return what the chain reads; values that lie elsewhere get the first free rows."""
        reads = {slot: queue.values[slot] for slot in queue.reads}
        taken = {(v.form, v.home) for v in (*others.values(), *reads.values())}

        def home(value: Value) -> int | None:
            if value.form.is_pullback:
                return None
            return _first_free(value.form, taken) if value.home is None else value.home

        return [Reading(slot, value, home(value)) for slot, value in reads.items()]

    def _as_it_is(self, queue: ClientQueue, reads: Sequence[Reading], outs: Sequence[Out]) -> dict[int, Tree]:
        inputs = [with_plain_numbers(r.value.form, r.value.tree) for r in reads]
        common = {n: with_plain_numbers(loan.form, loan.tree) for n, loan in queue.common.items()}
        lasting = frozenset(o.number for o in outs if o.form.is_pullback)
        externals = [
            with_plain_numbers(form, value.tree) if isinstance(value, Moved) else value
            for form, value in queue.externals
        ]
        made = executed(queue.operations, Inputs(inputs, externals, common), lasting)
        return {o.number: tree.map(self._own, made[o.number]) for o in outs}

    def _own(self, a: Tensor) -> Tensor:
        """Return a tensor that no later chain overwrites: a copy if it lies in a row or buffer."""
        return a.clone() if a.untyped_storage().data_ptr() in self.book.addresses else a

    # -- recordings -------------------------------------------------------------------------------------------------

    def _with_homes(self, chain: ChainHistory | None, outs: Sequence[Out], others: Mapping[int, Value]) -> list[Out]:
        """Assign the first free rows to the results that are read later; rows are free if nobody holds their value.

        The chain's own inputs may lie there: results are written after everything has been read.
        """
        used = () if chain is None else chain.used
        taken = {(v.form, v.home) for v in others.values()}
        keeps_all = self.book.keeps_all
        return [
            o._replace(home=_first_free(o.form, taken))
            if o.number in used or (keeps_all and not o.form.is_pullback)
            else o
            for o in outs
        ]

    def _recording(
        self, queue: ClientQueue, chain: ChainHistory | None, reads: Sequence[Reading], outs: Sequence[Out]
    ) -> Recording | None:
        """Return the recording of a chain; None if the chain is new or cannot be recorded."""
        if chain is None or chain.refused is not None or chain.first == self.book.flush:
            return None
        kept = [o for o in outs if o.home is not None]
        if self.book.crowded and any(o.form.is_pullback for o in kept):
            return None  # a pullback cannot move out for the lane's next client
        chain.played += 1
        compiled = chain.compiles and (self.book.compiles_at_once or chain.played > COMPILE_AFTER)
        key = chain, tuple(r.home for r in reads), tuple((o.number, o.home) for o in kept), compiled
        known = self.recordings.get(key)
        if known is not None:
            return known
        try:
            made = self._record(key, queue, reads, kept, compiled)
        except Exception as error:  # numbers are tensors in a recording, and functions can fail on that in many ways
            if out_of_memory(error):
                raise  # the chain is not to blame
            why = f"{type(error).__name__}: {reason(error)}"
            if not compiled:
                chain.refused = why
                return None
            chain.compiles = False
            log.warning("engine graph: a chain is recorded without compiling it, and so slower (%s)", why)
            return self._recording(queue, chain, reads, outs)
        self.recordings[key] = made
        self.recordings.pop((*key[:-1], not compiled), None)  # the uncompiled one
        return made

    def _record(
        self, what: Any, queue: ClientQueue, reads: Sequence[Reading], kept: Sequence[Out], compiled: bool
    ) -> Recording:
        operations = tuple(queue.operations)
        externals = tuple(self.home(("external", k), form) for k, (form, _) in enumerate(queue.externals))
        pulls = {o.number: LastingPull() for o in kept if o.form.is_pullback}
        rows = {o.number: self.home(o.home, o.form) for o in kept if o.number not in pulls}
        common = {n: loan.tree for n, loan in queue.common.items()}
        read = [r.value.tree if r.home is None else self.home(r.home, r.value.form) for r in reads]
        inputs = Inputs(read, externals, common)
        self._fill(reads, queue)  # the trial computes with real values
        in_place = overwritable(operations, inputs, rows) if compiled else {}  # only compiled code gains from it

        def body() -> None:
            made = executed(operations, inputs, frozenset(pulls), in_place)
            for number, pull in pulls.items():
                pull.current = made[number]
            self._store([(home, made[number]) for number, home in rows.items()])

        def trial() -> None:
            with _unchanged(in_place.values()):
                executed(operations, inputs, frozenset(pulls), in_place)

        replay = self.book.recorder.record(self.number, what, trial, body, apart=bool(pulls), compiled=compiled)
        return Recording(replay, {**rows, **pulls})

    def _fill(self, reads: Sequence[Reading], queue: ClientQueue) -> None:
        """Copy the inputs of a chain into the rows that its recording reads."""
        both: list[tuple[Tensor, Any]] = []
        for read in reads:
            if read.comes:
                both += pairs(self.home(read.home, read.value.form), read.value.tree)
        for k, (form, given) in enumerate(queue.externals):
            if isinstance(given, Moved):
                rows = self.book.rows(("external", k), form, self.number)
                both += ((row, given.memory[dtype]) for dtype, row in rows.items())
            else:
                both += pairs(self.home(("external", k), form), given)
        copy_pairs(both)

    def _store(self, made: Sequence[tuple[Tree, Tree]]) -> None:
        """Write results into their rows; inputs that pass through are cloned first, as their rows may be written."""
        if any(a.device != self.book.recorder.device for _, value in made for a in tree.tensors(value)):
            raise RuntimeError("a result is not on the GPU, and a recording cannot copy it there")
        copies = []
        for home, value in made:
            for there, here in pairs(home, value):
                moves = isinstance(here, Tensor) and not is_there(there, here)
                copies.append((there, self._own(here) if moves else here))
        copy_pairs(copies)

    # -- turns ------------------------------------------------------------------------------------------------------

    def _move_in(self, queue: ClientQueue) -> None:
        """Move the values of the lane's last client out of the rows, if this is another client."""
        before, self.occupant = self.occupant, queue
        if before is None or before is queue:
            return
        before.collect()
        with self.book.recorder.on(self.number):
            for slot, value in before.values.items():
                needed = slot in before.forms or slot in before.reads  # held, or read by a waiting chain
                if needed and value.home is not None and not value.form.is_pullback:  # which keeps memory of its own
                    before.values[slot] = value._replace(tree=tree.owned(value.tree), home=None)


@contextmanager
def _unchanged(homes: Iterable[Tree]) -> Iterator[None]:
    """Restore these rows afterwards."""
    before = [(home, tree.owned(home)) for home in homes]
    try:
        yield
    finally:
        for home, value in before:
            copy_into(home, value)


def _first_free(form: Form, taken: set[tuple[Form, int | None]]) -> int:
    """Return the first bank for values of a form that is not taken, and take it."""
    home = next(n for n in range(len(taken) + 1) if (form, n) not in taken)
    taken.add((form, home))
    return home


def with_plain_numbers(form: Form, value: Tree) -> Tree:
    """Return the value with plain numbers where its form has them; the host waits for those."""
    if not any(type(a) in NUMBERS for a in tree.leaves(form.bare)):
        return value
    return tree.map(lambda a, bare: a.item() if type(bare) in NUMBERS else a, value, form.bare)
