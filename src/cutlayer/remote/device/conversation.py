"""What servers may ask of a device in a run, as data, and the check of each command against it.

In a `Line`, the origin of each argument stands in place of its slot: what came down under a kind, the device's own
data, or the result of a function. Lines form passages, each of which ends where a value goes up or the next mini-batch
is loaded. A round is a walk from passage to passage; the conversation lists those that may follow each other. It is
found by playing the method's rounds in advance (`remote/joining`), so a device that has only this data, and no code of
the method, could check a server as well.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.codec import Coded
from cutlayer.core.crossing import OF_CROSSINGS
from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, KINDS, LABELS
from cutlayer.core.tree import Tree
from cutlayer.errors import LawError
from cutlayer.remote.protocol import commands as c

KIND_NAMES = frozenset(kind.name for kind in KINDS)
BY_SAMPLE = frozenset(kind.name for kind in (ACTIVATIONS, GRADIENTS, LABELS))  # whose tensors have a row per sample
OLDEST = 9  # ages are told apart up to this one

Content = Tree | int | None  # what a command takes: a value that came, or the number of a step or of a seed
Arrived = (c.Put, c.Get)


class Line(NamedTuple):
    """One command, with origins in place of slots."""

    verb: str
    name: str  # of the function, field or kept value; the kinds of what comes or goes
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()

    def __str__(self) -> str:
        match self.verb:
            case "put":
                return f"receive {self.name}"
            case "get":
                return f"receive {self.name} from the fed server"
            case "up" | "deliver":
                given = zip(self.name.split(), self.takes, strict=True)
                to = "" if self.verb == "up" else " to the fed server"
                return f"send {', '.join(f'{value} as {kind}' for kind, value in given)}{to}"
            case "batch":
                return f"load {self.name} mini-batch"
            case "pull":
                return f"back-propagate {self.takes[1]} through {self.takes[0].removeprefix('pullback of ')}"
            case "field":
                return f"take {self.gives[0]}"
            case "key":
                return "make the key of the step"
            case "own":
                return "make this device's seed"
        return f"{self.verb} {self.name}({', '.join(self.takes)})" if self.takes else f"{self.verb} {self.name}"


Passage = tuple[Line, ...]
END = "the end of the round"


class Reader:
    """Reads the commands of one round: remembers the origin of the value in each slot."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[str, int]] = {}
        self._made: Counter[str] = Counter()  # values by origin
        self.step = -1  # of the last mini-batch

    @property
    def num_slots(self) -> int:
        """The number of slots that hold a value."""
        return len(self._slots)

    def copy(self) -> "Reader":
        other = Reader()
        other._slots, other._made, other.step = dict(self._slots), Counter(self._made), self.step
        return other

    def line(self, command: c.AnyCommand, content: Content = None, kind: str = "") -> Line | None:
        """Return a command as a line; None if it only frees a slot."""
        match command:
            case c.Free():
                return None
            case c.Put() | c.Get():
                return self._line(command, kind, (), kind)
            case c.Key():
                return self._line(command, "", (), "key")
            case c.Own():
                return self._line(command, "", (), "own seed")
            case c.Batch():
                name = "the first" if content == 0 else "the next" if content == self.step + 1 else "another"
                return self._line(command, name, (), "x", "y")
            case c.Do(_, name, arguments):
                return self._line(command, name, arguments, name)
            case c.Vjp(_, _, name, arguments):
                return self._line(command, name, arguments, name, f"pullback of {name}")
            case c.Grad(_, name, arguments, cut):
                what = name if cut is None else f"{name} and argument {cut + 1}"
                return self._line(command, what, arguments, f"gradients of {name}")
            case c.Pull(_, pullback, gradient):
                return self._line(command, "", (pullback, gradient), f"gradients through {self._function(pullback)}")
            case c.Field(_, of, name):
                return self._line(command, name, (of,), f"{self._origin(of)}.{name}")
            case c.KeepValue(_, name, value):
                return self._line(command, name, (value,), f"kept {name}")
            case c.RecallValue(_, name):
                return self._line(command, name, (), f"kept {name}")
            case c.Up(kinds, slots) | c.Deliver(kinds, slots):
                return self._line(command, " ".join(kinds), slots)

    def _line(self, command: c.AnyCommand, name: str, slots: Iterable[int], *gives: str) -> Line:
        takes = tuple(self._argument(slot) for slot in slots)
        return Line(str(command.__struct_config__.tag), name, takes, gives)

    def note(self, command: c.AnyCommand, line: Line | None, content: Content = None) -> None:
        """Note what a command has made, and where; it was read as this line."""
        match command:
            case c.Free(slot):
                self._slots.pop(slot, None)
            case c.Batch(x, y):
                self._made_at(line, x, y)
                self.step = content if isinstance(content, int) else -1
            case c.Vjp(out, pullback):
                self._made_at(line, out, pullback)
            case c.Up() | c.Deliver():
                pass
            case _:
                self._made_at(line, command.out)

    def _made_at(self, line: Line | None, *slots: int) -> None:
        for slot, origin in zip(slots, () if line is None else line.gives, strict=True):
            self._slots[slot] = (origin, self._made[origin])
            self._made[origin] += 1

    def _function(self, pullback: int) -> str:
        return self._origin(pullback).removeprefix("pullback of ")

    def _origin(self, slot: int) -> str:
        return self._slots.get(slot, ("nothing", 0))[0]

    def _argument(self, slot: int) -> str:
        """Return the origin of a value, and which of the values of this origin it is unless it is the newest."""
        if slot not in self._slots:
            return "nothing"
        origin, number = self._slots[slot]
        age = self._made[origin] - number - 1
        if not age:
            return origin
        # How many values come may depend on the rounds that a device has missed.
        first = not number and origin in KIND_NAMES
        return f"{origin}, {'the first' if first else f'{min(age, OLDEST)} before the last'}"


