"""The terms on which a device takes part in a run: what servers may ask, how often, and how much work it may be."""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from cutlayer.core import keys
from cutlayer.errors import ConfigError, LawError
from cutlayer.remote.device.conversation import Conversation, Follower
from cutlayer.remote.protocol.messages import Work

log = logging.getLogger("cutlayer")

DAY = 24 * 3600.0


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


class Attempts:
    """Counts how often each round was played with the device's samples; a file, if it has one, outlives a restart.

    The file has two bytes for each round: for training, and for testing the model.
    """

    def __init__(self, rounds: int, most: int, file: Path | None = None) -> None:
        self.rounds, self.most, self.file = rounds, most, file
        self._counts = bytearray(2 * (rounds + 1))
        if file is not None and file.exists():
            found = file.read_bytes()[: len(self._counts)]
            self._counts[: len(found)] = found

    def check(self, round: int, *, tests: bool) -> None:
        """Refuse a round that the run does not have, or that was played as often as this device allows."""
        if not 0 <= round < self.rounds + tests:
            raise LawError(f"the server asks for round {round + 1}, but this device's own run has {self.rounds}")
        count = self._counts[self._place(round, tests)]
        if count >= self.most:
            # A server is told too, so the place of the file is not part of it.
            raise LawError(
                f"this device has played round {round + 1} as often as its owner allows ({count}); its owner may join "
                "with a larger --attempts"
            )
        if count:
            log.warning("round %d is played again with this device's data (attempt %d)", round + 1, count + 1)

    def count(self, round: int, *, tests: bool) -> None:
        """Note an attempt, before it loads any sample."""
        place = self._place(round, tests)
        self._counts[place] += 1
        if self.file is not None:
            self._write(place)

    def _place(self, round: int, tests: bool) -> int:
        return 2 * round + tests

    def _write(self, place: int) -> None:
        assert self.file is not None
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, self._counts[place : place + 1], place)
            finally:
                os.close(descriptor)
        except OSError as error:  # what is not counted must not be played
            raise LawError(f"attempts cannot be counted in {self.file}: {error.strerror or error}") from None


class Day:
    """The seconds that a device has worked within a day."""

    def __init__(self) -> None:
        self._begin, self._seconds = -inf, 0.0

    def worked(self, seconds: float) -> float:
        """Note seconds of work; return those of this day."""
        now = time.monotonic()
        if now - self._begin > DAY:
            self._begin, self._seconds = now, 0.0
        self._seconds += seconds
        return self._seconds


@dataclass(kw_only=True)
class Terms:
    """What a device agrees to in one run."""

    seed: int  # of the run: keys of rounds follow from it
    conversation: Callable[[int], Conversation]  # by round
    tests: Conversation | None = None  # about the samples that the device holds for testing
    attempts: Attempts
    allowance: Allowance = field(default_factory=Allowance)
    day: Day = field(default_factory=Day)

    def begun(self, work: Work) -> Follower:
        """Check the beginning of a round, and return what follows it."""
        self.attempts.check(work.round, tests=work.tests)
        round, tests, purpose = work.round, work.tests, "tests" if work.tests else "round"
        if work.key != keys.fold(self.seed, purpose, work.round):
            raise LawError(f"the key of round {work.round + 1} is not that of this device's own run")
        conversation = self.tests if tests else self.conversation(round)
        if conversation is None:
            raise LawError("this device holds no samples for testing")
        return Follower(conversation, touched=lambda: self.attempts.count(round, tests=tests))

    @property
    def most(self) -> tuple[int, int]:
        """The most bytes of the tensors and of the header of a message."""
        known = [self.conversation(0), *([] if self.tests is None else [self.tests])]
        return max(one.most_bytes for one in known), max(one.most_header for one in known)

    def worked(self, seconds: float, in_round: float) -> None:
        """Note seconds of work; raise an error if there are more than the device gives."""
        in_day = self.day.worked(seconds)
        if in_round > self.allowance.round_seconds:
            raise LawError(f"this device works at most {self.allowance.round_seconds:g} seconds in a round")
        if in_day > self.allowance.day_seconds:
            raise LawError(f"this device works at most {self.allowance.day_seconds:g} seconds a day")
