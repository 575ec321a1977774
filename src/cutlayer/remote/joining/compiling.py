"""Finds what servers may ask of a device in a run: plays rounds of all sorts, and joins what was heard in them."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from itertools import pairwise, zip_longest
from types import MappingProxyType
from typing import Any

import torch

from cutlayer.core import keys, tree
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.codec import Coder
from cutlayer.core.crossing import NO_CODECS, Seam
from cutlayer.core.kinds import Kind
from cutlayer.core.method import Method, needs_of
from cutlayer.core.places import Clients, World
from cutlayer.core.precision import Precision, computing
from cutlayer.core.program import Program
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import State
from cutlayer.data.arrays import Arrays
from cutlayer.errors import UsageError
from cutlayer.remote.device.conversation import FREE, Conversation, Passage, Pin, passages
from cutlayer.remote.joining.rehearsal import Absent, Heard, Recorder, ShapesBridge, Understudy
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.sessions import RoundId, Sessions
from cutlayer.remote.server.shape_runner import ShapeRunner
from cutlayer.runs.examination import BATCHES, Examination

# In which rounds the device takes part, and in which it has lost what it kept.
PRESENT, AWAY, FORGETS = "present", "away", "forgets"
SCRIPT = (PRESENT, PRESENT, PRESENT, AWAY, PRESENT, AWAY, AWAY, AWAY, PRESENT, FORGETS, PRESENT)
SHORT = 40  # mini-batches up to which a round is played as it is;
PASSES = 3  # of a longer one so many passes over so many batches
FEW = (2, 3)  # samples with which rounds are played, too, if the method chooses batch sizes
MOST_CLIENTS = 3
ROOM = 2**18  # bytes that a message may be longer than what was heard: numbers and padding differ
MORE_SLOTS = 16  # than were heard: a server frees them when Python collects its handles
REPLAYED = 1024  # bytes for each round that a client has missed and replays
MODELS_WORTH = 4  # of a method that moves the cut, a message may be as large as so many models


@dataclass(frozen=True, kw_only=True)
class Taking:
    """How a device takes part in a run."""

    method: Method
    coders: Mapping[Kind, Coder] = field(default_factory=lambda: MappingProxyType({}))
    like: Arrays  # two samples, as all are
    batching: Batching
    client: int
    samples: int
    clients: int  # of the run
    rounds: int
    seed: int
    precision: Precision = "fp32"
    two_servers: bool = False


class Stage:
    """Plays rounds of one program with clients that all answer."""

    def __init__(self, taking: Taking, program: Program, coders: Mapping[Kind, Coder]) -> None:
        self.taking, self.program, self.coders = taking, program, coders
        self._shapes, self._engine, self._bridge = ShapeRunner(program, taking.like), Understudy(), ShapesBridge()

    def servers(self) -> tuple[Server, Fed]:
        return Server(self._engine, bridge=self._bridge), Fed(self._engine, bridge=self._bridge)

    def begun(
        self, round: int, key: int, samples: Mapping[int, int], batching: Batching, kept: KnownVersions
    ) -> tuple[Recorder, Clients, Server, Fed]:
        """Begin a round; the transport records what the device is asked in it."""
        recorder = Recorder(
            own=self.taking.client,
            sessions=Sessions(),
            program=self.program,
            shapes=self._shapes,
            kept=kept,
            round=RoundId.drawn(round, key),
            ids=tuple(samples),
            deadline=0.0,
            peer=Absent(self.taking.two_servers),
            engines={"server": self._engine, "fed": self._engine},
        )
        server, fed = self.servers()
        world = World(
            program=self.program,
            transport=recorder,
            walk=partial(Walk, batching, {j: range(num) for j, num in samples.items()}, key),
            sizes={j: float(num) for j, num in samples.items()},
            key=key,
            seam=Seam(self.coders, key, {"server": server, "fed": fed}) if self.coders else NO_CODECS,
        )
        return recorder, Clients(world, tuple(samples)), server, fed


class Rehearsal:
    """Plays the rounds of a run, in which the device meets all that may happen to it."""

    def __init__(self, taking: Taking) -> None:
        self.taking, self.needs = taking, needs_of(taking.method)
        self._stage = Stage(taking, Program(taking.method, taking.coders), taking.coders)

    @torch.no_grad()
    def script(self) -> Iterator[Heard]:
        """Yield what the device is asked in rounds of all sorts."""
        own = self.taking.samples
        yield from self._rounds(self._short(own))
        for samples in (*FEW, PASSES * largest_batch(self.taking) + 1) if self.needs.chooses_batches else ():
            with suppress(UsageError):  # too few for this method
                yield from self._rounds(samples)
        for number in sorted(_counts(self.taking.method)):
            for round in (number - 1, number):
                with suppress(UsageError):
                    yield from self.first_time_in(round)

    @torch.no_grad()
    def first_time_in(self, round: int) -> Iterator[Heard]:
        """Yield what the device is asked if it takes part for the first time in this round."""
        if round < self.taking.rounds:
            state = self._start()._replace(round=round)
            yield self._played(state, KnownVersions(), self._short(self.taking.samples))[0]

    def _rounds(self, samples: int) -> Iterator[Heard]:
        state, kept = self._start(), KnownVersions()
        for now in SCRIPT:
            if now == FORGETS:
                kept.joined(self.taking.client, ())
            away = now == AWAY
            if away and self.taking.clients <= self.needs.fewest_clients:
                continue  # no round without this client
            heard, state = self._played(state, kept, samples, away=away)
            if not away:
                yield heard

    def _start(self) -> State:
        return self.taking.method.start(*self._stage.servers())

    def _played(self, state: State, kept: KnownVersions, samples: int, *, away: bool = False) -> tuple[Heard, State]:
        taking, own = self.taking, self.taking.client
        others = [j for j in range(taking.clients) if j != own][: MOST_CLIENTS - 1 + away]
        enough = PASSES * taking.batching.size + 1  # for whatever a method does with the others' samples
        present = {j: samples if j == own else enough for j in sorted((own, *others))}
        if away:
            del present[own]
        key = keys.fold(taking.seed, "round", state.round)
        recorder, clients, server, fed = self._stage.begun(state.round, key, present, self._batching, kept)
        with computing(taking.precision):
            after = taking.method.round(state, clients, server, fed)
        recorder.finish()
        return recorder.record, after

    def _short(self, samples: int) -> int:
        """Return fewer samples, with the same last batch, if a round has many mini-batches."""
        size = self.taking.batching.size
        return min(samples, PASSES * size + samples % size) if self._is_long(samples) else samples

    def _is_long(self, samples: int) -> bool:
        batching = self.taking.batching
        return not self.needs.counts_steps and batching.per_round(samples, batching.size) > SHORT

    @property
    def _batching(self) -> Batching:
        batching = self.taking.batching
        if not self._is_long(self.taking.samples):
            return batching
        steps = None if batching.steps is None else min(batching.steps, SHORT)
        return replace(batching, epochs=min(batching.epochs, PASSES), steps=steps)


class Learned:
    """The conversation of a run. Where a method moves the cut, what a round asks for depends on its number."""

    def __init__(self, taking: Taking) -> None:
        self._rehearsal = Rehearsal(taking)
        self._heard = list(self._rehearsal.script())
        busiest = self._rehearsal.needs.busiest
        if busiest is not None:
            self._heard += Rehearsal(replace(taking, method=busiest)).script()
        self._round = -1  # that was played last
        self.any_round = self._now = about_training(self._heard, taking)

    def __call__(self, round: int) -> Conversation:
        if self._rehearsal.needs.moves_cut and round != self._round:
            self._round, heard = round, list(self._rehearsal.first_time_in(round))
            if self._rehearsal.needs.draws_cut:
                self._now = about_training(heard, self._rehearsal.taking)
            elif not all(_has(self._now, one) for one in heard):
                self._heard += heard
                self._now = about_training(self._heard, self._rehearsal.taking)
        return self._now


def _has(conversation: Conversation, heard: Heard) -> bool:
    """Return whether a conversation has all that was heard in a round, in this order."""
    number = {passage: k for k, passage in enumerate(conversation.passages)}
    asked = [number.get(passage, -1) for passage in passages(heard.lines)]
    follows = all(after in conversation.follows.get(now, ()) for now, after in pairwise(asked))
    return follows and -1 not in asked and set(asked[:1]) <= conversation.begins


def largest_batch(taking: Taking) -> int:
    size = taking.batching.size
    return max(size, min(needs_of(taking.method).largest_batch or size, taking.samples))


def about_training(heard: Iterable[Heard], taking: Taking) -> Conversation:
    """Return what servers may ask in the rounds of a run."""
    needs, size = needs_of(taking.method), taking.batching.size
    least = 1 if needs.chooses_batches else size
    found = _joined(heard, batch_sizes=(least, largest_batch(taking)))
    if not needs.counts_steps:
        steps = taking.batching.per_round(taking.samples, least)
        longer = max(-(-steps // found.num_steps), 1)  # than what was played
        found = replace(
            found,
            num_steps=steps,
            samples=taking.samples,
            batching=taking.batching,
            num_sent=_times(longer, found.num_sent),
            most_header=longer * found.most_header,
            sent=longer * found.sent,
        )
    if needs.chooses_batches:  # in one round the method may look at more batches than in any that was played
        found = replace(
            found,
            num_loads=2 * found.num_loads,
            num_seeds=2 * found.num_seeds,
            num_sent=_times(2, found.num_sent),
        )
    if found.num_recalls:  # a client that was away replays a log
        most = taking.rounds * REPLAYED
        found = replace(
            found,
            num_recalls=found.num_recalls + taking.rounds,
            most_header=found.most_header + most,
            most_bytes=found.most_bytes + most,
        )
    if not needs.moves_cut:
        return found
    model = tree.num_bytes(taking.method.model.initial())
    found = replace(found, most_bytes=found.most_bytes + MODELS_WORTH * model)
    if needs.draws_cut:  # what was heard in a round is all that it may ask
        return found
    pins = tuple(pin if pin.is_round else FREE for pin in found.settings)
    return replace(found, free=frozenset((*found.forms, *found.leaves)), settings=pins)


@torch.no_grad()
def about_tests(examination: Examination, taking: Taking, num: int) -> Conversation:
    """Return what servers may ask about the samples that a device holds for testing."""
    stage, size = Stage(taking, Program(examination), {}), examination.batch_size(num)
    recorder, clients, server, fed = stage.begun(0, 0, {taking.client: num}, BATCHES, KnownVersions())
    lower, upper = taking.method.model.initial()
    with computing(taking.precision), suppress(Exception):  # the figures, at the very end, may need a content
        examination.figures(lower.joined(upper), clients, server, fed, tree.zeros)
    return _joined([recorder.record], batch_sizes=(size, size))


def _joined(heard: Iterable[Heard], batch_sizes: tuple[int, int]) -> Conversation:
    """Join what was heard in several rounds to what may be asked in any."""
    begins: set[Passage] = set()
    follows: dict[Passage, set[Passage]] = {}
    forms: dict[str, set[Hashable]] = {}
    leaves: dict[str, set[Hashable]] = {}
    steps, loads, recalls = 0, 0, 0
    num_sent: Counter[str] = Counter()
    everything = list(heard)
    for one in everything:
        found = list(passages(one.lines))
        begins.update(found[:1])
        for passage in found:
            follows.setdefault(passage, set())
        for passage, after in pairwise(found):
            follows[passage].add(after)
        for kind, form in one.forms:
            forms.setdefault(kind, set()).add(form)
        for kind, form in one.leaves:
            leaves.setdefault(kind, set()).add(form)
        steps, loads = max(steps, 0, *one.steps), max(loads, one.steps.count(0))
        recalls = max(recalls, sum(line.verb == "recall" for line in one.lines))
        num_sent |= Counter(line.name for line in one.lines if line.verb in ("up", "deliver"))
    rows = batch_sizes[1] * max(one.per_row for one in everything)
    number = {passage: k for k, passage in enumerate(follows)}
    return Conversation(
        passages=tuple(follows),
        begins=frozenset(number[passage] for passage in begins),
        follows={number[passage]: frozenset(number[a] for a in after) for passage, after in follows.items()},
        forms={kind: frozenset(found) for kind, found in forms.items()},
        leaves={kind: frozenset(found) for kind, found in leaves.items()},
        batch_sizes=batch_sizes,
        settings=_pins(everything),
        num_steps=steps + 1,
        num_loads=loads,
        num_recalls=recalls,
        num_sent=num_sent,
        num_seeds=max((n for one in everything for n in one.seeds.values()), default=0),
        most_slots=MORE_SLOTS + 2 * max(one.slots for one in everything),
        most_bytes=ROOM + rows + max(one.whole for one in everything),
        most_header=ROOM + 4 * max(one.header for one in everything),
        sent=max(one.up for one in everything),
    )


def _pins(heard: Sequence[Heard]) -> tuple[Pin, ...]:
    """Return what each plain number that came down is, as far as all rounds agree."""
    columns = zip_longest(*([(value, one.round) for value in one.settings] for one in heard))
    return tuple(_pin([pair for pair in column if pair is not None]) for column in columns)


def _pin(observed: Sequence[tuple[Any, int]]) -> Pin:
    if all(value == round for value, round in observed):
        return Pin(is_round=True)
    values = {value for value, _ in observed}
    return Pin(value=values.pop()) if len(values) == 1 and all(type(v) is int for v in values) else FREE


def _times(factor: int, counts: Mapping[str, int]) -> dict[str, int]:
    return {name: factor * count for name, count in counts.items()}


def _counts(owner: object) -> set[int]:
    """Return the whole numbers among the options of a method and its pieces: something may happen in such a round."""
    found: set[int] = set()
    for option in fields(owner) if is_dataclass(owner) else ():
        value = getattr(owner, option.name)
        if type(value) is int and value > 1:
            found.add(value)
        elif is_dataclass(value):
            found |= _counts(value)
    return found
