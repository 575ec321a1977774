"""The terms on which a device takes part in a run: what servers may ask, how often, and how much work it may be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from math import inf
from pathlib import Path
from typing import Protocol

from cutlayer.core import keys
from cutlayer.errors import ConfigError, LawError
from cutlayer.remote.device import tally
from cutlayer.remote.device.conversation import Conversation, Follower
from cutlayer.remote.protocol.messages import Work

UNWRITTEN = 1.0  # most seconds of work that a restart forgets: a write after each mini-batch would take too long


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a run may cost a device."""

    attempts: int = 3  # times that a round may be played with the device's data
    round_seconds: float = inf  # of work in one attempt at a round
    day_seconds: float = inf  # of work within a day

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 255:
            raise ConfigError(f"attempts is {self.attempts}; it must be from 1 to 255")
        for name in ("round_seconds", "day_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


class UsedUp(LawError):
    """A round that was played as often as the device allows."""


class Attempts:
    """Counts how often each round was played with the device's samples; a file, if it has one, outlives a restart."""

    def __init__(self, rounds: int, most: int, file: Path | None = None) -> None:
        self.rounds, self.most, self.file = rounds, most, file
        self._counts: dict[str, int] = {}
        self._read()

    def check(self, round: int, *, tests: bool) -> None:
        """Refuse a round that the run does not have, or that was played as often as this device allows."""
        if not 0 <= round < self.rounds + tests:
            raise LawError(f"the server asks for round {round + 1}, but this device's own run has {self.rounds}")
        self._read()
        count = self.played(round, tests=tests)
        if count >= self.most:
            # A server is told too, so the place of the file is not part of it.
            done = f"tested the model in round {round + 1}" if tests else f"played round {round + 1}"
            times = {1: "once", 2: "twice", 3: "three times"}.get(count, f"{count} times")
            raise UsedUp(f"this device has already {done} {times}, its limit; join with --attempts N to allow more")

    def played(self, round: int, *, tests: bool) -> int:
        """Return how often a round was played."""
        return self._counts.get(_name(round, tests), 0)

    def count(self, round: int, *, tests: bool) -> None:
        """Note an attempt, before it loads any sample."""
        name = _name(round, tests)
        self._counts[name] = self.played(round, tests=tests) + 1
        if self.file is not None:
            tally.write(self.file, self._counts)

    def _read(self) -> None:
        """Take over what the same run has counted in the file under another number of rounds."""
        for name, count in ({} if self.file is None else tally.read(self.file)).items():
            self._counts[name] = max(int(count), self._counts.get(name, 0))


def _name(round: int, tests: bool) -> str:
    return f"{'tests of' if tests else 'training in'} round {round + 1}"


class Day:
    """The seconds that a device has worked today; a file, if it has one, outlives a restart."""

    def __init__(self, file: Path | None = None, today: Callable[[], date] = date.today) -> None:
        self.file, self._today = file, today
        self._seconds = {} if file is None else tally.read(file)  # by date, today's alone
        self._written = self.seconds

    @property
    def seconds(self) -> float:
        return self._seconds.get(self._today().isoformat(), 0.0)

    def worked(self, seconds: float) -> float:
        """Note seconds of work; return those of this day."""
        today = self._today().isoformat()
        total = self._seconds.get(today, 0.0) + seconds
        self._seconds = {today: total}
        if self.file is not None and not self._written <= total < self._written + UNWRITTEN:
            tally.write(self.file, self._seconds)
            self._written = total
        return total


class Conversations(Protocol):
    """What servers may ask in training."""

    any_round: Conversation  # as far as it is known in advance

    def __call__(self, round: int) -> Conversation:
        """Return what they may ask in this round."""


@dataclass(kw_only=True)
class Terms:
    """What a device agrees to in one run."""

    seed: int  # of the run: keys of rounds follow from it
    conversation: Conversations
    tests: Conversation | None = None  # about the samples that the device holds for testing
    attempts: Attempts
    allowance: Allowance = field(default_factory=Allowance)
    day: Day = field(default_factory=Day)

    def begun(self, work: Work) -> Follower:
        """Check the beginning of a round, and return what follows it."""
        self._check_day(self.day.seconds)
        self.attempts.check(work.round, tests=work.tests)
        round, tests, purpose = work.round, work.tests, "tests" if work.tests else "round"
        if work.key != keys.fold(self.seed, purpose, work.round):
            raise LawError(f"the key of round {work.round + 1} is not that of this device's own run")
        conversation = self.tests if tests else self.conversation(round)
        if conversation is None:
            raise LawError("this device holds no samples for testing")
        return Follower(conversation, round=work.round, touched=lambda: self.attempts.count(round, tests=tests))

    @property
    def most(self) -> tuple[int, int]:
        """The most bytes of the tensors and of the header of a message."""
        known = [self.conversation.any_round, *([] if self.tests is None else [self.tests])]
        return max(one.most_bytes for one in known), max(one.most_header for one in known)

    def worked(self, seconds: float, in_round: float) -> None:
        """Note seconds of work; raise an error if there are more than the device gives."""
        in_day = self.day.worked(seconds)
        if in_round > self.allowance.round_seconds:
            raise LawError(f"this device works at most {self.allowance.round_seconds:g} seconds in a round")
        self._check_day(in_day)

    def _check_day(self, seconds: float) -> None:
        if seconds >= self.allowance.day_seconds:
            raise LawError(f"this device works at most {self.allowance.day_seconds:g} seconds a day")