def passages(lines: Sequence[Line]) -> Iterator[Passage]:
    """Cut the lines of a round into passages."""
    begin = 0
    for at, (line, following) in enumerate(pairwise(lines), start=1):
        if line.verb in ("up", "deliver") or following.verb in ("batch", "recall"):
            yield tuple(lines[begin:at])
            begin = at
    if lines:
        yield tuple(lines[begin:])


def form_of(kind: str, value: Tree) -> Hashable:
    """Return what all values of this kind have in common: structure, types, and shapes but for the rows of a batch."""
    if kind not in BY_SAMPLE:
        return tree.signature(value)
    return tree.signature(tree.replace(Coded, _with_rows_first, value), stacked=True)


def _with_rows_first(coded: Coded) -> Coded:
    """Return a code with the samples of its tensor, which stand behind an empty axis, before it."""
    has_rows = isinstance(coded.like, Tensor) and coded.like.dim() > 1
    return coded._replace(like=coded.like.movedim(1, 0)) if has_rows else coded


class Pin(NamedTuple):
    """What a plain number that comes down is, as far as the device's own run tells."""

    is_round: bool = False  # the number of the round
    value: int | None = None  # the same in all rounds

    def holds(self, value: Content, round: int) -> bool:
        expected = round if self.is_round else self.value
        return expected is None or (type(value) is int and value == expected)

    def __str__(self) -> str:
        if self.is_round:
            return "the number of the round"
        return "any number" if self.value is None else str(self.value)


