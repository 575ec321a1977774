"""How long an `up` waits for the clients that it has asked, so that no slow one holds up all others."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cutlayer.core.checks import check, check_positive, is_number

GRACE = 0.2  # seconds that clients have at least after the others have answered


@dataclass(frozen=True, kw_only=True)
class Waits:
    """How long the rounds of a server wait, besides the deadline of each answer."""

    quorum: float = 1.0  # once this share of the asked clients has answered, the rest has as long again
    round_seconds: float | None = None  # from then on a round goes on with the clients that keep up
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        check(is_number(self.quorum) and 0 < self.quorum <= 1, "quorum", self.quorum, "a share above 0 and up to 1")
        if self.round_seconds is not None:
            check_positive("round_seconds", self.round_seconds)

    def round_end(self) -> float:
        """Return when a round that begins now has lasted long enough."""
        return math.inf if self.round_seconds is None else self.clock() + self.round_seconds


@dataclass(kw_only=True)
class Wait:
    """The wait of one `up`."""

    waits: Waits
    asked: int  # clients
    deadline: float  # seconds
    round_end: float
    others: bool  # whether other clients of the round are done, or wait for their turn
    pace: float | None = None  # seconds that half of several clients took in this round so far, at most
    why: str = field(init=False)  # a client is lost that has not answered by the end

    def __post_init__(self) -> None:
        self._begin = self.waits.clock()
        self._took: list[float] = []  # seconds, by answer

    def left(self, answers: int) -> float:
        """Return the seconds that are left now that so many answers have come."""
        now = self.waits.clock() - self._begin
        self._took += [now] * (answers - len(self._took))
        ends = {
            self.deadline: f"it gave no answer within {self.deadline:g} seconds",
            self._late(): "most others had answered long before",
            self._over(): f"the round had lasted {self.waits.round_seconds or 0:g} seconds",
        }
        end = min(ends)
        self.why = ends[end]
        return end - now

    @property
    def next_pace(self) -> float | None:
        """The pace of the round after this `up`; one client that is asked alone sets none."""
        half = self._took_by(0.5)
        return self.pace if half is None or self.asked == 1 else max(self.pace or 0.0, half)

    def _late(self) -> float:
        """Return when a client is late because the quorum has answered before."""
        quorum = self._took_by(self.waits.quorum)
        return math.inf if quorum is None else _as_long_again(quorum)

    def _over(self) -> float:
        """Return when a client is late because the round is over: not before half of the others have answered."""
        end = self.round_end - self._begin
        half = self._took_by(0.5) if self.asked > 1 else self.pace
        if half is not None:
            return max(end, _as_long_again(half))
        return end if self.others and self.asked == 1 else math.inf

    def _took_by(self, share: float) -> float | None:
        """Return the seconds after which this share of the asked clients had answered; None if it has not."""
        enough = max(1, math.ceil(share * self.asked))
        return self._took[enough - 1] if len(self._took) >= enough else None


def _as_long_again(seconds: float) -> float:
    return seconds + max(GRACE, seconds)
