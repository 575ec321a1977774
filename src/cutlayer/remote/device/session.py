"""A client's side of one session: work comes in, an answer or a refusal goes out."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import keys, tree
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.precision import Precision
from cutlayer.core.program import Program
from cutlayer.core.transport import Augmentation
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.engines.local import Local
from cutlayer.engines.loop import Loop
from cutlayer.errors import CutlayerError, LawError
from cutlayer.remote.device.audit import Audit
from cutlayer.remote.device.store import ClientStore
from cutlayer.remote.device.terms import Attempts, Terms, UsedUp
from cutlayer.remote.device.worker import Round, WorkError, walk_of
from cutlayer.remote.protocol.commands import AnyCommand, Deliver, Up
from cutlayer.remote.protocol.messages import MOST_LISTS, Answer, Refusal, TensorForm, Work
from cutlayer.remote.tensors.trees import flatten
from cutlayer.runs.examination import BATCHES, Examination

log = logging.getLogger("cutlayer")

Batches = Callable[[Mapping[int, int]], Walk]  # by the size of each client's batch
# Rounds of this process: with a secret, no two have the same seeds, whatever keys a server chooses.
PLAYED = itertools.count()


class Reply(NamedTuple):
    """A client's message and its tensors."""

    message: Answer | Refusal
    tensors: list[Tensor]
    to_fed: bool = False  # whether it goes to a separate fed server
    is_last: bool = False  # whether the device leaves the run with it


@dataclass(frozen=True)
class OwnTests:
    """Samples that a client holds for testing the global model, and how it tests."""

    data: Arrays
    examination: Examination

    def __len__(self) -> int:
        return len(self.data)

    @cached_property
    def program(self) -> Program:
        return Program(self.examination)


@dataclass(frozen=True, kw_only=True)
class ClientDevice:
    """A client: its own copy of the method, its data, the values that it keeps, and what it never sends."""

    client: int
    program: Program
    data: Arrays
    tests: OwnTests | None = None
    batching: Batching
    store: ClientStore
    augment: Augmentation | None = None
    precision: Precision = "fp32"
    never: frozenset[str] = frozenset()
    secret: str | None = None  # mixed into the client's own seeds, so that no server can know them
    clients: int = 0  # of the run
    terms: Terms | None = None  # what servers may ask; None trusts them to ask for what the method does
    audit: Audit | None = None  # records what leaves


