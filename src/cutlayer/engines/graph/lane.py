"""A lane runs the chains of one client at a time, in rows of memory that never move."""

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
# Plays of a chain in all lanes before it is compiled. That takes up to a minute, which short runs never get back; a
# chain that has come so often is one of a long run, and by then has lost a few seconds.
COMPILE_AFTER = 10_000


class NotKept(CutlayerError):
    """A value was asked for that the recording of its chain did not keep; from now on it does."""


class LastingPull:
    """A pullback that a recording left behind; each replay refreshes what it computes with."""

    current: Callable[..., Grads] | None = None

    def __call__(self, gradient: Tensor) -> Grads:
        assert self.current is not None
        found = self.current(gradient, again=True)
        return found._replace(buffers=tree.owned(found.buffers))  # the next replay writes them again


class Reading(NamedTuple):
    """A value that a chain reads."""

    slot: int
    value: Value
    home: int | None  # the bank of rows that a recording reads it from; a pullback has none

    @property
    def comes(self) -> bool:
        """Whether it lies elsewhere and has to be copied there."""
        return self.home is not None and self.value.home is None


class Out(NamedTuple):
    """A value that a chain makes and somebody holds."""

    number: int  # among the values that the chain makes
    slot: int
    form: Form
    home: int | None = None  # the bank of rows that a recording leaves it in, if it is to keep it


class Recording(NamedTuple):
    """A chain that can be replayed."""

    replay: Callable[[], None]
    outs: Mapping[int, Tree]  # where it leaves what it makes, by number


@dataclass(eq=False)
class ChainHistory:
    """What is known of a chain from all lanes together."""

    first: int  # the first flush that had it
    used: set[int] = field(default_factory=set)  # which of its values were read later
    played: int = 0  # how often it was run from a recording
    compiles: bool = True
    refused: str | None = None  # why it cannot be recorded


@dataclass
class Book:
    """What all lanes know: memory, and what earlier chains have taught."""

    recorder: Again
    lanes: int
    banks: dict[tuple[Any, Form], Memory] = field(default_factory=dict)
    chains: dict[Any, ChainHistory] = field(default_factory=dict)  # by what they compute
    addresses: set[int] = field(default_factory=set)  # of memory that will be written again
    flush: int = 0
    crowded: bool = False  # some clients share a lane
    keeps_all: bool = False  # whatever somebody holds, where what is read later is too hard to foresee
    compiles_at_once: bool = False  # chains are not recorded as they are before

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
        """The chain that waits in a queue; None if it cannot come again, as it needs a passing pullback."""
        if any(v.form.is_pullback and not isinstance(v.tree, LastingPull) for v in reads):
            return None
        found = tuple(v.tree if v.form.is_pullback else v.form for v in reads)
        name = tuple(queue.operations), tuple(form for form, _ in queue.externals), found
        return self.chains.setdefault(name, ChainHistory(self.flush))

    def read(self, value: Value) -> Tree:
        """A value that is needed after its chain has run."""
        if value.origin is not None:
            chain, number = value.origin
            chain.used.add(number)
        if value.tree is NOT_KEPT:
            raise NotKept("a recording did not keep a value that is read later")
        return value.tree

    def is_static(self, a: Tensor) -> bool:
        return a.untyped_storage().data_ptr() in self.addresses