FREE = Pin()


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What servers may ask of one device in a round."""

    passages: tuple[Passage, ...]
    begins: frozenset[int]  # the passages that a round may begin with, by number
    follows: Mapping[int, frozenset[int]]  # by passage: those that may come next
    forms: Mapping[str, frozenset[Hashable]]  # by kind: of what comes down
    leaves: Mapping[str, frozenset[Hashable]]  # by kind: forms of what goes up
    free: frozenset[str] = frozenset()  # kinds whose form depends on choices that are made during the run
    batch_sizes: tuple[int, int]  # from, to
    settings: tuple["Pin", ...] = ()  # what the plain numbers are that come down, in this order; then the last one
    num_steps: int  # mini-batches in a round with the smallest batches
    samples: int = 0  # that the device holds
    batching: Batching | None = None  # by which they make up a round; None if the method counts the mini-batches
    num_loads: int  # times that a round begins with its first mini-batch
    num_seeds: int  # times that a seed of the client alone is made under the same number
    num_recalls: int  # times that a client recalls what it keeps: if it was away, it replays a log
    num_sent: Mapping[str, int]  # by the kinds of an answer: times that it is sent in a round
    most_slots: int  # that hold values at a time
    most_bytes: int  # of the tensors of a message
    most_header: int  # bytes of a message without its tensors
    sent: int  # bytes that leave in a round; an estimate if there are choices

    def most_steps(self, size: int) -> int:
        """Return how many mini-batches of this size make up a round."""
        return self.num_steps if self.batching is None else self.batching.per_round(self.samples, size)

    @property
    def kinds(self) -> list[str]:
        """What leaves the device, in the order in which it does."""
        up = (line.name.split() for passage in self.passages for line in passage if line.verb in ("up", "deliver"))
        return list(dict.fromkeys(kind for kinds in up for kind in kinds))


@dataclass
class Follower:
    """Follows one round beside the server, and refuses what the conversation does not have at this place."""

    conversation: Conversation
    round: int = 0
    touched: Callable[[], None] = lambda: None  # called before the first of the device's samples is loaded
    _size: int = field(default=0, init=False)  # of the last mini-batch
    _number: int = field(default=0, init=False)  # of its step in the round, and by how much others have been ahead
    _lag: int = field(default=0, init=False)
    _crossing: int = field(default=OF_CROSSINGS, init=False)  # number of the last seed for a codec
    _is_touched: bool = field(default=False, init=False)
    _readers: list[tuple[Reader, frozenset[tuple[int, int]]]] = field(init=False)  # with the possible next lines
    _loads: int = field(default=0, init=False)
    _recalls: int = field(default=0, init=False)
    _seeds: Counter[Content] = field(default_factory=Counter, init=False)  # of the device alone, by number
    _settings: int = field(default=0, init=False)  # plain numbers that have come
    _sent: Counter[str] = field(default_factory=Counter, init=False)  # answers, by their kinds

    def __post_init__(self) -> None:
        self._readers = [(Reader(), frozenset((passage, 0) for passage in self.conversation.begins))]

    def follow(self, command: c.AnyCommand, content: Content = None) -> None:
        """Check the next command of the round.

        `content` is the value that came, the step of a mini-batch, or the number of a seed.
        """
        if isinstance(command, c.Free):
            for reader, _ in self._readers:
                reader.note(command, None)
            return
        after = [pair for reader, places in self._readers for pair in self._after(reader, places, command, content)]
        if not after:
            asked = self._readers[0][0].line(command, content, "a value that does not belong here")
            raise LawError(f"this device's own run has {self._expected()} here, but the server asks for: {asked}")
        self._check_number(command, content)
        self._readers = after
        self._count(command, content)
        if isinstance(command, c.Batch) and not self._is_touched:
            self._is_touched = True
            self.touched()

    def check_batch(self, size: int, step: int, number: int) -> None:
        """Check the size and the number of a mini-batch, and that of its step in the round, against the own run."""
        least, most = self.conversation.batch_sizes
        if not least <= size <= most:
            sizes = f"of {most}" if least == most else f"of {least} to {most}"
            raise LawError(f"this device's own run has batches {sizes} samples, but the server asks for {size}")
        steps = self.conversation.most_steps(size)
        if step >= steps:
            raise LawError(
                f"this device's own run has {steps} mini-batches in a round, but the server asks for number {step + 1}"
            )
        if step and self._size and size != self._size:
            raise LawError(f"a round goes on with batches of {self._size} samples, but the server asks for {size}")
        lag = self._lag if step else 0
        if not (number - step == lag or (number - step > lag and self._begins_epoch(size, step))):
            raise LawError(
                f"mini-batch {step + 1} belongs to step {step + lag + 1}, but the server asks for {number + 1}"
            )
        self._size, self._number, self._lag = size, number, number - step

    def _begins_epoch(self, size: int, step: int) -> bool:
        """Return whether an epoch begins here, so that the device may have waited for others."""
        batching = self.conversation.batching
        return batching is not None and step % batching.per_epoch(self.conversation.samples, size) == 0

    def _check_number(self, command: c.AnyCommand, content: Content) -> None:
        """Check the numbers that keys and seeds are derived from, and plain numbers that come down."""
        if isinstance(command, c.Own) and isinstance(content, int) and content > self._crossing:
            self._crossing = content
        elif isinstance(command, c.Own | c.Key) and content != self._number:
            raise LawError(f"this is step {self._number + 1} of the round, but the server asks for another number")
        elif isinstance(command, Arrived) and isinstance(content, int | float):
            pins = self.conversation.settings
            pin = pins[min(self._settings, len(pins) - 1)] if pins else FREE
            self._settings += 1
            if not pin.holds(content, self.round):
                raise LawError(f"the setting here is {pin} in this device's own run, but the server sends {content}")

    def check_leaving(self, kinds: Sequence[str], values: Sequence[Tree]) -> None:
        """Check that values have the form that they have in the device's own run: layers may depend on a setting."""
        known, free = self.conversation.leaves, self.conversation.free
        for kind, value in zip(kinds, values, strict=True):
            if kind not in free and form_of(kind, value) not in known.get(kind, ()):
                raise LawError(f"these {kind} have another form than in this device's own run")
        answer = " ".join(kinds)
        self._sent[answer] += 1
        if self._sent[answer] > self.conversation.num_sent.get(answer, 0):
            raise LawError(
                f"{', '.join(kinds)} leave {self._sent[answer] - 1} times in a round of this device's own run"
            )

    def _after(
        self, reader: Reader, places: frozenset[tuple[int, int]], command: c.AnyCommand, content: Content
    ) -> Iterator[tuple[Reader, frozenset[tuple[int, int]]]]:
        """Yield the reader after this command and the lines that may follow; one for each kind that it may be."""
        kinds = self._kinds(places, command, content)
        for kind in kinds:
            line = reader.line(command, content, kind)
            matched = [(passage, at) for passage, at in places if self.conversation.passages[passage][at] == line]
            if matched:
                own = reader.copy() if len(kinds) > 1 else reader
                own.note(command, line, content)
                yield own, frozenset(place for passage, at in matched for place in self._next(passage, at))

    def _kinds(self, places: Iterable[tuple[int, int]], command: c.AnyCommand, content: Content) -> list[str]:
        if not isinstance(command, Arrived):
            return [""]
        verb = command.__struct_config__.tag
        lines = (self.conversation.passages[passage][at] for passage, at in places)
        kinds = sorted({line.name for line in lines if line.verb == verb})
        return [kind for kind in kinds if self._fits(kind, content)]

    def _fits(self, kind: str, value: Tree) -> bool:
        return kind in self.conversation.free or form_of(kind, value) in self.conversation.forms.get(kind, ())

    def _next(self, passage: int, at: int) -> list[tuple[int, int]]:
        if at + 1 < len(self.conversation.passages[passage]):
            return [(passage, at + 1)]
        return [(other, 0) for other in self.conversation.follows.get(passage, ())]

    def _count(self, command: c.AnyCommand, content: Content) -> None:
        """Limit what the order of passages alone would allow again and again."""
        if max(reader.num_slots for reader, _ in self._readers) > self.conversation.most_slots:
            raise LawError(f"the server keeps more than {self.conversation.most_slots} values in slots")
        self._loads += isinstance(command, c.Batch) and content == 0
        self._recalls += isinstance(command, c.RecallValue)
        loads, recalls = self.conversation.num_loads, self.conversation.num_recalls
        again = self._loads > loads or self._recalls > recalls
        if isinstance(command, c.Own):  # two values with the noise of one seed: their difference has none
            self._seeds[content] += 1
            again |= self._seeds[content] > self.conversation.num_seeds
        if again:
            raise LawError("the server asks again for what this device's own run has only once in a round")

    def _expected(self) -> str:
        lines = {self.conversation.passages[passage][at] for _, places in self._readers for passage, at in places}
        return " or ".join(f"'{line}'" for line in sorted(lines)) or END