@dataclass
class Session:
    """One session of a device with a server."""

    device: ClientDevice
    number: int
    fed_values: Callable[[int, int], Tree] | None = None  # by token and number, from a separate fed server
    _lists: dict[int, tuple[AnyCommand, ...]] = field(default_factory=dict)
    _round: Round | None = None
    _begun: Work | None = None  # how the round began
    _seconds: float = 0.0  # of work in this round
    _last: int = 0  # number of the newest work
    _repeats: bool = False  # whether a round was played again, which is told once

    def work(self, work: Work, tensors: Sequence[Tensor]) -> Reply | None:
        """Do this work and return the reply; None if it needs none, is of another session, or was done before."""
        if work.session != self.number or work.number <= self._last:
            return None
        self._last = work.number
        begin = time.perf_counter()
        tensors = [a.to(self.device.data.y.device) for a in tensors]
        try:
            commands, leaving = self._done(work, tensors)
        except WorkError as error:
            self._lists.pop(work.list, None)  # what is refused takes no memory
            self._round = None  # a server that is refused cannot go on in the middle of a round
            refusal = self._refusal(work, error.where, self._told(error))
            return Reply(refusal, [], is_last=isinstance(error.__cause__, UsedUp))
        last = commands[-1] if commands else None
        if not isinstance(last, Up | Deliver):
            return None
        flat = flatten(tuple(leaving))
        to_fed = isinstance(last, Deliver)
        answer = Answer(
            session=work.session,
            number=int(work.numbers[-1]) if to_fed else work.number,
            token=work.token,
            seconds=time.perf_counter() - begin,
            numbers=tuple(flat.numbers),
        )
        return Reply(answer, flat.tensors, to_fed)

    def _told(self, error: WorkError) -> str:
        """Return what a server is told of an error; the text of another library's may quote the device's own data."""
        cause = error.__cause__
        if self.device.terms is None or cause is None or isinstance(cause, CutlayerError):
            return error.reason
        log.warning("%s (the server is told only that it failed)", error)
        return f"it failed on this device with {type(cause).__name__}; the device's own log has the details"

    def _refusal(self, work: Work, where: str, reason: str) -> Refusal:
        """Return a refusal, which is on record."""
        if self.device.audit is not None:
            try:
                self.device.audit.refusing(work.round, where, reason)
            except LawError as error:
                where, reason = "the record of what leaves", str(error)
        return Refusal(session=work.session, number=work.number, where=where[:2000], reason=reason[:2000])

    def _done(self, work: Work, tensors: Sequence[Tensor]) -> tuple[tuple[AnyCommand, ...], list[Tree]]:
        """Do the work; return its commands, and what leaves, which is on record."""
        begin = time.perf_counter()
        commands = self._commands(work)
        try:
            leaving = self._round_of(work).run(commands, work.numbers, tensors)
        finally:
            self._check_work(time.perf_counter() - begin)
        last = commands[-1] if commands else None
        if isinstance(last, Up | Deliver) and self.device.audit is not None:
            to = "fed" if isinstance(last, Deliver) else "train"
            with _refusing("the record of what leaves"):
                self.device.audit.leaving(work.round, to, last.kinds, leaving)
        return commands, leaving

    def _check_work(self, seconds: float) -> None:
        self._seconds += seconds
        if self.device.terms is not None:
            with _refusing("the work"):
                self.device.terms.worked(seconds, self._seconds)

    def _commands(self, work: Work) -> tuple[AnyCommand, ...]:
        if work.commands is not None:
            if len(self._lists) >= MOST_LISTS:
                self._lists.clear()
            self._lists[work.list] = work.commands
        if work.list not in self._lists:
            raise WorkError(f"list {work.list}", "it was never sent in this session")
        return self._lists[work.list]

    def _round_of(self, work: Work) -> Round:
        if not work.begins and self._round is not None:
            self._check_same(work)
            return self._round
        device, used = self.device, self._used(work)
        follower = None
        if device.terms is not None:
            with _refusing("the round"):
                follower = device.terms.begun(work)
            self._tell_repeats(work, device.terms.attempts)
        device.store.token, self._begun = work.token, work
        self._seconds = 0.0
        own = work.key if device.secret is None else keys.fold(work.key, device.secret, next(PLAYED))
        self._round = Round(
            client=device.client,
            program=used.program,
            transport=Local(engine=Loop(), data=used.data, kept=device.store, key=own, augment=used.augment),
            walk=used.walk,
            num_samples=len(used.data),
            key=work.key,
            never=device.never,
            precision=device.precision,
            fed_value=None if self.fed_values is None else partial(self.fed_values, work.token),
            follower=follower,
        )
        return self._round

    def _tell_repeats(self, work: Work, attempts: Attempts) -> None:
        count = attempts.played(work.round, tests=work.tests)
        if count and not self._repeats:
            self._repeats = True
            log.warning(
                "round %d is played again with this device's data (attempt %d of %d); rounds after it are not reported",
                work.round + 1,
                count + 1,
                attempts.most,
            )

    def _check_same(self, work: Work) -> None:
        """Check that work goes on with the round that has begun: its attempts are counted under its number."""
        assert self._begun is not None
        for name in ("round", "key", "token", "tests"):
            if getattr(work, name) != getattr(self._begun, name):
                raise WorkError("the round", f"another {name} came than the one that it began with")

    def _used(self, work: Work) -> "Used":
        """Return the training samples with the functions of the method, or the test samples with those of the test."""
        device, tests = self.device, self.device.tests
        if not work.tests:
            walk = walk_of(device.batching, device.client, len(device.data), work.key)
            return Used(device.program, device.data, walk, device.augment)
        if tests is None:
            raise WorkError("the round", "this client holds no samples for testing")
        walk = walk_of(BATCHES, device.client, len(tests), work.key)
        return Used(tests.program, tests.data, _of_size(walk, tests.examination.batch_size(len(tests))), None)


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    """Refuse work that breaks the terms."""
    try:
        yield
    except LawError as error:
        raise WorkError(where, str(error)) from error


class Used(NamedTuple):
    """What a client uses in a round."""

    program: Program
    data: Arrays
    walk: Batches
    augment: Augmentation | None


def _of_size(walk: Batches, size: int) -> Batches:
    """Refuse batches of another size: the figures of a single sample would tell its label."""

    def checked(sizes: Mapping[int, int]) -> Walk:
        for asked in sizes.values():
            if asked != size:
                raise LawError(f"a batch of this client's test has {size} samples; a server asked for {asked}")
        return walk(sizes)

    return checked


def forms_of(data: Arrays) -> tuple[TensorForm, ...]:
    """Return the type and shape of one sample: of its inputs, in the order of their names, then of its target."""
    return tuple(
        TensorForm(str(a.dtype).removeprefix("torch."), tuple(a.shape[1:])) for a in tree.tensors((data.x, data.y))
    )