class Lane:
    """Where the chains of one client at a time are recorded and replayed."""

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
        """Run what waits in a queue; afterwards the queue has the values of the slots that somebody holds."""
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
        """By slot, what the chain makes that somebody holds, and those of the others that moved into rows for it."""
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
        """What the chain reads; values that come from elsewhere go to the first rows that hold nothing of use."""
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
        """A tensor that does not lie in memory that will be written again."""
        return a.clone() if self.book.is_static(a) else a

    # -- recordings -------------------------------------------------------------------------------------------------

    def _with_homes(self, chain: ChainHistory | None, outs: Sequence[Out], others: Mapping[int, Value]) -> list[Out]:
        """Give results that are known to be read later the first rows whose values nobody holds any more.

        What the chain reads may lie there: results are written when everything has been read.
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
        """The chain's recording, if it is known well enough to have one."""
        if chain is None or chain.refused is not None or chain.first == self.book.flush:
            return None
        kept = [o for o in outs if o.home is not None]
        if self.book.crowded and any(o.form.is_pullback for o in kept):
            return None  # a pullback cannot move out when the lane's next client comes
        chain.played += 1
        compiled = chain.compiles and (self.book.compiles_at_once or chain.played > COMPILE_AFTER)
        key = chain, tuple(r.home for r in reads), tuple((o.number, o.home) for o in kept), compiled
        known = self.recordings.get(key)
        if known is not None:
            return known
        try:
            made = self._record(key, queue, reads, kept, compiled)
        except Exception as error:  # numbers are tensors in a recording, and functions have many ways to mind that
            if out_of_memory(error):
                raise  # the chain is not to blame
            why = f"{type(error).__name__}: {reason(error)}"
            if not compiled:
                chain.refused = why
                return None
            chain.compiles = False
            log.warning("engine graph: a chain is recorded as it is, and so slower (%s)", why)
            return self._recording(queue, chain, reads, outs)
        self.recordings[key] = made
        self.recordings.pop((*key[:-1], not compiled), None)  # the one before it was compiled
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
        self._fill(reads, queue)  # the trial computes with true values
        in_place = overwritable(operations, inputs, rows) if compiled else {}  # only compiled code gains by it

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
        """What a chain reads and takes, into the rows where its recording looks for them."""
        for read in reads:
            if read.comes:
                copy_into(self.home(read.home, read.value.form), read.value.tree)
        for k, (form, given) in enumerate(queue.externals):
            if isinstance(given, Moved):
                for dtype, row in self.book.rows(("external", k), form, self.number).items():
                    row.copy_(given.memory[dtype])
            else:
                copy_into(self.home(("external", k), form), given)

    def _store(self, made: Sequence[tuple[Tree, Tree]]) -> None:
        """Results into their rows; what passed through unchanged is copied first, as its old row may be written."""
        if any(a.device != self.book.recorder.device for _, value in made for a in tree.tensors(value)):
            raise RuntimeError("a result is not on the GPU, and a recording cannot fetch it each time")
        copies = []
        for home, value in made:
            for there, here in pairs(home, value):
                moves = isinstance(here, Tensor) and not is_there(there, here)
                copies.append((there, self._own(here) if moves else here))
        copy_pairs(copies)

    # -- turns ------------------------------------------------------------------------------------------------------

    def _move_in(self, queue: ClientQueue) -> None:
        """The values of the client that was here before move out of the rows."""
        before, self.occupant = self.occupant, queue
        if before is None or before is queue:
            return
        before.collect()
        with self.book.recorder.on(self.number):
            for slot, value in before.values.items():
                needed = slot in before.forms or slot in before.reads  # by somebody, or by a chain that waits
                if needed and value.home is not None and not value.form.is_pullback:  # which keeps memory of its own
                    before.values[slot] = value._replace(tree=tree.owned(value.tree), home=None)


@contextmanager
def _unchanged(homes: Iterable[Tree]) -> Iterator[None]:
    """Afterwards these rows hold what they held before."""
    before = [(home, tree.owned(home)) for home in homes]
    try:
        yield
    finally:
        for home, value in before:
            copy_into(home, value)


def _first_free(form: Form, taken: set[tuple[Form, int | None]]) -> int:
    """The first bank of rows for values of a form that is not taken; it is from now on."""
    home = next(n for n in range(len(taken) + 1) if (form, n) not in taken)
    taken.add((form, home))
    return home


def with_plain_numbers(form: Form, value: Tree) -> Tree:
    """The value with plain numbers where its form has them; the host waits for those."""
    if not any(type(a) in NUMBERS for a in tree.leaves(form.bare)):
        return value
    return tree.map(lambda a, bare: a.item() if type(bare) in NUMBERS else a, value, form.bare)
